"""A process that writes in a shared transaction: `shared_writer HANDLE TOPIC PARTITION BATCHES STOP_AFTER`.

It writes values `PARTITION-NUMBER`, ten a batch. After STOP_AFTER batches (-1: never) it says `halfway` and
goes on when it is told to by a line on stdin. In the end it says `done`, or what went wrong.
"""

import asyncio
import pickle
import sys
from base64 import b64decode

from semel.client.partition_writer import SharedWriter
from semel.errors import SemelError
from semel.wire.records import Record

RECORDS_A_BATCH = 10


async def write(encoded_handle: str, topic: str, partition: int, batches: int, stop_after: int) -> None:
    handle = pickle.loads(b64decode(encoded_handle))
    async with SharedWriter(handle) as writer:
        target = writer.partition(topic, partition)
        for batch in range(batches):
            if batch == stop_after:
                await writer.flush()
                print("halfway", flush=True)
                await asyncio.to_thread(sys.stdin.readline)
            first = batch * RECORDS_A_BATCH
            await target.write(
                [
                    Record(None, b"%d-%d" % (partition, number), 0, ())
                    for number in range(first, first + RECORDS_A_BATCH)
                ]
            )
        await writer.flush()
        print("done", target.records_written, flush=True)


if __name__ == "__main__":
    _, given_handle, given_topic, *numbers = sys.argv
    try:
        asyncio.run(write(given_handle, given_topic, *(int(number) for number in numbers)))
    except SemelError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(1)

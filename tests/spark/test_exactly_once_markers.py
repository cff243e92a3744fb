"""Checkpoints and markers that do not belong together: an error that says what to do, and no row is harmed.

What the targets do in their own ways runs on all of them; what only the marker decides, on one or two.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Final

import pytest
from crash_cases import keep_state
from spark_cases import Row, create_topic, produce_transaction
from target_cases import STATES, TARGETS, PostgresPipeline, TargetPipeline, adopt, group_offsets, into

from row_checks import check_rows
from semel.sinks.errors import FencedOut, MarkerMismatch
from semel.sinks.kafka import KafkaSink
from semel.sinks.sink import State, TransactionalSink
from semel.sinks.source_group import source_group_of
from semel.spark import PipelineQuery

# Two batches.
FEW: Final = 60


def fails(pipeline: TargetPipeline, match: str) -> None:
    before = pipeline.content()
    with pytest.raises(MarkerMismatch, match=f"{match}.*semel sink adopt"):
        pipeline.run()
    check_rows(pipeline.content(), before)


def roll_back_by_a_batch(pipeline: TargetPipeline) -> None:
    """Spark's logs are those of a batch ago; its state is not."""
    batch = pipeline.forget_last_commit()
    for path in (pipeline.checkpoint / "offsets").glob(f"*{batch}*"):
        path.unlink()


def end_where_it_was_committed(pipeline: TargetPipeline, batch: int) -> None:
    """As docs/spark.md says: with the offsets that the sink's group has at the source."""
    path = pipeline.checkpoint / "offsets" / str(batch)
    *header, planned = path.read_text().splitlines()
    offsets = json.loads(planned)
    assert planned == json.dumps(offsets), "only the numbers are to change"
    offsets[pipeline.source] |= group_offsets(source_group_of(pipeline.name), pipeline.bootstrap)
    path.write_text("\n".join([*header, json.dumps(offsets)]))
    path.with_name(f".{batch}.crc").unlink()


def copy_of(checkpoint: Path) -> Path:
    return Path(shutil.copytree(checkpoint, checkpoint.with_name("copy")))


def restore(pipeline: TargetPipeline, backup: Path) -> None:
    """In place of whatever is there."""
    shutil.rmtree(pipeline.checkpoint, ignore_errors=True)
    backup.rename(pipeline.checkpoint)


def run_on_after_a_backup(pipeline: TargetPipeline) -> Path:
    """The whole checkpoint, as it was a batch ago."""
    pipeline.feed(0, FEW)
    pipeline.run()
    backup, last = copy_of(pipeline.checkpoint), pipeline.last_commit()
    pipeline.feed(FEW, FEW + 20)
    run_in_one_batch(pipeline)
    assert pipeline.last_commit() == last + 1
    return backup


def run_in_one_batch(pipeline: TargetPipeline) -> PipelineQuery:
    return pipeline.run(df=pipeline.read(10 * FEW))


@into(*TARGETS, *STATES)
def test_a_batch_whose_commit_is_missing_in_sparks_log_is_skipped(pipeline: TargetPipeline) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    pipeline.forget_last_commit()
    pipeline.feed(FEW, 2 * FEW)
    assert pipeline.run().skipped == 1
    pipeline.check(2 * FEW)


@into(*TARGETS, "state0", "state", soak=["state2"])
def test_a_wiped_checkpoint_is_an_error_and_the_pipeline_begins_anew_once_it_is_adopted(
    pipeline: TargetPipeline,
) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    shutil.rmtree(pipeline.checkpoint)
    fails(pipeline, "wiped")
    pipeline.empty()
    pipeline.adopt(-1)
    pipeline.feed(FEW, 2 * FEW)
    pipeline.run()
    pipeline.check(2 * FEW)


@into("semel", "postgres", "state2", soak=["kafka", "mariadb", "state0", "state"])
def test_a_checkpoint_that_was_wiped_goes_on_once_it_is_restored(pipeline: TargetPipeline) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    backup = copy_of(pipeline.checkpoint)
    shutil.rmtree(pipeline.checkpoint)
    pipeline.feed(FEW, 2 * FEW)
    fails(pipeline, "wiped")
    restore(pipeline, backup)
    assert pipeline.run().skipped == 0
    pipeline.check(2 * FEW)


@into(*TARGETS, "state", "state2", soak=["state0"])
def test_a_lost_marker_is_an_error_and_the_pipeline_goes_on_once_it_is_adopted(
    pipeline: TargetPipeline,
) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    last = pipeline.last_commit()
    pipeline.lose_marker()
    fails(pipeline, "no marker.*deleted")  # though there is nothing to read
    pipeline.feed(FEW, 2 * FEW)
    fails(pipeline, "no marker.*deleted")
    pipeline.adopt(last)
    assert pipeline.run().skipped == 0
    pipeline.check(2 * FEW)


@into(*TARGETS, "state0", "state2", soak=["state"])
def test_a_checkpoint_that_was_rolled_back_by_a_batch_goes_on_if_it_reads_the_same_again(
    pipeline: TargetPipeline,
) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    roll_back_by_a_batch(pipeline)
    assert pipeline.run().skipped == 1
    pipeline.check(FEW)
    pipeline.feed(FEW, 2 * FEW)
    assert pipeline.run().skipped == 0
    pipeline.check(2 * FEW)


@into(*TARGETS, "state", soak=["state0", "state2"])
def test_a_checkpoint_that_was_rolled_back_by_a_batch_is_an_error_if_it_reads_on_differently(
    pipeline: TargetPipeline,
) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    roll_back_by_a_batch(pipeline)
    pipeline.feed(FEW, 2 * FEW)
    fails(pipeline, "other source offsets")
    end_where_it_was_committed(pipeline, pipeline.last_commit() + 1)
    assert pipeline.run().skipped == 1
    pipeline.check(2 * FEW)


@into("semel", "state0", "state", soak=["postgres", "state2"])
def test_a_backup_of_a_checkpoint_from_a_batch_ago_goes_on_if_it_reads_the_same_again(
    pipeline: TargetPipeline,
) -> None:
    restore(pipeline, run_on_after_a_backup(pipeline))
    assert run_in_one_batch(pipeline).skipped == 1
    pipeline.check(FEW + 20)
    pipeline.feed(FEW + 20, 2 * FEW)
    assert pipeline.run().skipped == 0
    pipeline.check(2 * FEW)


@into("postgres", "state2", soak=["kafka", "mariadb", "state0", "state"])
def test_a_backup_of_a_checkpoint_from_a_batch_ago_is_an_error_if_it_reads_on_differently(
    pipeline: TargetPipeline,
) -> None:
    restore(pipeline, run_on_after_a_backup(pipeline))
    pipeline.feed(FEW + 20, 2 * FEW)
    fails(pipeline, "other source offsets")
    end_where_it_was_committed(pipeline, pipeline.last_commit() + 1)
    assert pipeline.run().skipped == 1
    pipeline.check(2 * FEW)


@into(*TARGETS, "state0", soak=["state", "state2"])
def test_a_checkpoint_that_was_rolled_back_further_is_an_error_and_the_newer_one_goes_on(
    pipeline: TargetPipeline,
) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    newer, older = pipeline.checkpoint, copy_of(pipeline.checkpoint)
    pipeline.feed(FEW, 3 * FEW)
    pipeline.run()
    pipeline.checkpoint = older
    fails(pipeline, "rolled back")
    pipeline.checkpoint = newer
    pipeline.run()
    pipeline.check(3 * FEW)


@into(*TARGETS)
def test_a_checkpoint_that_was_copied_to_another_name_is_an_error_and_goes_on_under_its_own(
    pipeline: TargetPipeline,
) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    name, pipeline.name = pipeline.name, f"{pipeline.name}-copy"
    pipeline.feed(FEW, 2 * FEW)
    fails(pipeline, "no marker.*renamed")
    pipeline.name = name
    assert pipeline.run().skipped == 0
    pipeline.check(2 * FEW)


@into(*TARGETS)
def test_copies_of_a_checkpoint_run_on_under_one_name_until_they_read_differently(
    pipeline: TargetPipeline,
) -> None:
    pipeline.feed(0, FEW)
    pipeline.run()
    original, copy = pipeline.checkpoint, copy_of(pipeline.checkpoint)
    pipeline.feed(FEW, FEW + 20)
    for place, skipped in ((original, 0), (copy, 1)):
        pipeline.checkpoint = place
        assert pipeline.run().skipped == skipped
        pipeline.check(FEW + 20)
    pipeline.feed(FEW + 20, FEW + 30)
    pipeline.run()
    pipeline.feed(FEW + 30, FEW + 40)
    pipeline.checkpoint = original
    fails(pipeline, "other source offsets.*copied")
    pipeline.checkpoint = copy
    pipeline.run()
    pipeline.check(FEW + 40)


@into("semel", "postgres")
def test_all_sinks_are_asked_about_a_batch_before_one_of_them_writes_it(pipeline: TargetPipeline) -> None:
    second = f"{pipeline.name}-second"
    create_topic(pipeline.bootstrap, second, 2)

    def both() -> list[TransactionalSink]:
        return [pipeline.sink(), KafkaSink(pipeline.bootstrap, second)]

    pipeline.feed(0, FEW)
    pipeline.run(both())
    roll_back_by_a_batch(pipeline)
    # The first is to write it again, if it were for the first alone.
    pipeline.adopt(pipeline.last_commit())
    pipeline.feed(FEW, 2 * FEW)
    before = {topic: pipeline.content(topic) for topic in (None, second)}
    query = pipeline.start(both())
    with pytest.raises(MarkerMismatch, match=f"'{pipeline.name}/1' .*other source offsets"):
        query.awaitTermination()
    assert [sink.metrics.aborts for sink in query.sinks] == [1, 0], "the first had begun"
    assert {sink.state for sink in query.sinks} == {State.CLOSED}
    for topic, rows in before.items():
        check_rows(pipeline.content(topic), rows)


@into("semel", "postgres")
def test_a_sink_that_is_added_to_a_pipeline_that_has_run_holds_up_the_first_until_it_is_adopted(
    pipeline: TargetPipeline,
) -> None:
    added = f"{pipeline.name}-added"
    create_topic(pipeline.bootstrap, added, 2)

    def both() -> list[TransactionalSink]:
        return [pipeline.sink(), KafkaSink(pipeline.bootstrap, added)]

    pipeline.feed(0, FEW)
    pipeline.run()
    last = pipeline.last_commit()
    pipeline.feed(FEW, 2 * FEW)
    sinks = both()
    with pytest.raises(MarkerMismatch, match=f"'{pipeline.name}/1' .*no marker.*semel sink adopt"):
        pipeline.start(sinks)
    assert {sink.state for sink in sinks} == {State.CLOSED}
    pipeline.check(FEW)
    check_rows(pipeline.content(added), [])

    adopt(f"{pipeline.name}/1", last, "--topic", added, "--bootstrap", pipeline.bootstrap)
    pipeline.run(both())
    pipeline.check(2 * FEW)
    check_rows(pipeline.content(added), [b"v%d" % i for i in range(FEW, 2 * FEW)])


@into(*TARGETS)
def test_who_opens_the_sink_fences_the_driver_that_has_it(pipeline: TargetPipeline) -> None:
    pipeline.feed(0, FEW)
    first = pipeline.start(trigger="100 milliseconds")
    first.processAllAvailable()
    asyncio.run(_take(pipeline))
    pipeline.feed(FEW, 2 * FEW)
    with pytest.raises(FencedOut, match=f"process {os.getpid()} on "):
        first.awaitTermination(60)
    pipeline.check(FEW)
    pipeline.run()
    pipeline.check(2 * FEW)


@into("postgres")
@pytest.mark.parametrize("state_format", STATES.values())
def test_batches_that_a_database_has_lost_are_run_again(pipeline: TargetPipeline, state_format: int) -> None:
    """As docs/spark.md says: the checkpoint is taken back to what the database has."""
    assert isinstance(pipeline, PostgresPipeline)
    pipeline.spark = pipeline.spark.newSession()
    keep_state(pipeline.spark, state_format)

    def run() -> None:
        pipeline.run(df=pipeline.read().dropDuplicates(["value"]))

    pipeline.feed(0, FEW)
    run()
    last = pipeline.last_commit()
    kept = [pipeline.table, "semel_sinks"]
    for table in kept:
        pipeline.query(f"CREATE TABLE backup_{table} AS TABLE {table}")
    pipeline.feed(0, 3 * FEW)  # the state of then knows the first of them, and not the others
    run()
    for table in kept:
        pipeline.query(f"TRUNCATE {table}")
        pipeline.query(f"INSERT INTO {table} TABLE backup_{table}")
    pipeline.feed(3 * FEW, 4 * FEW)
    with pytest.raises(MarkerMismatch, match="never committed here"):
        run()
    take_back(pipeline.checkpoint, last)
    run()
    pipeline.check(4 * FEW)


def take_back(checkpoint: Path, batch: int) -> None:
    """Spark has finished this one, and planned the next."""
    for log, last in (("commits", batch), ("offsets", batch + 1)):
        later = [path for path in (checkpoint / log).iterdir() if _batch_of(path) > last]
        assert later
        for path in later:
            path.unlink()


def _batch_of(path: Path) -> int:
    """Of a file of Spark's logs, `7`, or of its checksum, `.7.crc`; -1 for what is of no batch."""
    name = path.name.removeprefix(".").removesuffix(".crc")
    return int(name) if name.isdecimal() else -1


async def _take(pipeline: TargetPipeline) -> None:
    async with pipeline.sink() as other:
        await other.open(pipeline.name)


@into(*TARGETS)
def test_batches_without_rows_are_committed_like_others(pipeline: TargetPipeline) -> None:
    """Aborted records move the offsets, and give batches without a row: batch 0, and others between."""

    def run() -> tuple[int, int]:
        query = pipeline.run()
        return query.batches, query.rows

    feed_in_vain(pipeline)
    assert run() == (1, 0)
    pipeline.feed(0, FEW)
    assert run() == (2, FEW)
    feed_in_vain(pipeline)
    assert run() == (1, 0)
    pipeline.forget_last_commit()
    assert pipeline.run().skipped == 1
    pipeline.check(FEW)


def feed_in_vain(pipeline: TargetPipeline) -> None:
    rows = [Row(b"aborted", b"k", partition=i % 3) for i in range(30)]
    produce_transaction(
        pipeline.bootstrap, pipeline.source, rows, commit=False, transactional_id=pipeline.name
    )

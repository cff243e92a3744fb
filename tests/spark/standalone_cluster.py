"""A cluster of Spark's own kind on this machine: a master and workers, each at a loopback address of its own.

Spark makes a copy of a slow task on another host only. To `local-cluster`, where all executors are at one
address, that means never.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Final, Self

import pyspark
from broker_process import free_port

from semel.spark.java import find_java, home_for_spark

SPARK_HOME: Final = Path(pyspark.__file__).parent
MASTER_HOST: Final = "127.0.0.1"
WORKER_HOSTS: Final = ("127.0.0.2", "127.0.0.3")
START_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.1


class StandaloneCluster:
    """A master and two workers with so many cores each; a context, in which they run."""

    def __init__(self, directory: Path, cores: int = 1) -> None:
        self._directory = directory
        self._cores = cores
        self._port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        directory.mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"spark://{MASTER_HOST}:{self._port}"

    def __enter__(self) -> Self:
        """Once the master listens; a driver waits for the workers to join it."""
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self) -> None:
        self._start("master.Master", "--host", MASTER_HOST, "--port", str(self._port))
        self._await_master()
        for host in WORKER_HOSTS:
            work = self._directory / f"work-{host}"
            room = ("--cores", str(self._cores), "--memory", "1g", "--work-dir", str(work))
            self._start("worker.Worker", "--host", host, *room, self.url)

    def __exit__(self, *_: object) -> None:
        """Executors end when their workers do."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(START_TIMEOUT_S)
        print(f"--- log of the cluster ---\n{self.log[-6000:]}")

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")

    def _start(self, role: str, *arguments: str) -> None:
        environment = {
            **os.environ,
            "JAVA_HOME": str(home_for_spark(find_java())),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_DIRS": str(self._directory / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            # Its pages would be there for other machines.
            "SPARK_LOCAL_IP": MASTER_HOST,
        }
        # Any port for the page that nobody looks at.
        arguments = ("--webui-port", "0", *arguments)
        command = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{role}", *arguments]
        with (self._directory / "log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=self._directory,
                )
            )

    def _await_master(self) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((MASTER_HOST, self._port), 1).close()
                return
            except OSError:
                if time.monotonic() > give_up or self._processes[0].poll() is not None:
                    raise AssertionError(f"Spark's master does not listen; its log:\n{self.log}") from None
                time.sleep(POLL_S)

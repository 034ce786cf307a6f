"""Asks the executors of a session what they have: Python, packages, and a way to the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from .address import this_host
from .tasks import cores, results_of_tasks

#: Each task takes so long at least, so that every executor gets some.
_TASK_SECONDS: Final = 0.2
#: Executors that start late take part in the second round.
_ROUNDS: Final = 2


class ExecutorReport(BaseModel):
    """What the Python of one executor has."""

    model_config = ConfigDict(frozen=True)

    host: str
    folder: str
    python: str
    #: The version of each package; None if it cannot be imported.
    packages: Mapping[str, str | None]
    #: Why the store cannot be reached; None if it can, or if none was named.
    error: str | None


def session(master: str, settings: Mapping[str, str]) -> SparkSession:
    """Return a session on this master, or on the server of Spark Connect if it is ``sc://...``."""
    remote = master.startswith("sc://")
    builder = SparkSession.builder.remote(master) if remote else SparkSession.builder.master(master)
    for name, value in ({} if remote else {"spark.ui.enabled": "false"} | dict(settings)).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def executor_reports(
    spark: SparkSession, packages: Sequence[str], url: str | None, timeout: float
) -> Sequence[ExecutorReport]:
    """Return a report of each executor that runs tasks of this session.

    Args:
        packages: The packages to import there.
        url: The address of the store to open there; None opens none.
        timeout: In seconds. Then the job is cancelled, which raises.
    """
    host = this_host()

    # Pickled with its code, because executors may lack this module.
    def look(number: int) -> str:
        import importlib.metadata
        import json
        import os
        import platform
        import socket
        import threading

        found: dict[str, Any] = {"host": socket.gethostname(), "folder": os.getcwd(), "error": None, "packages": {}}
        found["python"] = platform.python_version()
        for package in packages:
            try:
                module = importlib.import_module(package)
                found["packages"][package] = getattr(module, "__version__", None) or importlib.metadata.version(package)
            except ImportError:
                found["packages"][package] = None
        if url is not None and None not in found["packages"].values():
            from readergroup import ReaderGroupError, connect
            from readergroup.spark.address import StoreAddress

            try:
                address = StoreAddress.of(url).model_copy(update={"host": host})
                with connect(address.usable(), must_exist=True) as client:
                    client.streams.list()
            except ReaderGroupError as error:
                found["error"] = str(error)
        threading.Event().wait(_TASK_SECONDS)
        return json.dumps(found)

    reports = {}
    with _cancelled_after(spark, timeout):
        for _ in range(_ROUNDS):
            for found in results_of_tasks(spark, look, 4 * cores(spark), "string"):
                report = ExecutorReport.model_validate_json(found)
                reports[report.host, report.folder] = report
    return [reports[key] for key in sorted(reports)]


@contextmanager
def _cancelled_after(spark: SparkSession, timeout: float) -> Iterator[None]:
    context = getattr(spark, "_sc", None)
    # An infinite time is too long for the system.
    seconds = min(timeout, threading.TIMEOUT_MAX)
    timer = threading.Timer(seconds, spark.interruptAll if context is None else context.cancelAllJobs)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

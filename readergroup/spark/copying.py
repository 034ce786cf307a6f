"""Copies a stream in the tasks of Spark: events go from store to task to store, never through the driver."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Final

from pyspark.sql import SparkSession

from synchronizer import (
    AlreadyExistsError,
    NotFoundError,
    StoreUnavailableError,
    SystemClock,
    TruncatedError,
    UnsupportedError,
    open_store,
)
from synchronizer.callables import checked
from synchronizer.threads.background import BackgroundThread
from synchronizer.threads.flag import Flag

from ..client import Client
from ..streams.config import StreamInfo
from ..streams.copy_parts import CopyPart, OnProgress, copied_bytes, copy_part
from ..streams.data.places import Place
from .address import StoreAddress
from .connection import backoff_of, client_of
from .planning import packed
from .tasks import cores, results_of_tasks

#: One task copies several small segments, up to this size.
TASK_BYTES: Final = 64 * 1024 * 1024
#: How often the progress is reported.
_PROGRESS_SECONDS: Final = 1.0
#: Errors that a retry cannot avoid.
_FINAL_ERRORS: Final = (AlreadyExistsError, NotFoundError, TruncatedError, UnsupportedError)


def copy(
    spark: SparkSession,
    url: str,
    source: str,
    target: str,
    *,
    start: Place | None = None,
    end: Place | None = None,
    on_progress: OnProgress | None = None,
) -> StreamInfo:
    """Copy the events between two cuts to a new stream, as ``client.streams.copy(..., by="events")`` does.

    Tasks copy segments in parallel, each segment in one task. An interrupted copy continues where it was, whichever
    process began it.

    Args:
        spark: The session whose tasks copy.
        url: The address of the store. All processes of Spark must reach it.
        source: The stream to copy.
        target: The new stream.
        start: Where to start. Default: the head.
        end: Where to end. Default: the tail.
        on_progress: Called about once a second with the bytes copied and the bytes in all, in a thread of its own. Its
            error is raised when the running tasks have ended; call again to complete the copy.

    Returns:
        The new stream.

    Raises:
        NotFoundError: The store or the source does not exist.
        AlreadyExistsError: The target exists and is no copy of the source.
        UnsupportedError: The processes of Spark do not share this store.
    """
    on_progress = None if on_progress is None else checked(on_progress, "on_progress", "copied, total")
    address = StoreAddress.of(url)
    clock = SystemClock()
    with closing(open_store(url, clock=clock, must_exist=True)) as store, Client(store, clock=clock) as client:
        copies = client.streams.copies
        state = copies.begin(source, target, by="events", start=start, end=end)
        if state.is_being_copied:
            with copies.told_what_is_gone(state):
                parts = copies.parts(state)
            with _progress(client, parts, on_progress), copies.told_what_is_gone(state):
                _copy_in_tasks(spark, address, parts)
            if on_progress is not None:
                total = sum(part.size for part in parts)
                on_progress(total, total)
        return copies.publish(state)


def _copy_in_tasks(spark: SparkSession, address: StoreAddress, parts: Sequence[CopyPart]) -> None:
    groups = packed(parts, TASK_BYTES, cores(spark))

    def copy_group(number: int) -> bytes | None:
        try:
            client = client_of(address)
            for part in groups[number]:
                deque(copy_part(client.store, part, lambda: backoff_of(client)), maxlen=0)
        except _FINAL_ERRORS as error:
            return pickle.dumps(error)
        return None

    for error in results_of_tasks(spark, copy_group, len(groups), "binary"):
        if error is not None:
            raise pickle.loads(error)


@contextmanager
def _progress(client: Client, parts: Sequence[CopyPart], tell: OnProgress | None) -> Iterator[None]:
    """Report the progress of the tasks, as the store shows it, in the block. Raise the error of ``tell`` after it."""
    if tell is None:
        yield
        return
    stop, failures = Flag(), list[Exception]()

    def tell_or_stop(copied: int, total: int) -> None:
        try:
            tell(copied, total)
        except Exception as error:
            failures.append(error)
            stop.set()

    thread = BackgroundThread(partial(_follow, client, parts, tell_or_stop, stop), name="copy-progress", stopping=stop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def _follow(client: Client, parts: Sequence[CopyPart], tell: OnProgress, stop: threading.Event) -> None:
    total = sum(part.size for part in parts)
    copied = dict.fromkeys(range(len(parts)), 0)
    while not client.clock.wait(stop, _PROGRESS_SECONDS):
        for number, part in enumerate(parts):
            if copied[number] < part.size and not stop.is_set():
                with suppress(StoreUnavailableError):
                    copied[number] = copied_bytes(client.store, part)
        tell(sum(copied.values()), total)

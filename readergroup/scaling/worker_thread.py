"""A worker of a pool in a thread of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from synchronizer import ClosedError, ReaderGroupError
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread

from ..telemetry.logs import LogAbout
from .in_hand import InHand
from .starting_worker import new_worker
from .worker import Task

_logger = get_logger(__name__)


class ThreadWorker:
    """A worker thread. It calls ``on_end`` just before it ends."""

    def __init__(self, task: Task[Any], reader_id: str, on_end: Callable[[], object]) -> None:
        self.reader_id = reader_id
        self._logger = LogAbout(_logger, group=task.group.name, reader=reader_id)
        self.pid = os.getpid()
        self.stopping = False
        #: The error that ended the worker; None after the end of the data or a stop.
        self.failure: BaseException | None = None
        self._left = False
        self._on_end = on_end
        self._worker = new_worker(task, reader_id)
        self._thread = BackgroundThread(self._run, name=f"worker {reader_id}")

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def left_in_hand(self) -> Sequence[InHand]:
        """Nothing: an event cannot kill a thread without killing the process."""
        return ()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the worker to end after the event in hand."""
        self.stopping = True
        self._worker.stop()

    def end(self) -> None:
        """Take the worker out of the group now. Its thread ends when the handler returns."""
        self._left = True
        try:
            self._worker.leave()
        except ReaderGroupError as error:
            self._logger.warning(
                "worker %s could not leave its group; its lease will expire: %s", self.reader_id, error
            )

    def _run(self) -> None:
        try:
            self._worker.run(lambda: None)
        except ClosedError as error:
            if not self._left:
                self.failure = error
        except BaseException as error:
            self.failure = error
        finally:
            self._on_end()

    def __repr__(self) -> str:
        return f"ThreadWorker({self.reader_id!r})"

"""Writes the lines of the corpus to the stream, no faster than they are read and only as far as the demo allows."""

from __future__ import annotations

import threading
from typing import Final

from synchronizer import Clock, Deadline, DeadlineExceededError

from ..client import Client
from .corpus import Corpus, LineSerializer

#: How many lines are written between two checks of the limits.
_STEP: Final = 200
_PATIENCE_SECONDS: Final = 120.0


class Feeder:
    """A thread that writes. ``backlog`` is the initial limit of lines that are written and not yet read."""

    def __init__(self, client: Client, stream: str, corpus: Corpus, *, backlog: int) -> None:
        self.written = 0
        self.failure: BaseException | None = None
        self._client = client
        self._stream = stream
        self._corpus = corpus
        self._backlog = backlog
        self._gate = threading.Condition()
        self._read = 0
        self._may_write = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="demo writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def let(self, *, read: int | None = None, may_write: int | None = None, backlog: int | None = None) -> None:
        """Set how many lines were read, how many may be written in all, and how many may be written but not read."""
        with self._gate:
            self._read = self._read if read is None else read
            self._may_write = self._may_write if may_write is None else may_write
            self._backlog = self._backlog if backlog is None else backlog
            self._gate.notify_all()

    def stop(self) -> None:
        """End the thread, however far it is."""
        with self._gate:
            self._stopping = True
            self._gate.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._client.writer(self._stream, serializer=LineSerializer()) as writer:
                for name in self._corpus.files:
                    for number, line in enumerate(self._corpus.lines(name)):
                        if (self.written % _STEP == 0 or self.written >= self._may_write) and not self._wait():
                            return
                        writer.write((number, line), name)
                        self.written += 1
        except BaseException as error:
            self.failure = error

    def _wait(self) -> bool:
        """Wait until another line may be written; return False to stop."""
        deadline = Deadline(self._clock, _PATIENCE_SECONDS)
        with self._gate:
            while not self._stopping and not self._is_open:
                if deadline.passed:
                    raise DeadlineExceededError(
                        "the written lines were not read in time", written=self.written, read=self._read
                    )
                self._gate.wait(deadline.remaining(1.0))
            return not self._stopping

    @property
    def _is_open(self) -> bool:
        return self.written < self._may_write and self.written - self._read < self._backlog

    @property
    def _clock(self) -> Clock:
        return self._client.clock

"""Waiting for what nothing tells of, and for calls that wait themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def until(condition: Callable[[], object], what: str = "what is awaited", *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


class CallInThread(Generic[T]):
    """A call in a thread of its own, which begins at once, and what comes of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.result: T | Exception | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.result = error

    def ended(self) -> T | Exception:
        self._thread.join(60)
        assert self.result is not None
        return self.result

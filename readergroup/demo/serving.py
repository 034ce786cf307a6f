"""``make serve-demo``: a group that works, is split and loses readers, for the page of ``readergroup serve``."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any, Final

from synchronizer import NotFoundError, ReaderGroupError, SystemClock

from ..client import Client, connect
from ..scaling.policy import ReaderScalingPolicy
from ..scaling.pool import ReaderPool
from ..streams.config import ScalingPolicy, number_of
from ..streams.event import Event

STREAM: Final = "demo/orders"
GROUP: Final = "billing"
_EVENTS_PER_SECOND: Final = 400
_HANDLE_SECONDS: Final = 0.004
_MAX_SEGMENTS: Final = 8
#: What happens one after the other, with a pause of this time.
_SCRIPT_SECONDS: Final = 15.0

_pause: Final = threading.Event()  # never set


def handle(_: Event[bytes]) -> None:
    _pause.wait(_HANDLE_SECONDS)


class Load:
    """Writes to a stream and reads it with a pool of processes, and lets things happen, until `stop`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._clock = SystemClock()
        self._rng = random.Random(0)
        self._stopping = threading.Event()
        client.streams.create(STREAM, scaling=ScalingPolicy.fixed(3))
        group = client.groups.create(GROUP, streams=[STREAM], reader_timeout_seconds=5.0)
        readers = ReaderScalingPolicy(min_readers=3, max_readers=6, target_lag_seconds=2, cooldown_seconds=10)
        self.pool: ReaderPool[Any] = group.pool(handle, readers=readers, workers="process")
        self._threads = [threading.Thread(target=run) for run in (self.pool.run, self._write, self._run_script)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self.pool.stop()
        for thread in self._threads:
            thread.join()

    def split(self) -> None:
        segments = list(self._client.streams.info(STREAM).segments)
        self._client.streams.scale(STREAM, split=[number_of(self._rng.choice(segments))])

    def merge(self) -> None:
        segments = list(self._client.streams.info(STREAM).segments)
        first = self._rng.randrange(len(segments) - 1)
        self._client.streams.scale(STREAM, merge=[number_of(each) for each in segments[first : first + 2]])

    def kill(self) -> None:
        """Kill a reader that owns something."""
        if workers := self.pool.workers:
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(workers).pid, signal.SIGKILL)

    def _write(self) -> None:
        with self._client.writer(STREAM) as writer:
            while not self._clock.wait(self._stopping, 0.1):
                for _ in range(_EVENTS_PER_SECOND // 10):
                    writer.write(b"order", routing_key=f"customer-{self._rng.randrange(1_000)}")

    def _run_script(self) -> None:
        script = self._script()
        while not self._clock.wait(self._stopping, _SCRIPT_SECONDS):
            with suppress(NotFoundError, ReaderGroupError):
                next(script)()

    def _script(self) -> Iterator[Callable[[], None]]:
        while True:
            is_full = len(self._client.streams.info(STREAM).segments) >= _MAX_SEGMENTS
            yield self.merge if is_full else self.split
            yield self.kill


def main() -> None:
    with TemporaryDirectory() as folder, connect(f"sqlite:///{folder}/demo.db") as client:
        load = Load(client)
        load.start()
        try:
            command = [sys.executable, "-m", "readergroup.cli", "--url", client.store.url, "serve", "--allow-writes"]
            subprocess.run([*command, *sys.argv[1:]], check=False)
        except KeyboardInterrupt:
            pass
        finally:
            load.stop()


if __name__ == "__main__":
    main()

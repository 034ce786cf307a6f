"""Events that are retried later, in a simulation: who fails over them, and that none is lost, or retried without need.

The pools read the streams of the scenario as a group of their own, so each event comes to both groups.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import readergroup as rg
from readergroup.retries.waiting import DelayLog
from readergroup.streams.data.block import parse_blocks
from synchronizer import Appended

from .world import Done, Process

if TYPE_CHECKING:
    from .actors import Application
    from .auditor import Auditor

GROUP: Final = "retrying"
STREAM: Final = "shop/again"
DEAD_LETTERS: Final = "shop/dead"
DELAYS: Final = (0.2, 1.0)
#: What the auditor of the other group leaves to `Retries`.
PLACES: Final = (f"group/{GROUP}", f"data/{STREAM}/", f"data/{DEAD_LETTERS}/", "retries/")
#: How often a handler fails.
_FAILS: Final = 0.25

#: Which event was delivered, and after how many deliveries that failed.
_Delivery = tuple[str, int]


class Retries:
    """Which deliveries failed, and what the product has made of them."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._processes: list[Process] = []
        self._failed: dict[_Delivery, list[float]] = defaultdict(list)
        self._returned: Counter[_Delivery] = Counter()
        #: By "key:number": handled, or a dead letter.
        self._ended: set[str] = set()

    def begin(self, process: Process) -> None:
        self._processes.append(process)

    @property
    def missing(self) -> str | None:
        """What somebody is still to handle."""
        if not any(process.runs for process in self._processes):
            return None
        left = sorted({f"{key}:{number}" for key, number in self._auditor.stored} - self._ended)
        return f"{len(left)} events were never handled nor set aside, among them {left[0]}" if left else None

    # ------------------------------------------------------------------ what applications do

    def delivered(self, process: Process, event: rg.Event[bytes]) -> None:
        what, failures = _delivery(event.headers)
        failed = self._failed[what or str(event.pointer), failures - 1]
        if failures and self._agree:
            waited = process.clock_rate * (self._auditor.world.simulation.now - min(failed, default=float("inf")))
            if round(waited, 6) < DELAYS[failures - 1]:
                self._auditor.broken("S3", f"{process.name} retries {event.raw!r} after {waited:.3f} s")

    def failed(self, event: rg.Event[bytes]) -> None:
        what, failures = _delivery(event.headers)
        self._failed[what or str(event.pointer), failures].append(self._auditor.world.simulation.now)

    def handled(self, event: rg.Event[bytes]) -> None:
        self._ended.add(event.raw.decode())

    @property
    def _agree(self) -> bool:
        """Whether all wall clocks show the same."""
        return len({(process.clock_rate, process.clock_offset) for process in self._processes}) == 1

    # ------------------------------------------------------------------ what reaches the store

    def done(self, done: Done) -> None:
        if done.verb != "append" or not isinstance(done.result, Appended) or not done.data:
            return
        if done.segment.startswith("retries/"):
            self._check_waiting(done)
        elif not done.segment.startswith("group/"):
            blocks, _ = parse_blocks(done.segment, done.result.offset, done.data)
            for block in blocks:
                for raw, headers in zip(block.data, block.headers, strict=True):
                    if done.segment.startswith(f"data/{STREAM}/"):
                        self._check_returned(done, headers)
                    else:
                        self._ended.add(rg.PydanticSerializer(rg.DeadLetter).loads(raw).data.decode())

    def _check_waiting(self, done: Done) -> None:
        """No event waits twice at once, in whichever process its handler failed."""
        store = self._auditor.world.memory
        waiting = Counter(frame.event.pointer for log in DelayLog.all_of(store, GROUP) for frame in log.all())
        for pointer, times in waiting.items():
            if times > 1:
                self._auditor.broken("S3", f"{pointer} waits {times} times, the last by {done.process.name}")

    def _check_returned(self, done: Done, headers: Mapping[str, bytes]) -> None:
        """An event comes again at most as often as it has failed."""
        what, failures = _delivery(headers)
        assert what is not None
        self._returned[what, failures] += 1
        if self._returned[what, failures] > len(self._failed[what, failures - 1]):
            self._auditor.broken("S3", f"{done.process.name} returns {what} after {failures} failures once too often")


def _delivery(headers: Mapping[str, bytes]) -> tuple[str | None, int]:
    """Of which event it is a retry, and how many deliveries of that have failed."""
    if rg.RETRY_OF not in headers:
        return None, 0
    return headers[rg.RETRY_OF].decode(), len(json.loads(headers["readergroup-retry"])["errors"])


def retry_later(application: Application) -> None:
    """Handle events in a pool, begun again when it fails, and fail over some of them."""
    _Retrier(application).work()


class _Retrier:
    def __init__(self, application: Application) -> None:
        self._application = application
        self._process = application.process
        self._rng = application.rng
        self._retries = application.auditor.retries
        self._retry = rg.DelayedRetry(delays=DELAYS, retry_stream=STREAM, dead_letters=DEAD_LETTERS)

    def work(self) -> None:
        self._retries.begin(self._process)
        group = self._application.insist(self._found)
        while not self._application.run.over:
            concurrency, readers = self._rng.choice((1, 1, 4)), self._rng.choice((1, 2))
            new_pool = partial(group.pool, self._handle, readers=readers, concurrency=concurrency, retry=self._retry)
            pool = self._application.insist(new_pool)
            self._process.spawn(partial(self._stop_at_end, pool), "stopping")
            try:
                pool.run(drain_timeout=self._rng.choice((0.1, 5.0)))
            except rg.ReaderGroupError as error:
                self._process.world.say(self._process.name, f"begins again after {error}")
                self._process.sleep(0.1)

    def _found(self) -> rg.ReaderGroup:
        client, scenario = self._application.client, self._application.run.scenario
        for stream in (STREAM, DEAD_LETTERS):
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(scenario.segments))
        return client.groups.create(
            GROUP,
            streams=(*scenario.streams, STREAM),
            reader_timeout_seconds=scenario.timeout,
            position_interval_seconds=scenario.position_interval,
        )

    def _stop_at_end(self, pool: rg.ReaderPool[bytes]) -> None:
        while not self._application.run.over:
            self._process.sleep(0.5)
        pool.stop()

    def _handle(self, event: rg.Event[bytes]) -> None:
        self._retries.delivered(self._process, event)
        self._process.sleep(
            self._rng.random() * (0.02 if self._application.run.sealed else self._application.actor.pause)
        )
        if self._rng.random() < _FAILS:
            self._retries.failed(event)
            raise _HandlerFailed
        self._retries.handled(event)


class _HandlerFailed(Exception):
    """What the handler depends on is away."""

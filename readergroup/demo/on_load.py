"""Runs a day of load through a stream and a pool that both scale by themselves, and checks every event."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from synchronizer import SystemClock

from ..client import Client, connect
from ..scaling.policy import ReaderScalingPolicy
from ..streams.config import ScalingPolicy
from ..streams.event import Event
from ..streams.writing.writer import EventWriter
from .day import Day, Moment
from .load_picture import draw
from .run import DemoFailedError, PoolThread

STREAM: Final = "demo/orders"
GROUP: Final = "order-handlers"
#: Events per second that one segment should take, and that one reader handles.
TARGET: Final = 100.0
_READER_RATE: Final = 1.5 * TARGET
_KEYS: Final = 500
_TICK_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 0.5
#: How long the load stays at its peak, or in the night, until the stream has as many segments as it needs.
_PATIENCE_SECONDS: Final = 120.0


@dataclass
class DayResult:
    """The result of a day. ``differences`` is empty if every event was read, those of a key in order."""

    moments: list[Moment] = field(default_factory=list)
    #: When the stream was scaled, and to how many segments.
    scales: list[tuple[float, int]] = field(default_factory=list)
    written: int = 0
    repeated: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def segments(self) -> list[int]:
        """The numbers of segments, one after the other."""
        return [1, *(segments for _, segments in self.scales)]

    @property
    def most_readers(self) -> int:
        return max((moment.readers for moment in self.moments), default=0)


class _Handled:
    """What the readers have handled. Each event takes as long as work on it would."""

    def __init__(self, clock: SystemClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._never = threading.Event()
        self._next: Counter[str] = Counter()
        self.read = 0
        self.repeated = 0
        self.differences: list[str] = []

    def handle(self, event: Event[bytes]) -> None:
        self._clock.wait(self._never, 1 / _READER_RATE)
        key, _, number = event.data.decode().partition(" ")
        with self._lock:
            self.read += 1
            expected = self._next[key]
            if int(number) < expected:
                self.repeated += 1
                return
            if int(number) > expected:
                self.differences.append(f"{key}: event {number} was read before event {expected}")
            self._next[key] = int(number) + 1

    def compare(self, written: Counter[str]) -> list[str]:
        missing = {key: count - self._next[key] for key, count in written.items()}
        return self.differences + [f"{key}: {count} events were not read" for key, count in missing.items() if count]


def run_day(folder: Path, console: Console, day: Day | None = None, *, most: int = 8, least: int = 2) -> DayResult:
    """Write a day of load to a stream with at most ``most`` segments, until it has ``least`` in the night."""
    with connect(f"sqlite:///{folder.resolve() / 'demo.db'}") as client:
        return _Run(client, console, day or Day(), most, least).run()


def draw_day(result: DayResult, path: Path) -> None:
    """Draw the picture of a day."""
    draw(result.moments, result.scales, TARGET, path)


class _Run:
    def __init__(self, client: Client, console: Console, day: Day, most: int, least: int) -> None:
        self._client, self._console = client, console
        self._day, self._most, self._least = day, most, least
        self._clock = SystemClock()
        self._handled = _Handled(self._clock)
        self._written: Counter[str] = Counter()
        self._result = DayResult()
        self._look_at = 0.0
        self._never = threading.Event()

    def run(self) -> DayResult:
        # Pravega's windows of minutes, compressed like the day: 1, 2.5, 5 and 10 seconds.
        policy = ScalingPolicy.by_event_rate(TARGET, max_segments=self._most, window_seconds=1)
        self._client.streams.create(STREAM, scaling=policy)
        group = self._group = self._client.groups.create(GROUP, streams=[STREAM], position_interval_seconds=0.25)
        self._console.print(f"A stream that scales by itself, for {TARGET:.0f} events/s per segment, and its readers.")
        readers = ReaderScalingPolicy(max_readers=self._most, target_lag_seconds=1, cooldown_seconds=3)
        self._pool = PoolThread(group.pool(self._handled.handle, readers=readers))
        self._began_at = self._clock.monotonic()
        self._pool.start()
        try:
            with self._client.writer(STREAM) as writer:
                self._write_day(writer)
            self._client.streams.seal(STREAM)
            self._wait_until(lambda: self._pool.done, "the readers reach the end")
        finally:
            self._pool.stop()
        self._result.written = self._written.total()
        self._result.repeated = self._handled.repeated
        self._result.differences = self._handled.compare(self._written)
        return self._result

    def _write_day(self, writer: EventWriter[bytes]) -> None:
        day, at, due, waited, before = self._day, 0.0, 0.0, 0.0, self._now()
        while at < day.end_at:
            self._look(day.load(at))
            now = self._now()
            passed, before = now - before, now
            due += passed * day.load(at) * TARGET
            while due >= 1:
                key = f"customer-{self._result.written % _KEYS}"
                writer.write(f"{key} {self._written[key]}".encode(), routing_key=key)
                self._written[key] += 1
                self._result.written += 1
                due -= 1
            segments = self._result.segments
            if at < day.evening_at <= at + passed and segments[-1] < self._most:
                waited += passed  # the sun stands still until the stream has grown
            elif at < day.end_at <= at + passed and segments[-1] > self._least:
                waited += passed
            else:
                at += passed
            if waited > _PATIENCE_SECONDS:
                raise DemoFailedError("the stream did not scale in time", segments=segments)
            self._clock.wait(self._never, _TICK_SECONDS)

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        ends_at = self._now() + _PATIENCE_SECONDS
        while not condition():
            if self._now() > ends_at:
                raise DemoFailedError(f"this did not happen in time: {what}")
            self._look(0.0)
            self._clock.wait(self._never, _TICK_SECONDS)

    def _now(self) -> float:
        return self._clock.monotonic() - self._began_at

    def _look(self, load: float) -> None:
        """Note what is so now."""
        self._pool.check()
        if self._now() < self._look_at:
            return
        self._look_at = self._now() + _LOOK_SECONDS
        state = self._client.streams.fetch_state(STREAM)
        at, segments = self._now(), len(state.current)
        if segments != self._result.segments[-1]:
            self._console.print(f"{at:5.1f} s  {self._result.segments[-1]} -> {segments} segments")
            self._result.scales.append((at, segments))
        self._result.moments.append(
            Moment(
                at=at,
                load=load * TARGET,
                written=self._result.written,
                read=self._handled.read,
                segments=segments,
                readers=len(self._group.online_readers()),
                lag_seconds=self._group.lag().seconds,
            )
        )

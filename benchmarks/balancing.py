"""Four readers of equal speed share 16 segments whose keys are skewed as in Zipf's law, by count and by load.

Time is virtual, so that the figures depend on no machine: everything else is real, from the log of the group to the
coordinator's measurements.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple

import readergroup as rg
from synchronizer import open_store
from synchronizer.testing import ManualClock

from .figure import Figure, Result
from .stores import Store

STREAM: Final = "bench/events"
SEGMENTS: Final = 16
READERS: Final = 4
KEYS: Final = 1_000
#: Of the law: the share of the key of rank n is proportional to n to the power of minus this.
EXPONENT: Final = 1.1
EVENTS_PER_SECOND: Final = 200
#: How much of the stream one reader can handle. Together, the readers are a quarter faster than the writer.
READ_PER_SECOND: Final = 1.25 * EVENTS_PER_SECOND / READERS
WRITING_SECONDS: Final = 240
_EVENT: Final = bytes(100)
#: When it is given up.
_END_SECONDS: Final = 3_600


class Drained(NamedTuple):
    #: From the end of the writing until the last event is handled.
    seconds: float
    longest_lag: int
    records: int
    releases: int


def balance(store: Store) -> Iterator[Result]:
    """How long a lag lasts if readers get equal shares of the segments, or of their load."""
    with store.fresh() as url:
        by_count = work_off(url, "count")
    with store.fresh() as url:
        by_load = work_off(url, "load")
    yield Figure(
        what=f"Zipf keys, {SEGMENTS} segments, {READERS} readers: time until the lag is worked off, by load",
        value=by_load.seconds / by_count.seconds,
        unit="×",
        target=0.5,
        better="less",
        beside=(
            f"{by_load.seconds:.0f} s instead of {by_count.seconds:.0f} s by count, after "
            f"{WRITING_SECONDS} s of writing; the lag was at most {by_load.longest_lag:,} events "
            f"instead of {by_count.longest_lag:,}; "
            f"records of weights: {by_load.records}; segments moved by them: {by_load.releases - by_count.releases}"
        ),
        note="In virtual time. Together, the readers handle 25 % more events per second than the writer writes.",
    )


def work_off(url: str, by: Literal["count", "load"]) -> Drained:
    """Write for a while as the readers read, then wait until they have read all."""
    clock, keys = ManualClock(), _keys()
    with rg.Client(open_store(url, clock=clock), clock=clock) as client, rg.connect(url) as writing:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(SEGMENTS))
        group = client.groups.create("readers", streams=[STREAM], balance=by)
        heard: Counter[str] = Counter()
        group.synchronizer.on_update(
            lambda applied: heard.update(() if applied.update is None else [applied.update.tag])
        )
        readers = [group.reader(f"r{number}") for number in range(READERS)]
        handled = written = longest_lag = 0
        with writing.writer(STREAM) as writer:
            for second in range(_END_SECONDS):
                if second < WRITING_SECONDS:
                    for key in keys[written : written + EVENTS_PER_SECOND]:
                        writer.write(_EVENT, routing_key=f"key-{key}")
                    written += EVENTS_PER_SECOND
                    writer.flush()
                handled += sum(_read(reader, round(READ_PER_SECOND)) for reader in readers)
                for _ in range(4):
                    clock.advance(0.25)
                    group.coordinator.step()
                longest_lag = max(longest_lag, written - handled)
                if handled == written and second >= WRITING_SECONDS:
                    break
        group.synchronizer.poll_listeners()
    return Drained(second + 1 - WRITING_SECONDS, longest_lag, heard["record_weights"], heard["release"])


def _keys() -> Sequence[int]:
    """The recorded load: the rank of each event's key."""
    weights = list(accumulate((rank + 1) ** -EXPONENT for rank in range(KEYS)))
    return random.Random(58).choices(range(KEYS), cum_weights=weights, k=EVENTS_PER_SECOND * WRITING_SECONDS)


def _read(reader: rg.Reader[bytes], most: int) -> int:
    """Handle what one reader can handle in a second, and return how many events that was."""
    left = most
    while left and (batch := reader.read_batch(max_events=left, timeout=0)):
        left -= len(batch)
    return most - left

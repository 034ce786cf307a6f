"""Reads all groups of a store now and then, for everyone who looks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final

from synchronizer import ClosedError, NotFoundError, ReaderGroupError
from synchronizer.counting import Latencies
from synchronizer.liveness.keeper import Keeper
from synchronizer.loggers import get_logger

from ..aio.calls import News, wait_until_set
from ..client import Client
from ..group.updater import is_of_another_stream
from ..outbox.outbox import Outbox
from .audience import Audience
from .flow import FlowMeter, WriteMeter
from .history import GroupHistory
from .letters import LetterStreams
from .measuring import GroupMeter, expired, silent_seconds
from .retries import WaitingRetries
from .sample import GroupSample, Sample

#: How long sampling goes on after the last look. Longer than the usual interval of a scraper.
LINGER_SECONDS: Final = 150.0
#: Sampling takes at most this part of the time, however long a sample takes.
BUSY: Final = 0.25
#: A sample that is older than this number of intervals is replaced before it is shown.
STALE: Final = 3
#: How long someone who looks waits for the first sample. One that takes longer than the last by this much waits for a
#: store that is away.
PATIENCE_SECONDS: Final = 5.0
#: How often shared states, streams and the delays of retries are listed, and how many states.
STATES_SECONDS: Final = 30.0
MAX_STATES: Final = 200
#: The kinds of shared states: the first part of their names in the store.
KINDS: Final = (
    "state",
    "map",
    "set",
    "config",
    "counter",
    "queue",
    "membership",
    "election",
    "lock",
    "semaphore",
    "barrier",
)

_logger = get_logger(__name__)


class Sampler:
    """Samples all groups in one thread while someone looks, and not at all while no one does."""

    def __init__(self, client: Client, *, interval_seconds: float, outbox: Outbox[Any] | None) -> None:
        self.client = client
        #: The newest sample. Replaced as a whole.
        self.sample = Sample()
        #: How often the store failed, by the class of the error.
        self.errors: Counter[str] = Counter()
        self.samples = 0
        self.letters = LetterStreams(client)
        self.retries = WaitingRetries(client.store)
        #: How long reads of the logs of groups took.
        self.fetches = Latencies()
        #: Called with each sample, in the sampler's thread, before others see it.
        self.prepare: Callable[[Sample], None] = lambda _: None
        self._interval_seconds = interval_seconds
        self._outbox = outbox
        self._clock = client.clock
        self._looked_at = float("-inf")
        self._begun_at = float("inf")  # of the sample that is being taken
        self._states_at = float("-inf")
        self._closed = False
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._histories: dict[str, GroupHistory] = {}
        self._meters: dict[str, tuple[GroupMeter, FlowMeter]] = {}
        self._writes = WriteMeter(client.store)
        #: Rung after each sample.
        self.audience = Audience()
        self._keeper = Keeper(
            self._step,
            name="sampler of the web view",
            clock=self._clock,
            logger=_logger,
            on_end=self._end,
            max_pause_seconds=interval_seconds,
        )

    # ------------------------------------------------------------------ for viewers and requests

    def look(self) -> Sample:
        """Return the newest sample, and keep sampling for a while."""
        if os.getpid() != self._process_id:
            raise ClosedError("the web view belongs to the parent process; make a client and a view in each worker")
        self._looked_at = self._clock.monotonic()
        if not self._closed:
            self._keeper.start()
        return self.sample

    async def recent(self) -> Sample:
        """Return a sample, and wait a few seconds for one that is not stale. A stale one has an error."""
        news = News()
        self.audience.add(news)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        while True:
            ring = news.next_ring()
            sample = self.look()
            left = deadline - loop.time()
            if not self.is_stale(sample) or self._closed:
                return sample
            if left <= 0:
                return replace(sample, error=sample.error or "the store does not answer")
            await wait_until_set(ring, left)

    def is_stale(self, sample: Sample) -> bool:
        """Return whether the sample is so old that the store must be away, or that no one has looked for a while."""
        now, slack = self._clock.monotonic(), 2 * sample.seconds
        is_old = now - sample.at_monotonic > STALE * self._pause(sample) + slack
        return is_old or now - self._begun_at > PATIENCE_SECONDS + slack

    def history(self, group: str) -> GroupHistory:
        with self._lock:
            return self._histories.setdefault(group, GroupHistory())

    def count(self, error: Exception) -> str:
        """Count an error of the store, and return its text."""
        with self._lock:
            self.errors[type(error).__name__] += 1
        return str(error)

    def errors_by_kind(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self.errors)

    def close(self) -> None:
        """Stop sampling. Does not wait."""
        self._closed = True
        self._looked_at = float("-inf")
        self._keeper.wake()
        self.audience.ring()

    # ------------------------------------------------------------------ the thread

    def _step(self) -> float | None:
        if self._closed or self._clock.monotonic() - self._looked_at > LINGER_SECONDS:
            return None
        self._begun_at = self._clock.monotonic()
        try:
            self.take()
        finally:
            self._begun_at = float("inf")
        return self.sample.at_monotonic + self._pause(self.sample)

    def _pause(self, sample: Sample) -> float:
        """Return the seconds to wait after the sample."""
        busy = 0.0 if sample.error is not None else sample.seconds * (1 / BUSY - 1)
        return max(self._interval_seconds, busy)

    def take(self) -> None:
        """Take a sample in this thread."""
        began = self._clock.monotonic()
        before, error = self.sample, None
        groups: dict[str, GroupSample] = {}
        unreadable: dict[str, str] = {}
        states, left_out = before.states, before.states_left_out
        letters = before.letters
        lists = began >= self._states_at
        try:
            if lists:
                self.retries.find()
            self.retries.count()
            for name in self._names():
                if self._closed:
                    return
                try:
                    groups[name] = self._group(name)
                except ReaderGroupError as failed:
                    if isinstance(failed, NotFoundError) and not is_of_another_stream(failed):  # deleted meanwhile
                        continue
                    if failed.retryable or isinstance(failed, ClosedError):
                        raise  # the store is away: do not wait for it once per group
                    unreadable[name] = self.count(failed)
                    if name in before.groups:
                        groups[name] = replace(before.groups[name], error=unreadable[name])
            if lists:
                states, left_out = self._list_states()
                self.letters.find()
                self._states_at = began + STATES_SECONDS
            letters = self.letters.count()
        except ClosedError:
            self._closed = True
            error = "the client is closed"
        except ReaderGroupError as failed:
            error = self.count(failed)
            if before.error is None:
                _logger.warning("the web view cannot read the store, and tries again: %s", error)
        if error is None and before.error is not None:
            _logger.info("the web view reads the store again")
        if error is not None:
            groups = {name: replace(each, error=error) for name, each in before.groups.items()}
        with self._lock:
            for name in [name for name in self._histories if name not in groups]:
                del self._histories[name]
        for name in [name for name in self._meters if name not in groups]:
            del self._meters[name]
        if error is None:
            streams = _streams(groups)
            self._writes.forget_unseen(streams)
            self.client.streams.metadata.let_go(_streams(before.groups) - streams)
        now = self._clock.monotonic()
        sample = Sample(
            groups=groups,
            unreadable=unreadable,
            states=states,
            states_left_out=left_out,
            letters=letters,
            written=self._writes.written(),
            outbox=self._outbox_lag(),
            at=self._clock.time(),
            at_monotonic=now,
            seconds=now - began,
            error=error,
        )
        self.samples += 1
        self.prepare(sample)
        self.sample = sample
        self.audience.ring()

    def _names(self) -> Sequence[str]:
        try:
            return list(self.client.groups.list())
        except ReaderGroupError as error:
            if error.retryable or isinstance(error, ClosedError):
                raise
            # A group that cannot be read hides no other one.
            return [log.removeprefix("group/") for log in self.client.store.list("group/")]

    def _group(self, name: str) -> GroupSample:
        group = self.client.groups.get(name)
        meters = self._meters.get(name)
        if meters is None or meters[0].group is not group:  # deleted and created again
            meters = self._meters[name] = GroupMeter(self.client, group, self.fetches), FlowMeter(group, self._writes)
        meter, flow = meters
        flow.follow()
        measured = meter.measure()
        at = self._clock.time()
        history = self.history(name)
        history.see(measured.state, measured.revision, at)
        history.see_lag(measured.lag)
        retries = self.retries.of(name)
        dead = expired(measured.state, silent_seconds(measured.state, measured.renewed_at, self._clock.monotonic()))
        return GroupSample(name, measured.state, measured.revision, measured.lag, at, retries, flow.see(measured), dead)

    def _outbox_lag(self) -> tuple[int, float] | None:
        if self._outbox is None:
            return None
        try:
            lag = self._outbox.lag()
        except Exception as error:  # the application's database, or function that connects, is no part of the store
            self.count(error)
            return None
        return lag.events, lag.seconds

    def _list_states(self) -> tuple[Mapping[str, int], int]:
        store = self.client.store
        names = [name for kind in KINDS for name in store.list(f"{kind}/")]
        infos = store.infos(names[:MAX_STATES])
        return {name: infos[name].length - infos[name].start_offset for name in names if name in infos}, max(
            0, len(names) - MAX_STATES
        )

    def _end(self, closed: ClosedError | None) -> None:
        for _, flow in self._meters.values():
            flow.rest()
        self._writes.rest()
        self.audience.ring()


def _streams(groups: Mapping[str, GroupSample]) -> Set[str]:
    """Return the streams of the groups."""
    return {stream for each in groups.values() for stream in each.state.streams}

"""Watches a schedule from outside: the group's log, where the group stands, and whether the store answers.

What it watches goes straight to the store. It also looks whether the store answers those that come through the proxy.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

import readergroup as rg
from synchronizer import Appended
from synchronizer.log.entries import MARK, Mark
from tests.chaos.diaries import STALL_SECONDS, Interval
from tests.chaos.evidence import Cut, Entry, Truncation
from tests.readergroup.reader_processes import GROUP

_CUT_SECONDS: Final = 0.1
_PROBE_SECONDS: Final = 0.05
_PROBE: Final = "probe"
_PROXIED_PROBE: Final = "probe-through-the-proxy"
#: What a call raises while the store is away.
AWAY: Final = (rg.StoreUnavailableError, rg.DeadlineExceededError, rg.OutcomeUnknownError)


class Observer:
    """Some threads, from ``start`` to ``stop``. What they found is complete after that."""

    def __init__(self, url: str, proxied_url: str) -> None:
        self.log: list[Entry] = []
        self.cuts: list[Cut] = []
        self.truncations: list[Truncation] = []
        self.stalls: list[Interval] = []
        #: The same, for those that come through the proxy.
        self.proxied_stalls: list[Interval] = []
        self.troubles: list[str] = []
        self._client = rg.connect(url)
        self._client.store.create(_PROBE)
        self._proxied = rg.connect(proxied_url) if proxied_url != url else None
        self._group = self._client.groups.get(GROUP)
        self._feed = self._group.synchronizer.transitions()
        self._end = threading.Event()
        steps = [self._follow, self._look, lambda: self._probe(self._client, self.stalls)]
        if self._proxied is not None:
            proxied = self._proxied
            proxied.store.create(_PROXIED_PROBE)
            steps.append(lambda: self._probe(proxied, self.proxied_stalls, _PROXIED_PROBE))
        self._threads = [threading.Thread(target=self._repeat, args=(step,), daemon=True) for step in steps]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
        if self._proxied is not None:
            self._proxied.close()

    def _repeat(self, step: Callable[[], None]) -> None:
        try:
            while not self._end.is_set():
                try:
                    step()
                except AWAY:
                    self._end.wait(_PROBE_SECONDS)
            step()
        except Exception:
            self.troubles.append(f"the observer failed:\n{traceback.format_exc()}")

    def _follow(self) -> None:
        """Take up the entries that are new."""
        self._group.synchronizer.wait_for_growth(_PROBE_SECONDS)
        self._group.synchronizer.fetch_updates()
        now = time.monotonic()
        self.log += [Entry(now, transition) for transition in self._feed.drain()]

    def _look(self) -> None:
        """See where the group stands, and where its log begins."""
        offsets = {segment: at for cut in self._group.stream_cuts().values() for segment, at in cut.offsets.items()}
        self.cuts.append(Cut(time.monotonic(), offsets))
        segment = self._group.synchronizer.segment
        found = self._client.store.attributes(segment, names=[MARK]).get(MARK)
        start = 0 if found is None else Mark.decode(segment, found).next_offset
        self.truncations.append(Truncation(time.monotonic(), start))
        self._end.wait(_CUT_SECONDS)

    def _probe(self, client: rg.Client, stalls: list[Interval], segment: str = _PROBE) -> None:
        """See whether the store takes an append, and how long that and the pause after it really last."""
        sent_at = time.monotonic()
        while not self._is_taken(client, segment):
            self._end.wait(0.01)
        answered_at = time.monotonic()
        self._end.wait(_PROBE_SECONDS)
        now = time.monotonic()
        if now - sent_at > STALL_SECONDS + _PROBE_SECONDS:
            # The pause is long only where the machine stood still.
            stalls.append(Interval(sent_at, now if now - answered_at > 2 * _PROBE_SECONDS else answered_at))

    def _is_taken(self, client: rg.Client, segment: str) -> bool:
        try:
            return isinstance(client.store.append(segment, b"."), Appended)
        except rg.StoreUnavailableError:
            return False

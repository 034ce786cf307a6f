"""Watches a schedule from outside: the group's log, where the group stands, and whether the store answers."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

import readergroup as rg
from tests.chaos.diaries import STALL_SECONDS, Interval
from tests.chaos.evidence import Cut, Entry, Truncation
from tests.readergroup.reader_processes import GROUP

_CUT_SECONDS: Final = 0.1
_PROBE_SECONDS: Final = 0.05
_PROBE: Final = "probe"


class Observer:
    """Three threads, from ``start`` to ``stop``. What they found is complete after that."""

    def __init__(self, url: str) -> None:
        self.log: list[Entry] = []
        self.cuts: list[Cut] = []
        self.truncations: list[Truncation] = []
        self.stalls: list[Interval] = []
        self.troubles: list[str] = []
        self._client = rg.connect(url)
        self._client.store.create(_PROBE)
        self._group = self._client.groups.get(GROUP)
        self._feed = self._group.synchronizer.transitions()
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(step,), daemon=True)
            for step in (self._follow, self._look, self._probe)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _repeat(self, step: Callable[[], None]) -> None:
        try:
            while not self._end.is_set():
                step()
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
        start = self._client.store.info(self._group.synchronizer.segment).start_offset
        self.truncations.append(Truncation(time.monotonic(), start))
        self._end.wait(_CUT_SECONDS)

    def _probe(self) -> None:
        """See whether the store takes an append, and how long that and the pause after it really last."""
        sent_at = time.monotonic()
        while True:
            try:
                self._client.store.append(_PROBE, b".")
                break
            except rg.StoreUnavailableError:
                continue
        self._end.wait(_PROBE_SECONDS)
        now = time.monotonic()
        if now - sent_at > STALL_SECONDS + _PROBE_SECONDS:
            self.stalls.append(Interval(sent_at, now))

"""Lets befall a host what is planned to befall it, at its times."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterable
from typing import NamedTuple

from tests.chaos.hosts import Fault, Host
from tests.chaos.plan import Mishap


class Suffered(NamedTuple):
    fault: Fault
    begun: float
    healed: float


class Mishaps:
    """One thread, from ``start`` to ``stop``. What was suffered is complete after that."""

    def __init__(self, planned: Iterable[Mishap], host: Host) -> None:
        self.suffered: list[Suffered] = []
        self.troubles: list[str] = []
        self.planned = sorted(planned)
        self._host = host
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mishaps", daemon=True)
        self._begun = 0.0

    def start(self, begun: float) -> None:
        """The times of the plan count from ``begun`` on."""
        self._begun = begun
        self._thread.start()

    def stop(self) -> None:
        """End what the host suffers now, and let nothing befall it any more."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            for at, fault, seconds in self.planned:
                if self._end.wait(max(0.0, self._begun + at - time.monotonic())):
                    return
                self._suffer(fault, seconds)
        except Exception:
            self.troubles.append(f"the mishaps failed:\n{traceback.format_exc()}")

    def _suffer(self, fault: Fault, seconds: float) -> None:
        begun = time.monotonic()
        with self._host.suffer(fault):
            self._end.wait(seconds)
        self.suffered.append(Suffered(fault, begun, time.monotonic()))

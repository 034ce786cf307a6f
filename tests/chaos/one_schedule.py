"""One schedule, in a process that was forked for it: plays it, and leaves its report in the folder."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from tests.chaos.director import play
from tests.chaos.hosts import host
from tests.chaos.plan import plan
from tests.chaos.report import Report

OUTPUT: Final = "output.txt"


def main(seed: int, folder: Path, store: str) -> None:
    """Whoever waits for it may send SIGUSR1, to hear where it is, and kill its group, which its processes join."""
    os.setpgrp()
    with (folder / OUTPUT).open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1)
    begun = time.monotonic()
    with host(store, folder) as own:
        evidence = play(plan(seed, own.kind), folder, own)
    Report.of(seed, folder, time.monotonic() - begun, evidence, store=store).save()

"""``python -m tests.chaos.one_schedule SEED FOLDER STORE``: play a schedule, and leave its report in the folder."""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from pathlib import Path

from tests.chaos.director import play
from tests.chaos.hosts import host
from tests.chaos.plan import plan
from tests.chaos.report import Report


def main(seed: int, folder: Path, store: str) -> None:
    begun = time.monotonic()
    with host(store, folder) as own:
        evidence = play(plan(seed, own.kind), folder, own)
    Report.of(seed, folder, time.monotonic() - begun, evidence, store=store).save()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

"""``python -m tests.chaos.one_schedule SEED FOLDER``: play one schedule, and leave its report in the folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.chaos.director import play
from tests.chaos.plan import plan
from tests.chaos.report import Report


def main(seed: int, folder: Path) -> None:
    begun = time.monotonic()
    evidence = play(plan(seed), folder)
    Report.of(seed, folder, time.monotonic() - begun, evidence).save()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

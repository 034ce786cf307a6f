"""Running a part of the simulation in a process of its own, from a test."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.places import ROOT


def run_apart(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this module with these arguments to its end.

    It has a process of its own, because the order in which sets are iterated is part of what a seed decides.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)

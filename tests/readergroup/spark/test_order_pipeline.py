"""The sample pipeline comes to the truth, also when its parts are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import SAMPLES

PIPELINE = SAMPLES / "order_pipeline" / "pipeline.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [2, *(pytest.param(kills, marks=pytest.mark.broad) for kills in (0, 10))])
def test_its_result_is_the_truth(java: None, tmp_path: Path, kills: int) -> None:
    command = [sys.executable, str(PIPELINE), str(tmp_path), "--kills", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert "equal to the truth: True" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    assert done.stdout.count("kill -9") <= kills
    assert (tmp_path / "revenue.png").stat().st_size > 1000

"""The sample pipeline comes to the truth, also when its parts are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import SAMPLES

PIPELINE = SAMPLES / "order_pipeline" / "pipeline.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kills", "orders"), [(1, 2_000), *(pytest.param(kills, 9_000, marks=pytest.mark.broad) for kills in (0, 10))]
)
def test_its_result_is_the_truth(java: None, tmp_path: Path, kills: int, orders: int) -> None:
    command = [sys.executable, str(PIPELINE), str(tmp_path), "--kills", str(kills)]
    environment = {**os.environ, "ORDERS": str(orders)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environment)
    log = tmp_path / "pipeline.log"  # of its parts
    said = done.stdout + done.stderr + (log.read_text()[-5000:] if log.exists() else "")
    assert "equal to the truth: True" in done.stdout, said
    assert done.returncode == 0
    assert done.stdout.count("kill -9") <= kills
    assert (tmp_path / "revenue.png").stat().st_size > 1000

"""Every sample runs as it stands, says what it promises, and imports from `readergroup` alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import SAMPLES
from tests.seeds import some_and_broad
from tests.waiting import PATIENCE_SECONDS

#: What each sample prints when what it shows holds.
PROMISES = {
    "quickstart": "{'id': 9}",
    "typed_events": "damaged b'not an order'",
    "order_per_key": "3000 events of 7 keys, each key in order: True",
    "batches": "100000 events",
    "commit_by_hand": "1000 orders, each once",
    "checkpoint": "2000 orders, each counted once",
    "takeover": "the second read 699 orders, from order 301 to order 999",
    "hand_over": "reader-2 has 2 segments",
    "scale_by_notification": "50000 events read by 2 readers",
    "end_of_data": "500 events",
    "pool": "1 order set aside",
    "asyncio_worker": "200 mails, each once: True",
    "shared_state": "100 pears sold, 0 left",
    "shared_config": "2 -> 4 workers",
    "membership": "reckless is dead",
    "durable_queue": "1000 mails, each once and in order: True",
    "leader_election": "'written by first', leads: False, accepted: False",
    "audit": "4 transfers, each once; together 0",
    "own_notifier": "300 visits",
}


def test_every_sample_has_a_promise_and_a_line_in_the_table() -> None:
    names = {sample.stem for sample in SAMPLES.glob("*.py")}
    assert names == PROMISES.keys()
    table = (SAMPLES / "README.md").read_text()
    assert [name for name in names if f"`{name}.py`" not in table] == []


@pytest.mark.parametrize("name", some_and_broad(PROMISES))
def test_sample(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SAMPLES / f"{name}.py"), str(tmp_path)]
    # Spawned workers import the sample's functions from its own folder.
    environment = {**os.environ, "PYTHONPATH": str(SAMPLES)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout


@pytest.mark.parametrize("name", PROMISES)
def test_sample_imports_from_readergroup_alone(name: str) -> None:
    tree = ast.parse((SAMPLES / f"{name}.py").read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = ("readergroup", "synchronizer", "notifications")
    ours = {module for module in modules if module.partition(".")[0] in packages}
    assert ours == {"readergroup"}

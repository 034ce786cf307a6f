"""`samples/two_hosts`: the link of one host is cut, and the other takes its segments over.

On PostgreSQL the hosts are network namespaces, where the user may make them; else, and on NATS, two processes.
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests.places import SAMPLES
from tests.waiting import PATIENCE_SECONDS, busyness

SAMPLE = SAMPLES / "two_hosts" / "two_hosts.py"
#: The sample's reader timeout, what L1 adds, and as much again; more on a machine that is busy.
TAKEOVER_SECONDS = 2.0 + 2.0 + 4.0


def test_the_other_host_takes_over_on_postgresql(postgres_url: str) -> None:
    _see_takeover(f"{postgres_url}&connect_timeout=60")  # longer than a busy machine takes to accept


def test_the_other_host_takes_over_on_nats(nats_url: str) -> None:
    _see_takeover(nats_url, "--without-namespaces")


def _see_takeover(url: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, SAMPLE, url, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (taken := re.search(r"south has all segments after ([\d.]+) s", done.stdout)), done.stdout
    assert float(taken[1]) < TAKEOVER_SECONDS * busyness()
    assert "each has two again" in done.stdout
    assert (count := re.search(r"(\d+) orders written, (\d+) read", done.stdout)), done.stdout
    assert count[1] == count[2]

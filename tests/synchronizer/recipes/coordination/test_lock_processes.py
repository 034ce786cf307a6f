"""A lock among processes that are killed, and stopped for longer than their lease lasts, while they hold it or wait."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from tests.readergroup.reader_processes import kill, receive, running
from tests.stopping import stopped
from tests.synchronizer.recipes.coordination.lock_processes import come_and_go, stays
from tests.waiting import until

TIMEOUT = 1.0


def test_under_kills_and_stops_no_two_hold_a_lock_and_its_tokens_grow(shared_store_url: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    with ExitStack() as closing:
        processes = {}
        for owner in "abcd":
            diary = tmp_path / f"{owner}.jsonl"
            processes[owner] = closing.enter_context(running(come_and_go, shared_store_url, owner, diary, TIMEOUT))
        for _, connection in processes.values():
            assert receive(connection) == "ready"

        def go_on() -> None:
            """Until all who live have held the lock again."""
            before = len(stays(tmp_path))
            until(
                lambda: (
                    {stay.owner for stay in sorted(stays(tmp_path), key=lambda stay: stay.token)[before:]}
                    >= processes.keys()
                ),
                "the lock goes round",
            )

        go_on()
        kill(processes.pop("a")[0])
        go_on()
        before = len(stays(tmp_path))
        with stopped(processes[rng.choice([*processes])][0], shared_store_url):
            until(lambda: len(stays(tmp_path)) > before + 20, "the others go on")
        go_on()

    in_order = sorted(stays(tmp_path), key=lambda stay: stay.token)
    assert len({stay.token for stay in in_order}) == len(in_order)
    assert all(before.to_time <= after.from_time for before, after in pairwise(in_order))

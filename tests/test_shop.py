"""`samples/shop`: its books balance, whichever of its processes are killed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from samples.shop.ledger import Book, Entry, Ledger, mistakes
from tests.places import ROOT


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("sqlite", 7), *(pytest.param(kind, 60, marks=pytest.mark.broad) for kind in ("sqlite", "postgresql"))],
)
def test_the_books_balance_whatever_is_killed(
    kind: str, seconds: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = kind if kind == "sqlite" else request.getfixturevalue("database_url")
    command = [sys.executable, "-m", "samples.shop", str(tmp_path), "--seconds", str(seconds), "--store", store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the books balance" in done.stdout
    assert (found := re.search(r"(\d+) orders, (\d+) invoices, (\d+) events; (\d+) kills", done.stdout)), done.stdout
    orders, invoices, events, kills = map(int, found.groups())
    assert orders == invoices == events > kills >= 6
    assert (tmp_path / "shop.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("numbers", "mistake"),
    [
        ((1, 2, 3), None),
        ((1, 3), "the invoices of ann: 1 missing, 0 too many"),
        ((1, 2, 2, 3), "the invoices of ann: 0 missing, 1 too many"),
        ((2, 1, 3), "the invoices of ann are in another order"),
    ],
)
def test_the_ledger_finds_what_is_wrong(numbers: Sequence[int], mistake: str | None) -> None:
    def book(numbers: Sequence[int]) -> Book:
        return Book({"ann": [Entry(number, 10 * number) for number in numbers]}, [0.0 for _ in numbers])

    right = book((1, 2, 3))
    assert mistakes(Ledger(right, book(numbers), right)) == ([mistake] if mistake else [])

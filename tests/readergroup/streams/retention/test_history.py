"""The stored form of a stream's history."""

from __future__ import annotations

import msgpack
import pytest

from readergroup.streams.retention.history import History, Sample
from synchronizer import Map, UnknownUpdateError
from tests.golden import golden

HISTORY = History(
    "a1", (Sample(float("-inf"), 0, Map({0: 0, 1: 0})), Sample(1_700_000_000.5, 300, Map({1: 100, 2: 0, 3: 2**40})))
)


def test_a_history_is_written_and_read_as_in_its_first_release() -> None:
    stored = golden("retention-history-v1.msgpack", HISTORY.encode())
    assert stored == HISTORY.encode()
    assert History.decode(stored) == HISTORY


def test_the_history_of_a_newer_release_is_refused() -> None:
    with pytest.raises(UnknownUpdateError, match="newer release"):
        History.decode(msgpack.packb([2, "a1", []]))

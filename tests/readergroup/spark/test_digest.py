"""The digest of events."""

from __future__ import annotations

import random

import pyarrow
from hypothesis import given
from hypothesis import strategies as st

from readergroup.spark.digest import EventsDigest

Rows = list[tuple[bytes, str | None]]

ROWS = st.lists(st.tuples(st.binary(max_size=8), st.none() | st.text(max_size=3)), max_size=30)


def digest_of(rows: Rows, *cuts: int) -> str:
    """The digest of the rows, of parts of them if there are cuts."""
    total = EventsDigest()
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(rows)], strict=True):
        part = EventsDigest()
        events = pyarrow.array([event for event, _ in rows[start:end]], pyarrow.binary())
        part.add(events, pyarrow.array([key for _, key in rows[start:end]], pyarrow.string()))
        total += part
    return str(total)


@given(ROWS, st.randoms(), st.lists(st.integers(0, 30), max_size=3))
def test_it_does_not_depend_on_order_or_division(rows: Rows, rng: random.Random, cuts: list[int]) -> None:
    shuffled = list(rows)
    rng.shuffle(shuffled)
    assert digest_of(shuffled, *(min(cut, len(rows)) for cut in cuts)) == digest_of(rows)


@given(ROWS, ROWS)
def test_other_events_have_another(rows: Rows, others: Rows) -> None:
    def multiset(rows: Rows) -> list[tuple[bytes, bool, str]]:
        return sorted((event, key is None, key or "") for event, key in rows)

    assert (digest_of(rows) == digest_of(others)) == (multiset(rows) == multiset(others))


def test_events_and_keys_do_not_change_places() -> None:
    rows: Rows = [(b"a", "x"), (b"b", "y")]
    swapped: list[Rows] = [[(b"a", "y"), (b"b", "x")], [(b"x", "a"), (b"y", "b")], [(b"a", None), (b"b", None)]]
    for others in swapped:
        assert digest_of(others) != digest_of(rows)
    assert digest_of([(b"a", None), (b"a", None)]) != digest_of([(b"b", None), (b"b", None)])


def test_a_column_of_keys_without_a_key_is_the_same_as_none() -> None:
    without = EventsDigest()
    without.add(pyarrow.array([b"a"], pyarrow.binary()), None)
    assert str(without) == digest_of([(b"a", None)]) and str(without).startswith("1-")


def test_headers_count_in_any_order() -> None:
    def of(*headers: dict[str, bytes] | None) -> str:
        found = EventsDigest()
        kind = pyarrow.map_(pyarrow.string(), pyarrow.binary())
        rows = pyarrow.array([each if each is None else list(each.items()) for each in headers], kind)
        found.add(pyarrow.array([b"a"] * len(headers), pyarrow.binary()), None, rows)
        return str(found)

    assert of({"x": b"1", "y": b"2"}) == of({"y": b"2", "x": b"1"}) != of({"x": b"2", "y": b"1"})
    assert of(None) == of({}) == digest_of([(b"a", None)]) != of({"x": b""})

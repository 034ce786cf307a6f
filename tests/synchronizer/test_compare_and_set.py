"""A cell finds out what became of a change whose answer was lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synchronizer import ANY, StoreUnavailableError
from synchronizer.compare_and_set import Cell, CellChange, Outcome, append_at, change_together, remove_attributes
from synchronizer.stores.memory import MemoryStore
from synchronizer.testing import FailingStore


@pytest.fixture
def store() -> FailingStore:
    store = FailingStore(MemoryStore())
    store.create("s")
    return store


def data_of(store: FailingStore, segment: str = "s") -> bytes:
    return store.inner.read(segment, 0, 1_000)


def test_a_change_succeeds_while_the_attribute_is_what_is_known(store: FailingStore) -> None:
    one, two = Cell(store, "s", "a"), Cell(store, "s", "a")
    assert one.change(b"1", b"first") is Outcome.STORED
    assert (one.stored, one.length) == (b"1", 5)
    assert two.change(b"2", b"second") is Outcome.CONFLICT
    assert (two.stored, two.length) == (b"1", 5)
    assert two.change(None, b"third") is Outcome.STORED
    assert one.load() is None
    assert data_of(store) == b"firstthird"


def test_the_next_change_finds_out_that_a_lost_one_is_stored(store: FailingStore) -> None:
    cell = Cell(store, "s", "a")
    store.lose_answers()
    with pytest.raises(StoreUnavailableError):
        cell.change(b"1", b"first")
    assert cell.is_in_doubt(b"1") and not cell.is_in_doubt(b"2")
    assert cell.change(b"2", b"second") is Outcome.STORED_EARLIER
    assert cell.stored == b"1" and not cell.is_in_doubt(b"1")
    assert cell.change(b"2", b"second") is Outcome.STORED
    assert data_of(store) == b"firstsecond"


def test_the_same_change_again_is_not_stored_twice(store: FailingStore) -> None:
    cell = Cell(store, "s", "a")
    store.lose_answers()
    with pytest.raises(StoreUnavailableError):
        cell.change(b"1", b"data")
    assert cell.change(b"1", b"data") is Outcome.STORED_EARLIER
    assert cell.change(b"1", b"data") is Outcome.STORED_EARLIER
    assert data_of(store) == b"data"


def test_a_lost_request_is_replaced_by_the_next_change(store: FailingStore) -> None:
    cell = Cell(store, "s", "a")
    store.lose_requests()
    with pytest.raises(StoreUnavailableError):
        cell.change(b"1", b"first")
    assert cell.change(b"2", b"second") is Outcome.STORED
    assert data_of(store) == b"second"


def test_what_was_refused_is_not_in_doubt(store: FailingStore) -> None:
    """Another process may write the same value: it would be taken for a change of this one."""
    cell = Cell(store, "s", "a")
    store.fail_appends()
    with pytest.raises(StoreUnavailableError):
        cell.change(b"1")
    assert not cell.is_in_doubt(b"1")
    assert Cell(store, "s", "a").change(b"1") is Outcome.STORED
    assert cell.change(b"2") is Outcome.CONFLICT
    assert Cell(store, "s", "a", b"1").change(b"2") is Outcome.STORED
    assert Cell(store, "s", "a", b"1").change(b"2") is Outcome.CONFLICT


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_change_is_found_out(store: FailingStore, moment: str) -> None:
    cell = Cell(store, "s", "a")

    def interrupt(_: object) -> None:
        setattr(store, moment, None)
        raise KeyboardInterrupt

    setattr(store, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        cell.change(b"1", b"data")
    assert cell.is_in_doubt(b"1")
    assert cell.change(b"1", b"data") is (Outcome.STORED if moment == "before" else Outcome.STORED_EARLIER)
    assert cell.stored == b"1"
    assert data_of(store) == b"data"


def test_a_segment_can_be_appended(store: FailingStore) -> None:
    store.create("source")
    store.append("source", b"all of it")
    store.seal("source")
    cell = Cell(store, "s", "a")
    store.lose_answers()
    with pytest.raises(StoreUnavailableError):
        cell.change(b"1", source="source")
    assert cell.change(b"1", source="source") is Outcome.STORED_EARLIER
    assert data_of(store) == b"all of it"


def test_cells_are_changed_together_or_not_at_all(store: FailingStore) -> None:
    store.create("t")
    one, two = Cell(store, "s", "a"), Cell(store, "t", "a")
    assert change_together(store, [CellChange(one, b"1", b"one"), CellChange(two, b"1", b"two")])
    one.load()
    assert not change_together(
        store, [CellChange(one, b"2", b"more"), CellChange(two, b"2", b"more")]
    )  # of two nothing is known
    assert (data_of(store), data_of(store, "t")) == (b"one", b"two")
    two.load()
    store.lose_answers()
    with pytest.raises(StoreUnavailableError):
        change_together(store, [CellChange(one, b"2", b"more"), CellChange(two, b"2", b"more")])
    assert (one.load(), two.load()) == (b"2", b"2")


def test_attributes_are_removed_if_all_are_as_known(store: FailingStore) -> None:
    one, two = Cell(store, "s", "a"), Cell(store, "s", "b")
    one.change(b"1")
    two.change(b"1")
    assert not remove_attributes(store, "s", {"a": b"1", "b": b"2"})
    assert one.load() == b"1"
    assert remove_attributes(store, "s", {"a": b"1", "b": ANY})
    assert one.load() is None and two.load() is None
    store.lose_answers()
    with pytest.raises(StoreUnavailableError):
        remove_attributes(store, "s", {"a": ANY})


def test_an_append_at_an_offset_finds_its_own_bytes(store: FailingStore) -> None:
    store.lose_answers()
    with pytest.raises(StoreUnavailableError):
        append_at(store, "s", b"data", 0)
    assert append_at(store, "s", b"data", 0) == 4
    assert append_at(store, "s", b"more", 4) == 8
    assert data_of(store) == b"datamore"


@given(st.integers(0, 2**32), st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_whatever_is_lost_each_change_is_stored_once_or_not_at_all(seed: int, turns: list[int]) -> None:
    """Three processes change one attribute. Each knows of each of its changes whether it is stored, or is in doubt."""
    stores = [FailingStore(MemoryStore(), rng=random.Random(seed + n), fault_rate=0.4) for n in range(3)]
    inner = stores[0].inner
    for each in stores:
        each.inner = inner
    inner.create("s")
    cells = [Cell(each, "s", "a") for each in stores]
    counters = [0, 0, 0]
    stored: list[set[bytes]] = [set(), set(), set()]
    for turn in turns:
        cell = cells[turn]
        counters[turn] += 1
        value = b"%d/%d;" % (turn, counters[turn])
        try:
            outcome = cell.change(value, value)
        except StoreUnavailableError:
            continue
        if outcome is Outcome.STORED:
            stored[turn].add(value)
        elif outcome is Outcome.STORED_EARLIER:
            assert cell.stored is not None and cell.stored.startswith(b"%d/" % turn)
            stored[turn].add(cell.stored)
        else:
            assert cell.stored is None or not cell.stored.startswith(b"%d/" % turn) or cell.stored in stored[turn]
    written = [part + b";" for part in inner.read("s", 0, 100_000).split(b";")[:-1]]
    assert len(written) == len(set(written))
    for number, known in enumerate(stored):
        assert known <= set(written)
        unknown = {each for each in written if each.startswith(b"%d/" % number)} - known
        # A lost one that others have built on stays unknown; so does one that nobody asked about any more.
        assert len(unknown) <= counters[number] - len(known)

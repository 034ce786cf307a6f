from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from synchronizer import ClosedError, InvalidArgumentError, SetChange, SharedSet
from synchronizer.testing import FailingStore
from tests.synchronizer.accounts import answer, threads
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)

Names = SharedSet[str]


@pytest.fixture
def two(store: FailingStore) -> Iterator[tuple[Names, Names]]:
    """The set as two processes have it."""
    with SharedSet(store, "names", str) as one, SharedSet(store.inner, "names", str) as other:
        yield one, other


def test_it_is_a_set(two: tuple[Names, Names]) -> None:
    names, _ = two
    names |= {"ada", "bob"}
    names.update(["cyd"], {"dan", "ada"})
    assert names == {"ada", "bob", "cyd", "dan"}
    assert sorted(names) == ["ada", "bob", "cyd", "dan"]
    assert (len(names), "ada" in names, "eve" in names, 5 in names, [] in names) == (4, True, False, False, False)
    assert names & {"ada", "eve"} == frozenset({"ada"})
    assert type(names | {"eve"}) is frozenset
    assert names - {"ada"} == {"bob", "cyd", "dan"}
    assert names >= {"ada"}
    names &= {"ada", "bob", 5, "eve"}  # type: ignore[arg-type]
    assert names == {"ada", "bob"}
    names ^= {"bob", "cyd"}
    assert names == {"ada", "cyd"}
    names -= {"cyd", 7}  # type: ignore[arg-type]
    assert names == {"ada"}
    names.remove("ada")
    with pytest.raises(KeyError, match="ada"):
        names.remove("ada")
    with pytest.raises(KeyError):
        names.pop()


def test_reads_are_of_the_copy_until_it_is_refreshed(two: tuple[Names, Names], store: FailingStore) -> None:
    one, other = two
    other.add("ada")
    before = len(store.operations)
    assert ("ada" in one, len(one), one.copy()) == (False, 0, frozenset())
    assert len(store.operations) == before
    one.refresh()
    assert one == {"ada"}


def test_changes_are_decided_on_the_newest_state(two: tuple[Names, Names]) -> None:
    one, other = two
    assert other.add("ada")
    assert not one.add("ada"), "one caller hears that it was he"
    other.add("bob")
    assert one.discard("bob")
    assert not other.discard("bob")
    other.update({"bob", "cyd"})
    one &= {"bob"}
    assert SharedSet(one.synchronizer.store, "names", str) == {"bob"}
    other.add("dan")
    one -= {"dan", "bob"}
    assert SharedSet(one.synchronizer.store, "names", str) == set()
    other.add("eve")
    assert one.pop() == "eve"
    other.add("fay")
    one.clear()
    assert SharedSet(one.synchronizer.store, "names", str) == set()


def test_of_many_threads_one_hears_that_it_was_he(two: tuple[Names, Names]) -> None:
    with threads(6) as pool:
        claims = [pool.submit(two[number % 2].add, "ada") for number in range(6)]
        assert sorted(answer(claim) for claim in claims) == [False] * 5 + [True]
        claims = [pool.submit(two[number % 2].discard, "ada") for number in range(6)]
        assert sorted(answer(claim) for claim in claims) == [False] * 5 + [True]


class Point(BaseModel):
    model_config = ConfigDict(frozen=True)
    x: int
    tags: frozenset[str] = frozenset()


@pytest.mark.stores("memory")
@pytest.mark.parametrize(
    ("item_type", "items"),
    [
        (int, {-1, 2**63 - 1}),
        (bytes, {b"", b"a"}),
        (tuple[int, str], {(1, "a"), (2, "b")}),
        (frozenset[int], {frozenset({1, 2, 9}), frozenset()}),
        (Point, {Point(x=1), Point(x=2, tags=frozenset("abcdefgh"))}),
    ],
)
def test_items_come_back_equal(item_type: Any, items: set[Any], store: FailingStore) -> None:
    shared = SharedSet(store, "items", item_type)
    shared.update(items)
    assert shared == items
    assert not any(shared.add(item) for item in items)
    assert all(item in SharedSet(store, "items", item_type) for item in items)


@pytest.mark.stores("memory")
@pytest.mark.parametrize(("item", "says"), [("5", "valid integer"), (True, "valid integer"), ([], "hashable")])
def test_what_cannot_be_in_it_is_refused(item: Any, says: str, store: FailingStore) -> None:
    numbers = SharedSet(store, "numbers", int)
    for call in (lambda: numbers.add(item), lambda: numbers.discard(item), lambda: numbers.update([item])):
        with pytest.raises(InvalidArgumentError, match=says):
            call()
    assert store.count("append") == 0


def test_a_set_that_is_only_added_to_and_taken_from_keeps_its_log_short(store: FailingStore) -> None:
    names = SharedSet(store, "names", str, compaction_bytes=4000)
    for number in range(200):
        names.add(f"{number}")
        names.discard(f"{number}")
    info = store.info(names.synchronizer.segment)
    assert info.length > 16_000
    assert info.length - info.start_offset < 2 * 1.5 * 4000 + 200


def test_listeners_hear_what_came_in_and_went_out(two: tuple[Names, Names]) -> None:
    one, other = two
    heard: list[tuple[set[str], set[str]]] = []

    def listener(change: SetChange[str]) -> None:
        heard.append((set(change.added), set(change.removed)))

    one.register_listener(listener)
    other.add("ada")
    one.add("bob")
    one.discard("ada")
    other.clear()
    expected = [({"ada"}, set()), ({"bob"}, set()), (set(), {"ada"}), (set(), {"bob"})]
    until(lambda: len(heard) == 4, "four changes")
    assert heard == expected


def test_watching_gives_the_newest_and_ends_with_the_set(two: tuple[Names, Names]) -> None:
    one, other = two
    watched = one.watch()
    assert next(watched) == frozenset()
    other.update({"ada", "bob"})
    assert next(watched) == {"ada", "bob"}
    one.close()
    assert list(watched) == []
    with pytest.raises(ClosedError):
        one.add("cyd")

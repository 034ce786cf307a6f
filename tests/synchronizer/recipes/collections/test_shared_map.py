from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Iterator
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from synchronizer import (
    ClosedError,
    DeadlineExceededError,
    EntryChange,
    InvalidArgumentError,
    SharedMap,
    SharedSet,
    StateTooLargeError,
)
from synchronizer.testing import FailingStore
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)

Prices = SharedMap[int]


class Price(TypedDict, total=False):
    amount: int


@pytest.fixture
def two(store: FailingStore) -> Iterator[tuple[Prices, Prices]]:
    """The map as two processes have it."""
    with SharedMap(store, "prices", int) as one, SharedMap(store.inner, "prices", int) as other:
        yield one, other


class TestReading:
    def test_it_is_a_mapping(self, two: tuple[Prices, Prices]) -> None:
        prices, _ = two
        prices["pear"] = 3
        prices.update(apple=2, timeout=0)
        prices.update([("fig", 5)])
        assert prices.pop("timeout") == 0
        assert prices == {"pear": 3, "apple": 2, "fig": 5}
        assert list(prices) == ["apple", "fig", "pear"]
        assert list(prices.items()) == [("apple", 2), ("fig", 5), ("pear", 3)]
        assert (len(prices), "fig" in prices, 7 in prices, prices.get("plum")) == (3, True, False, None)
        with pytest.raises(KeyError, match="plum"):
            prices["plum"]
        del prices["fig"]
        with pytest.raises(KeyError, match="fig"):
            del prices["fig"]

    def test_reads_are_of_the_copy_until_it_is_refreshed(self, two: tuple[Prices, Prices], store: FailingStore) -> None:
        one, other = two
        other["pear"] = 3
        before = len(store.operations)
        assert (one.get("pear"), list(one), len(one), "pear" in one, one.copy()) == (None, [], 0, False, {})
        assert len(store.operations) == before
        one.refresh()
        assert one == {"pear": 3}

    def test_what_is_iterated_is_of_one_moment(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        one.update(a=1, b=2)
        keys, values, items = iter(one), iter(one.values()), iter(one.items())
        assert (next(keys), next(values), next(items)) == ("a", 1, ("a", 1))
        one.remove("b")
        assert (list(keys), list(values), list(items)) == (["b"], [2], [("b", 2)])

    def test_a_value_that_is_read_is_the_readers_own(self, store: FailingStore) -> None:
        lists = SharedMap(store, "lists", list[int])
        mine = [1]
        lists["a"] = mine
        mine.append(2)
        lists["a"].append(3)
        assert lists["a"] == [1]

    def test_what_is_there_is_read_while_the_store_is_away(
        self, two: tuple[Prices, Prices], store: FailingStore
    ) -> None:
        one, _ = two
        one["pear"] = 3
        store.unavailable = True
        assert one == {"pear": 3}
        with pytest.raises(DeadlineExceededError):
            one.put("pear", 4, timeout=0.05)
        with pytest.raises(DeadlineExceededError):
            one.refresh(timeout=0)
        store.unavailable = False
        assert one.replace("pear", 5, expected=3)

    def test_the_last_copy_is_read_after_closing_and_nothing_is_changed(self, two: tuple[Prices, Prices]) -> None:
        one, _ = two
        one["pear"] = 3
        one.close()
        one.close()
        assert one["pear"] == 3
        for call in (lambda: one.put("a", 1), one.clear, one.refresh, lambda: one.remove("pear", 9)):
            with pytest.raises(ClosedError):
                call()

    def test_a_map_and_a_set_of_one_name_are_two(self, store: FailingStore) -> None:
        SharedMap(store, "fruit", int)["pear"] = 1
        SharedSet(store, "fruit", str).add("apple")
        assert SharedMap(store, "fruit", int) == {"pear": 1}


class TestConditionalChanges:
    """Each is decided on what the other process has stored, which the copy does not have yet."""

    def test_put_if_absent(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        other["pear"] = 3
        assert not one.put_if_absent("pear", 4)
        assert one == {"pear": 3}
        other.remove("pear")
        assert one.put_if_absent("pear", 4)
        assert one == {"pear": 4}

    def test_replace(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        one["pear"] = 3
        assert other.replace("pear", 4, expected=3)
        assert not one.replace("pear", 5, expected=3)
        assert one == {"pear": 4}, "a refusal brings the copy up to date"
        assert one.replace("pear", 5)
        assert not one.replace("plum", 5)
        assert not one.replace("plum", 5, expected=5)

    def test_remove(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        one["pear"] = 3
        other["pear"] = 4
        assert not one.remove("pear", expected=3)
        assert one == {"pear": 4}
        assert one.remove("pear", expected=4)
        other.refresh()
        assert not other.remove("pear")
        other["pear"] = 6
        assert one.remove("pear"), "there is one, though this copy has none"

    def test_clear_pop_popitem_and_setdefault(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        other.update(pear=1, apple=2, fig=3)
        assert one.setdefault("pear", 9) == 1
        one.clear()
        other.update({"b": 2}, a=1)
        assert other.pop("a") == 1
        assert one.pop("a", None) is None
        with pytest.raises(KeyError):
            one.pop("a")
        assert one.popitem() == ("b", 2)
        with pytest.raises(KeyError):
            other.popitem()
        other["c"] = 3
        one.clear()
        assert SharedMap(one.synchronizer.store, "prices", int) == {}

    def test_what_is_expected_may_be_written_as_what_is_put_may(self, store: FailingStore) -> None:
        items: SharedMap[Any] = SharedMap(store, "items", Item)
        items["a"] = {"name": "pear"}
        assert items["a"] == Item(name="pear")
        assert items.replace("a", Item(name="fig"), expected={"name": "pear", "amount": 1})

    def test_none_is_a_value(self, store: FailingStore) -> None:
        notes: SharedMap[Any] = SharedMap(store, "notes", str | None)
        assert notes.put_if_absent("a", None)
        assert not notes.put_if_absent("a", "b")
        assert notes.replace("a", "b", expected=None)
        assert notes.pop("a", "default") == "b"

    def test_an_update_is_one_entry(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        seen = other.synchronizer.transitions()
        one.update({"a": 1, "b": 2}, c=3)
        other.refresh()
        assert [sorted(each.after.entries) for each in seen.drain() if each.after and each.updates] == [["a", "b", "c"]]


class Item(BaseModel):
    name: str
    amount: int = 1


class ItemOfTheNextRelease(Item):
    size: str | None = None


@pytest.mark.stores("memory")
class TestValues:
    @pytest.mark.parametrize(
        ("value_type", "value"),
        [
            (str, "ä" * 300),
            (int, -(2**63)),
            (float, 0.1),
            (bool, True),
            (bytes, b"\x00\xff"),
            (list[list[int]], [[1], []]),
            (dict[str, list[bytes]], {"a": [b"b"]}),
            (dict[int, None], {1: None}),
            (tuple[int, str], (1, "a")),
            (set[frozenset[int]], {frozenset({1, 2}), frozenset()}),
            (datetime.datetime, datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)),
            (Item, Item(name="pear", amount=2)),
            (dict[str, Item], {"a": Item(name="pear")}),
            (Any, {"a": [1, 2.0, True, None, b"b", "c"]}),
        ],
    )
    def test_values_come_back_equal_and_of_their_type(self, value_type: Any, value: Any, store: FailingStore) -> None:
        SharedMap(store, "values", value_type)["key"] = value
        found = SharedMap(store, "values", value_type)["key"]
        assert (found, type(found)) == (value, type(value))

    @pytest.mark.parametrize("fold", [0, 1])
    def test_a_time_that_the_clocks_show_twice_comes_back(self, fold: int, store: FailingStore) -> None:
        """Python holds such a time to differ from all times of other zones."""
        berlin = ZoneInfo("Europe/Berlin")
        at = datetime.datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=fold)
        times = SharedMap(store, "times", dict[str, list[datetime.datetime]])
        times["key"] = {"a": [at]}
        assert times["key"]["a"][0].isoformat() == at.isoformat()

    @pytest.mark.parametrize(
        ("value_type", "value", "says"),
        [
            (int, "5", "valid integer: key='key' expected='int' found='str'"),
            (int, True, "valid integer"),
            (str, 5, "valid string"),
            (str, b"5", "valid string"),
            (bool, 1, "valid boolean"),
            (list[int], [1, "2"], "1: Input should be a valid integer"),
            (Item, {"name": 5}, "name: Input should be a valid string"),
            (int, 2**64, "cannot be stored: Integer value out of range"),
            (str, "\ud800", "cannot be stored"),
            (Any, object(), "cannot be stored"),
            (Any, (1, 2), "lists instead of tuples"),
            (Any, [float("nan")], "no NaN"),
            (Any, Item(name="a"), "declare the exact type"),
            (Price, {"amount": 5, "colour": "red"}, "colour: Extra inputs are not permitted"),
            (Item, Item.model_construct(name=5), "cannot be stored: name: Input should be a valid string"),
        ],
    )
    def test_what_cannot_be_is_refused_where_it_enters(
        self, value_type: Any, value: Any, says: str, store: FailingStore
    ) -> None:
        values: SharedMap[Any] = SharedMap(store, "values", value_type)
        appends = store.count("append")
        for call in (
            lambda: values.put("key", value),
            lambda: values.update(key=value),
            lambda: values.put_if_absent("key", value),
            lambda: values.replace("key", value),
            lambda: values.remove("key", value),
            lambda: values.setdefault("key", value),
        ):
            with pytest.raises(InvalidArgumentError, match=says):
                call()
        assert store.count("append") == appends

    def test_the_value_itself_is_not_in_the_error(self, store: FailingStore) -> None:
        with pytest.raises(InvalidArgumentError) as refused:
            SharedMap(store, "values", int)["key"] = "secret"  # type: ignore[assignment]
        assert "secret" not in str(refused.value)

    @pytest.mark.parametrize("key", [5, None, b"a"])
    def test_keys_are_text(self, key: Any, store: FailingStore) -> None:
        prices = SharedMap(store, "prices", int)
        for call in (lambda: prices.put(key, 1), lambda: prices.remove(key), lambda: prices.replace(key, 1)):
            with pytest.raises(InvalidArgumentError):
                call()
        assert key not in prices
        with pytest.raises(InvalidArgumentError):
            prices["\ud800"] = 1  # half a character

    def test_types_that_nothing_is_known_of_are_refused(self, store: FailingStore) -> None:
        with pytest.raises(InvalidArgumentError, match="value_type is not a type whose values can be shared"):
            SharedMap(store, "values", threading.Lock)  # type: ignore[arg-type]

    def test_a_model_may_get_a_field_while_the_release_before_is_running(self, store: FailingStore) -> None:
        old, new = SharedMap(store, "items", Item), SharedMap(store, "items", ItemOfTheNextRelease)
        old["a"] = Item(name="pear")
        new.refresh()
        assert new["a"] == ItemOfTheNextRelease(name="pear")
        new["a"] = ItemOfTheNextRelease(name="pear", size="big")
        old.refresh()
        assert old["a"] == Item(name="pear")

    def test_a_stored_value_of_another_type_is_told_when_it_is_read_and_can_be_replaced(
        self, store: FailingStore
    ) -> None:
        SharedMap(store, "prices", str).update({"a": "cheap", "b": "7"})
        prices = SharedMap(store, "prices", int)
        with pytest.raises(InvalidArgumentError, match="stored value does not match this type.*key='a'"):
            prices["a"]
        assert prices["b"] == 7
        prices["a"] = 1
        assert prices == {"a": 1, "b": 7}


class TestSize:
    def test_a_map_that_is_only_put_to_keeps_its_log_short(self, store: FailingStore) -> None:
        prices = SharedMap(store, "prices", int, compaction_bytes=4000)
        for number in range(500):
            prices["pear"] = number
        info = store.info(prices.synchronizer.segment)
        assert info.length > 20_000
        assert info.length - info.start_offset < 2 * 1.5 * 4000 + 200
        assert SharedMap(store, "prices", int) == {"pear": 499}

    def test_a_map_that_would_be_too_large_says_so_and_can_shrink(self, store: FailingStore) -> None:
        texts = SharedMap(store, "texts", str, state_limit_bytes=2000)
        with pytest.raises(StateTooLargeError, match="remove something first"):
            for number in range(100):
                texts[f"{number}"] = "x" * 100
        assert 10 < len(texts) < 25
        texts.clear()
        texts["a"] = "b"


class Heard:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, int | None, int | None]] = []
        self.threads: set[str] = set()

    def __call__(self, change: EntryChange[int]) -> None:
        self.threads.add(threading.current_thread().name)
        self.changes.append((change.key, change.before, change.after))

    def await_changes(self, *changes: tuple[str, int | None, int | None]) -> None:
        until(lambda: len(self.changes) >= len(changes), f"{changes}, not only {self.changes}")
        assert self.changes == list(changes)


class TestListening:
    def test_every_change_is_heard_once_and_in_order_whoever_made_it(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        one["old"] = 1
        heard, of_pears = Heard(), Heard()
        one.register_listener(heard)
        one.register_listener(of_pears, key="pear")
        other["pear"] = 3
        one["fig"] = 4
        one["fig"] = 4  # as it was
        other.update(pear=5, old=2)
        other.clear()
        one["pear"] = 6
        of_pears.await_changes(("pear", None, 3), ("pear", 3, 5), ("pear", 5, None), ("pear", None, 6))
        heard.await_changes(
            ("pear", None, 3),
            ("fig", None, 4),
            ("pear", 3, 5),
            ("old", 1, 2),
            ("fig", 4, None),
            ("old", 2, None),
            ("pear", 5, None),
            ("pear", None, 6),
        )

    def test_a_listener_keeps_the_copy_up_to_date(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        heard = Heard()
        one.register_listener(heard)
        other["pear"] = 3
        until(lambda: "pear" in one, "the copy has what the other process put")

    def test_changes_that_came_before_it_was_registered_are_heard_if_the_copy_did_not_have_them(
        self, two: tuple[Prices, Prices]
    ) -> None:
        one, other = two
        other["pear"] = 3
        heard = Heard()
        one.register_listener(heard)
        heard.await_changes(("pear", None, 3))

    def test_one_that_raises_hears_on_and_stops_nobody(
        self, two: tuple[Prices, Prices], caplog: pytest.LogCaptureFixture
    ) -> None:
        one, other = two
        heard = Heard()

        def failing(change: EntryChange[int]) -> None:
            heard(change)
            raise ZeroDivisionError(f"of {change.key}")

        one.register_listener(failing)
        with caplog.at_level(logging.ERROR, logger="synchronizer"):
            other["a"] = 1
            other["b"] = 2
            heard.await_changes(("a", None, 1), ("b", None, 2))
            until(lambda: "of b" in caplog.text, "both failures are logged")
        assert "of a" in caplog.text

    def test_it_hears_nothing_once_it_is_unregistered(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        first, second = Heard(), Heard()
        unregister = one.register_listener(first)
        one.register_listener(second)
        other["a"] = 1
        first.await_changes(("a", None, 1))
        unregister()
        other["b"] = 2
        second.await_changes(("a", None, 1), ("b", None, 2))
        assert first.changes == [("a", None, 1)]

    def test_its_thread_is_named_and_ends_with_the_map(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        heard = Heard()
        one.register_listener(heard)
        other["a"] = 1
        heard.await_changes(("a", None, 1))
        (name,) = heard.threads
        assert "map/prices" in name
        one.close()
        until(lambda: name not in {thread.name for thread in threading.enumerate()}, "its thread has ended")

    def test_changes_behind_a_compaction_come_as_one(self, two: tuple[Prices, Prices], store: FailingStore) -> None:
        one, other = two
        other.update(a=1, b=1)
        one.refresh()
        other.remove("a")
        other.update(b=2, c=3)
        other.synchronizer.compact()
        other["c"] = 4
        other.synchronizer.compact()
        heard = Heard()
        one.register_listener(heard)
        heard.await_changes(("a", 1, None), ("b", 1, 2), ("c", None, 4))

    def test_watching_gives_the_newest_and_ends_with_the_map(self, two: tuple[Prices, Prices]) -> None:
        one, other = two
        watched = one.watch()
        assert next(watched) == {}
        other.update(a=1, b=2)
        assert next(watched) == {"a": 1, "b": 2}
        one.close()
        assert list(watched) == []

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from synchronizer import Map


class Holder(BaseModel):
    model_config = ConfigDict(frozen=True)

    numbers: Map[str, int] = Map()
    pairs: Map[tuple[str, int], frozenset[int]] = Map()


def test_it_is_a_mapping_that_does_not_change() -> None:
    empty: Map[str, int] = Map()
    one = empty.set("a", 1)
    two = one.update({"b": 2, "a": 3})
    assert isinstance(one, Mapping)
    assert (dict(empty), dict(one), dict(two)) == ({}, {"a": 1}, {"a": 3, "b": 2})
    assert dict(two.delete("a")) == {"b": 2}
    assert two["b"] == 2 and two.get("z") is None and two.get("z", 7) == 7 and "a" in two and len(two) == 2
    assert sorted(two) == ["a", "b"] and sorted(two.items()) == [("a", 3), ("b", 2)]
    with pytest.raises(TypeError):
        two["a"] = 5  # type: ignore[index]


def test_what_is_not_there_cannot_be_read_or_deleted() -> None:
    with pytest.raises(KeyError):
        Map({"a": 1})["b"]
    with pytest.raises(KeyError):
        Map({"a": 1}).delete("b")


def test_maps_are_equal_by_their_items_and_equal_maps_have_equal_hashes() -> None:
    assert Map({"a": 1, "b": 2}) == Map([("b", 2), ("a", 1)]) == {"a": 1, "b": 2}
    assert hash(Map({"a": 1, "b": 2})) == hash(Map([("b", 2), ("a", 1)]))
    assert Map({"a": 1}) != Map({"a": 2}) and Map() != {"a": 1} and Map() != 3


def test_it_comes_from_another_one_without_copying() -> None:
    first = Map({"a": 1})
    assert Map(first) == first
    assert pickle.loads(pickle.dumps(first)) == first


def test_a_field_takes_any_mapping_and_is_written_as_a_dict() -> None:
    holder = Holder(numbers={"a": 1}, pairs={("x", 1): [3, 3, 4]})  # type: ignore[arg-type, dict-item]
    assert holder.numbers == Map({"a": 1})
    assert holder.model_dump() == {"numbers": {"a": 1}, "pairs": {("x", 1): frozenset({3, 4})}}
    assert Holder.model_validate(holder.model_dump()) == holder == Holder(numbers=holder.numbers, pairs=holder.pairs)
    assert Holder(numbers=Map({"a": 1})).model_dump_json() == '{"numbers":{"a":1},"pairs":{}}'


def test_keys_and_values_of_a_field_are_checked() -> None:
    for wrong in ({"a": "x"}, {1: 1}, [1], Map({"a": None})):
        with pytest.raises(ValidationError):
            Holder(numbers=wrong)  # type: ignore[arg-type]


def test_changing_a_large_one_does_not_copy_it() -> None:
    large = Map({str(number): number for number in range(100_000)})
    changed = [large]
    for number in range(1000):
        changed.append(changed[-1].set(str(number), -number))
    # A thousand copies of 100,000 items would take gigabytes and minutes.
    assert changed[-1]["999"] == -999 and large["999"] == 999 and len(changed[-1]) == 100_000


class Key:
    """Equal by its number; many numbers have one hash."""

    def __init__(self, number: int, hashed: int) -> None:
        self.number, self.hashed = number, hashed

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number

    def __repr__(self) -> str:
        return f"Key({self.number}, {self.hashed})"


#: Few hashes, those that differ in their highest bits only, and those of numbers and strings.
HASHES: Final = {
    "equal": lambda number: Key(number, 7),
    "minus one": lambda number: Key(number, -2 - number % 2),
    "high bits": lambda number: Key(number, (number % 16 - 8) << 58),
    "every 32nd": lambda number: number * 32,
    "every 2**40th": lambda number: number << 40,
    "negative": lambda number: -number,
    "strings": str,
    "pairs": lambda number: ("segment", number),
}


@pytest.mark.parametrize("hashes", HASHES)
@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "set", "delete", "delete", "update", "keep"]),
            st.integers(0, 80),
            st.integers(1, 60),
        ),
        max_size=40,
    )
)
def test_it_does_what_a_dict_does_and_older_maps_stay_as_they_are(
    hashes: str, steps: list[tuple[str, int, int]]
) -> None:
    key_of: Callable[[int], Hashable] = HASHES[hashes]
    now: Map[Hashable, int] = Map()
    expected: dict[Hashable, int] = {}
    kept = [(now, dict(expected))]
    for value, (verb, first, count) in enumerate(steps):
        keys = [key_of(number) for number in range(first, first + count)]
        if verb == "set":
            for key in keys:
                now, expected[key] = now.set(key, value), value
        elif verb == "delete":
            for key in keys:
                if key in expected:
                    del expected[key]
                    now = now.delete(key)
                else:
                    with pytest.raises(KeyError) as absent:
                        now.delete(key)
                    assert absent.value.args == (key,)
        elif verb == "update":
            now = now.update(dict.fromkeys(keys, value))
            expected.update(dict.fromkeys(keys, value))
        kept.append((now, dict(expected)))
    for each, items in kept[:: max(1, len(kept) // 5)] + kept[-1:]:
        check(each, items, absent=key_of(1_000))


def check(found: Map[Hashable, int], expected: dict[Hashable, int], absent: Hashable) -> None:
    assert len(found) == len(expected) and bool(found) == bool(expected)
    assert len(list(found)) == len(set(found)) == len(expected) and set(found) == found.keys() == expected.keys()
    assert list(found.items()) == list(zip(found, found.values(), strict=True))  # one order for all
    assert dict(found.items()) == dict(found) == expected and found == expected
    assert all(found[key] == found.get(key) == value and key in found for key, value in expected.items())
    assert absent not in found and found.get(absent) is None and found.get(absent, 7) == 7
    with pytest.raises(KeyError):
        found[absent]
    made = Map(reversed(expected.items()))
    assert found == made == found and hash(found) == hash(made)
    assert found != made.set(absent, 1) and made.set(absent, 1).delete(absent) == found
    if expected:
        changed = next(iter(expected))
        assert found != found.set(changed, -1) and found.set(changed, -1) != made
        assert found.set(changed, expected[changed]) == found
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == copy.copy(found) == found


def test_one_that_lost_its_items_does_not_keep_their_room() -> None:
    full: Map[int, int] = Map()
    for number in range(20_000):
        full = full.set(number, number)
    emptied = full
    for number in range(19_990):
        emptied = emptied.delete(number)
    assert sorted(emptied) == list(range(19_990, 20_000)) and len(full) == 20_000
    assert len(nodes(full)) > 1_000 and len(nodes(emptied)) < 30
    for number in range(19_990, 20_000):
        emptied = emptied.delete(number)
    assert len(nodes(emptied)) == 1


def nodes(found: Map[Any, Any]) -> set[int]:
    def walk(node: Any) -> set[int]:
        return {id(node)}.union(*map(walk, node if isinstance(node, list) else ()))

    return walk(found._root)


def test_another_process_finds_its_keys_in_a_pickled_one() -> None:
    """Strings have other hashes there."""
    program = (
        "import pickle, sys; found = pickle.load(sys.stdin.buffer);"
        "assert all(found[str(n)] == n for n in range(1000)) and len(found) == 1000, found"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(Map({str(number): number for number in range(1000)})),
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
    )


def test_wrong_arguments_raise_what_a_dict_raises() -> None:
    for items in ({}, dict.fromkeys(range(1000))):
        found: Map[Any, Any] = Map(items)
        for use in (found.get, found.delete, found.__getitem__, found.__contains__, partial(found.set, value=1)):
            with pytest.raises(TypeError, match="unhashable"):
                use([])
        for wrong in (5, None, [1], [()]):
            with pytest.raises((TypeError, ValueError)):
                Map(wrong)  # type: ignore[arg-type]
            with pytest.raises((TypeError, ValueError)):
                found.update(wrong)  # type: ignore[arg-type]
        assert found == items


def test_threads_read_it_while_others_make_new_ones_from_it() -> None:
    shared = Map({number: number for number in range(5_000)})

    def read(_: int) -> bool:
        return sum(shared.values()) == sum(shared[key] for key in shared) == 12_497_500

    def change(start: int) -> bool:
        mine = shared
        for number in range(start, start + 1_999):
            mine = mine.set(number, -1).delete(number + 1).set(number + 1, number)
        return len(mine) == 5_000

    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(verb, number) for number in range(0, 3_000, 500) for verb in (read, change)]
        assert all(each.result() for each in done)

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest
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

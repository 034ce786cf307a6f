"""Shared collections are written and read as in the first release: `tests/wire/shared-*`."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import msgpack
import pytest
from pydantic import BaseModel

from synchronizer import Map, State, Update
from synchronizer.recipes.collections.shared_counter import COUNTER_UPDATES, AddToCounter, CounterState, SetCounter
from synchronizer.recipes.collections.shared_map import MAP_UPDATES, ClearMap, MapState, PutEntry, RemoveEntry
from synchronizer.recipes.collections.shared_set import SET_UPDATES, AddItem, ClearSet, DiscardItem, SetState
from synchronizer.recipes.collections.values import ValueCodec
from synchronizer.state import StateCodec
from tests.golden import check_history, golden


class Item(BaseModel):
    name: str
    price: Decimal = Decimal("1.50")
    tags: frozenset[str] = frozenset("cab")
    bought: datetime.datetime | None = None


#: A type, a value of it, and what is written of it as msgpack has it.
VALUES: list[tuple[Any, Any, Any]] = [
    (str, "ä", "ä"),
    (int, -5, -5),
    (float, 2, 2.0),
    (bool, True, True),
    (bytes, b"\xff", b"\xff"),
    (list[int | None], [1, None], [1, None]),
    (dict[str, float], {"a": 0.5}, {"a": 0.5}),
    (datetime.datetime, datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), "2020-01-02T00:00:00Z"),
    (Item, Item(name="pear"), {"name": "pear", "price": "1.50", "tags": ["a", "b", "c"], "bought": None}),
]

STATES: dict[str, tuple[State, Any, list[Update[Any]]]] = {
    "map": (
        MapState(entries=Map({"ä": b"\x01"})),
        MAP_UPDATES,
        [PutEntry(key="ä", value=b"\x01"), RemoveEntry(key="ä"), ClearMap()],
    ),
    "set": (
        SetState(items=Map({b"\x01": True})),
        SET_UPDATES,
        [AddItem(item=b"\x01"), DiscardItem(item=b"\x01"), ClearSet()],
    ),
    "counter": (CounterState(value=-7), COUNTER_UPDATES, [AddToCounter(amount=1), SetCounter(value=-7)]),
}


def test_values_are_written_and_read_as_in_the_first_release() -> None:
    today = [ValueCodec(value_type).encode(value) for value_type, value, _ in VALUES]
    stored = golden("shared-values-v1.msgpack", msgpack.packb(today))
    assert msgpack.unpackb(stored) == today
    assert [msgpack.unpackb(data) for data in today] == [written for _, _, written in VALUES]
    assert [ValueCodec(t).decode(data) for (t, _, _), data in zip(VALUES, today, strict=True)] == [
        value for _, value, _ in VALUES
    ]


@pytest.mark.parametrize("kind", STATES)
def test_states_and_updates_are_written_and_read_as_in_the_first_release(kind: str) -> None:
    state, classes, updates = STATES[kind]
    codec: StateCodec[Any] = StateCodec(type(state), tuple(classes))
    check_history(f"shared-{kind}-history-v1.msgpack", codec, state, updates)
    snapshot = golden(f"shared-{kind}-snapshot-v1.msgpack", codec.encode_snapshot(state, 7))
    assert snapshot == codec.encode_snapshot(state, 7)
    assert codec.decode_snapshot(snapshot) == (state, 7)
    stored = golden(f"shared-{kind}-updates-v1.msgpack", codec.encode_updates(updates))
    assert stored == codec.encode_updates(updates)
    assert codec.decode_body(stored) == updates

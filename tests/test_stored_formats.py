"""Every field and every update that is stored occurs in a golden file, so that no change of them goes unnoticed.

A golden file shows that its values are read and written as in the first release. What it does not hold, it does not
show: a new field or update needs a golden file of its own. CONTRIBUTING.md has the steps.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, Final, get_args

import msgpack
import pytest
from pydantic import BaseModel

from readergroup.dead_letters.statuses import LETTER_UPDATES, LetterStatuses
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import UPDATES
from readergroup.outbox.state import OUTBOX_UPDATES, OutboxState
from readergroup.streams.state import STREAM_UPDATES, StreamState
from synchronizer import State, Update
from synchronizer.recipes.collections.shared_counter import COUNTER_UPDATES, CounterState
from synchronizer.recipes.collections.shared_map import MAP_UPDATES, MapState
from synchronizer.recipes.collections.shared_set import SET_UPDATES, SetState
from synchronizer.recipes.coordination.members import UPDATES as MEMBERS_UPDATES
from synchronizer.recipes.coordination.members import Members
from synchronizer.state import StateCodec
from tests.places import PACKAGES, ROOT, WIRE, product_files

#: How the golden files of each state begin.
STATES: Final[Mapping[tuple[str, ...], StateCodec[Any]]] = {
    ("group",): StateCodec(ReaderGroupState, UPDATES),
    ("stream",): StateCodec(StreamState, STREAM_UPDATES),
    ("dead-letters",): StateCodec(LetterStatuses, LETTER_UPDATES),
    ("outbox",): StateCodec(OutboxState, OUTBOX_UPDATES),
    ("members", "semaphore", "barrier"): StateCodec(Members, MEMBERS_UPDATES),
    ("shared-map",): StateCodec(MapState, tuple(MAP_UPDATES)),
    ("shared-set",): StateCodec(SetState, tuple(SET_UPDATES)),
    ("shared-counter",): StateCodec(CounterState, tuple(COUNTER_UPDATES)),
}
#: Modules that need a distribution which may not be installed, and hold no states.
OPTIONAL: Final = ("readergroup.spark", "readergroup.demo", "readergroup.cli", "synchronizer.testing")


def stored_values() -> Iterator[Any]:
    """Yield what the golden files of states hold."""
    for names, codec in STATES.items():
        for path in sorted(path for name in names for path in WIRE.glob(f"{name}-*.msgpack")):
            body = path.read_bytes()
            if "-updates-" in path.name:
                yield codec.decode_body(body)
            elif "-snapshot-" in path.name:
                yield codec.decode_snapshot(body)[0]
            elif "-history-" in path.name:
                entries, states = msgpack.unpackb(body)
                yield [*map(codec.decode_body, entries), *(codec.decode_snapshot(state)[0] for state in states)]


@cache
def occurring() -> Mapping[type[BaseModel], frozenset[str]]:
    """Return the fields of each class that a golden file gives a value."""
    found: dict[type[BaseModel], set[str]] = defaultdict(set)

    def look(value: object) -> None:
        if isinstance(value, BaseModel):
            found[type(value)] |= value.model_fields_set
            for each in type(value).model_fields:
                look(getattr(value, each))
        elif isinstance(value, Mapping):
            look([*value.keys(), *value.values()])
        elif isinstance(value, tuple | list | frozenset):
            for each in value:
                look(each)

    for value in stored_values():
        look(value)
    return {model: frozenset(fields) for model, fields in found.items()}


def stored_classes() -> list[type[BaseModel]]:
    """Return every state and update of the product, and the models in their fields."""
    for file in product_files():
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(OPTIONAL) and not name.endswith("__main__"):
            importlib.import_module(name)
    found: dict[type[BaseModel], None] = {}

    def add(model: type[BaseModel]) -> None:
        if model not in found:
            found[model] = None
            for field in model.model_fields.values():
                for each in models_in(field.annotation) if not field.exclude else ():
                    add(each)

    for base in (State, Update):
        for each in descendants(base):
            is_of_the_product = each.__module__.partition(".")[0] in PACKAGES
            if is_of_the_product and not each.__module__.startswith(OPTIONAL) and (base is State or each.tag):
                add(each)
    return list(found)


def descendants(model: type[Any]) -> Iterator[type[Any]]:
    for each in model.__subclasses__():
        yield each
        yield from descendants(each)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, UnionType) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


@pytest.mark.parametrize("model", stored_classes(), ids=lambda model: model.__name__)
def test_every_stored_field_occurs_in_a_golden_file(model: type[BaseModel]) -> None:
    stored = {name for name, field in model.model_fields.items() if not field.exclude}
    missing = stored - occurring().get(model, frozenset())
    assert model in occurring(), f"no golden file has a {model.__name__}; CONTRIBUTING.md says what a new class needs"
    assert not missing, f"no golden file has these fields of {model.__name__}: {sorted(missing)}; see CONTRIBUTING.md"


def test_every_update_that_a_state_knows_occurs_in_a_golden_file() -> None:
    known = {update for codec in STATES.values() for update in codec._classes.values()}
    stored = {model for model in stored_classes() if issubclass(model, Update)}
    assert known == stored
    assert known <= occurring().keys()

"""Every order in which small groups can take checkpoints: each completed one is a cut that all readers agree with.

The model is in `checkpoint_model`: what the readers of a group keep when they pass, against what the state records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from readergroup.group.model import updates
from readergroup.group.model.checkpoint import CheckpointState
from readergroup.group.model.state import ReaderGroupState
from readergroup.streams.config import SegmentId
from tests.readergroup.group.model.checkpoint_model import Model

NextSteps = Callable[[Model], Iterator[Model]]


def explore(start: Model, next_steps: NextSteps) -> int:
    """How many moments there are, each of which was checked."""
    seen = {start.key}
    waiting = [start]
    while waiting:
        model = waiting.pop()
        for after in next_steps(model):
            if after.key not in seen:
                after.check()
                seen.add(after.key)
                waiting.append(after)
    return len(seen)


def moves_and_a_death(model: Model) -> Iterator[Model]:
    yield from model.next_steps(checkpoints=1)
    if len(model.readers) == 2:
        for reader in model.readers:
            yield model.die(reader)


def two_at_once(model: Model) -> Iterator[Model]:
    yield from model.next_steps(checkpoints=2)


def a_merge(model: Model) -> Iterator[Model]:
    yield from model.next_steps(checkpoints=2, moves=False)
    yield from give_out(model)
    if not model.lengths:
        yield model.scale(0, 1)


def a_split(model: Model) -> Iterator[Model]:
    yield from model.next_steps(checkpoints=1, moves=False)
    yield from give_out(model)
    if not model.lengths:
        yield model.scale(0)
    if len(model.readers) == 2:
        yield model.die("r0")


def a_newcomer(model: Model) -> Iterator[Model]:
    yield from model.next_steps(checkpoints=1)
    if "r1" not in model.readers:
        yield model.join("r1")


def give_out(model: Model) -> Iterator[Model]:
    """Somebody gets what nobody has."""
    for segment in model.state.unassigned:
        for reader in model.readers:
            yield model.apply(updates.ReassignSegment(segment=segment, reader=reader))


CASES = [
    pytest.param(Model.of(1, readers=2, events=2), moves_and_a_death, id="moves-and-a-death"),
    pytest.param(Model.of(1, readers=2, events=1), two_at_once, id="two-at-once"),
    pytest.param(Model.of(2, readers=2, events=1), a_merge, id="a-merge"),
    pytest.param(Model.of(1, readers=2, events=1), a_split, id="a-split"),
    pytest.param(Model.of(1, readers=1, events=2), a_newcomer, id="a-newcomer"),
]


@pytest.mark.parametrize(("start", "next_steps"), CASES)
def test_in_every_order_a_checkpoint_is_what_all_readers_have_kept(start: Model, next_steps: NextSteps) -> None:
    assert explore(start, next_steps) > 100


def recorded_whoever_has_passed(
    self: CheckpointState, reader: str, token: int, segment: SegmentId, offset: int
) -> CheckpointState:
    return self.model_copy(update={"offsets": self.offsets.set(segment, offset)}) if self.waiting else self


def recorded_where_it_was_at_first(
    self: CheckpointState, reader: str, token: int, segment: SegmentId, offset: int
) -> CheckpointState:
    return self


def not_recorded_by_those_who_leave(state: ReaderGroupState, *rest: object) -> ReaderGroupState:
    return state


@pytest.mark.parametrize(
    ("place", "name", "simpler"),
    [
        (CheckpointState, "with_position", recorded_whoever_has_passed),
        (CheckpointState, "with_position", recorded_where_it_was_at_first),
        (updates, "_record", not_recorded_by_those_who_leave),
    ],
)
def test_a_simpler_rule_fails(monkeypatch: pytest.MonkeyPatch, place: object, name: str, simpler: object) -> None:
    monkeypatch.setattr(place, name, simpler)
    with pytest.raises(AssertionError, match="checkpoint|kept|behind"):
        explore(Model.of(1, readers=2, events=2), moves_and_a_death)


def test_a_reader_that_goes_on_in_a_segment_before_it_has_passed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "look", Model.look_too_late)
    with pytest.raises(AssertionError, match="checkpoint|kept|behind"):
        explore(Model.of(1, readers=2, events=2), moves_and_a_death)

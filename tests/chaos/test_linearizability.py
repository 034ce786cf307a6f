"""The checker knows right histories from wrong ones, and what real processes record is right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synchronizer import OutcomeUnknownError, StoreUnavailableError
from tests.chaos import recorded_histories
from tests.chaos.hosts import Host
from tests.chaos.hosts import host as host_of
from tests.chaos.linearizability import (
    Call,
    Model,
    Operation,
    SegmentModel,
    StateModel,
    UndecidedError,
    linearize,
)
from tests.chaos.recorded_histories import KINDS, Diary, Report, histories, record
from tests.chaos.zygote import Zygote
from tests.servers.unavailable import ServerUnavailable

SEGMENT, STATE = SegmentModel(), StateModel()
NEVER = math.inf


def call(invoked: float, returned: float, operation: Operation, answer: Any = None) -> Call:
    return Call("p", invoked, returned, operation, answer)


def append(data: bytes, at: int | None = None, *changes: tuple[str, bytes | None, bytes | None]) -> Operation:
    return ("append", data, at, changes)


def set_a(expected: bytes | None, new: bytes | None) -> Operation:
    return append(b"", None, ("a", expected, new))


def appended(offset: int, length: int) -> Any:
    return ("appended", offset, length)


def conflict(length: int, delta: bytes = b"", *present: tuple[str, bytes | None]) -> Any:
    return ("conflict", length, delta, present)


DONE = appended(0, 0)  # by an append of attributes only, to an empty segment

RIGHT: dict[str, tuple[Model, list[Call]]] = {
    "nothing happened": (SEGMENT, []),
    "one after the other": (
        SEGMENT,
        [call(1, 2, append(b"x", 0), appended(0, 1)), call(3, 4, append(b"y", 0), conflict(1, b"x"))],
    ),
    "at the same time, in the order that the answers tell": (
        SEGMENT,
        [
            call(1, 9, append(b"x"), appended(2, 3)),
            call(1, 9, append(b"y"), appended(0, 1)),
            call(1, 9, append(b"z", 1), appended(1, 2)),
            call(2, 8, ("read", 0), b"yz"),
        ],
    ),
    "of two reads at the same time the later one is answered with what was before": (
        SEGMENT,
        [
            call(1, 9, append(b"x"), appended(0, 1)),
            call(2, 8, ("length",), 1),
            call(3, 7, ("length",), 0),
        ],
    ),
    "a lost append shows later": (
        SEGMENT,
        [call(1, NEVER, append(b"x", 0)), call(2, 3, ("length",), 0), call(4, 5, ("read", 0), b"x")],
    ),
    "a lost append never shows": (SEGMENT, [call(1, NEVER, append(b"x", 0)), call(4, 5, ("read", 0), b"")]),
    "a lost append comes too late": (
        SEGMENT,
        [
            call(1, NEVER, append(b"x", 0)),
            call(2, 3, append(b"y", 0), appended(0, 1)),
            call(4, 5, ("read", 0), b"y"),
        ],
    ),
    "bytes and attributes go in together": (
        SEGMENT,
        [
            call(1, 2, append(b"x", 0, ("a", None, b"1")), appended(0, 1)),
            call(3, 4, append(b"y", 1, ("a", None, b"2")), conflict(1, b"", ("a", b"1"))),
            call(5, 6, append(b"y", 1, ("a", b"1", None)), appended(1, 2)),
            call(7, 8, ("attributes",), ()),
        ],
    ),
    "an update that saw the one before": (
        STATE,
        [
            call(1, 5, ("push", "x"), (("x",), 3)),
            call(1, 5, ("add", 3), ((), 3)),
            call(6, 7, ("push_if", "y", 0), (False, ("x",), 3)),
            call(6, 9, ("push_if", "z", 3), (True, ("x",), 3)),
            call(10, 11, ("fetch",), (("x", "z"), 4)),
        ],
    ),
}

WRONG: dict[str, tuple[Model, list[Call]]] = {
    "a stale read": (
        SEGMENT,
        [call(1, 2, append(b"x"), appended(0, 1)), call(3, 4, ("length",), 0)],
    ),
    "a read of what was never written": (
        SEGMENT,
        [call(1, 2, append(b"x"), appended(0, 1)), call(3, 4, ("read", 0), b"y")],
    ),
    "a read of what is written only later": (
        SEGMENT,
        [call(1, 2, ("read", 0), b"x"), call(3, 4, append(b"x"), appended(0, 1))],
    ),
    "a read that goes back": (
        SEGMENT,
        [
            call(1, 9, append(b"x"), appended(0, 1)),
            call(2, 3, ("length",), 1),
            call(4, 5, ("length",), 0),
        ],
    ),
    "a lost append shows and is gone again": (
        SEGMENT,
        [call(1, NEVER, append(b"x", 0)), call(2, 3, ("length",), 1), call(4, 5, ("length",), 0)],
    ),
    "a lost append takes effect twice": (
        SEGMENT,
        [call(1, NEVER, append(b"x")), call(2, 3, ("read", 0), b"x"), call(4, 5, ("read", 0), b"xx")],
    ),
    "a lost append has taken effect before it was asked for": (
        SEGMENT,
        [call(1, 2, ("read", 0), b"x"), call(3, NEVER, append(b"x"))],
    ),
    "an append takes effect twice": (
        SEGMENT,
        [call(1, 2, append(b"x"), appended(0, 1)), call(3, 4, ("read", 0), b"xx")],
    ),
    "two winners at one offset": (
        SEGMENT,
        [call(1, 4, append(b"x", 0), appended(0, 1)), call(2, 3, append(b"y", 0), appended(0, 1))],
    ),
    "appends out of order": (
        SEGMENT,
        [call(1, 2, append(b"x"), appended(1, 2)), call(3, 4, append(b"y"), appended(0, 1))],
    ),
    "bytes in another order than the offsets": (
        SEGMENT,
        [
            call(1, 4, append(b"x"), appended(0, 1)),
            call(1, 4, append(b"y"), appended(1, 2)),
            call(5, 6, ("read", 0), b"yx"),
        ],
    ),
    "an acknowledged append is lost": (
        SEGMENT,
        [call(1, 2, append(b"x"), appended(0, 1)), call(3, 4, append(b"y"), appended(0, 1))],
    ),
    "a refused append is stored": (
        SEGMENT,
        [
            call(1, 2, append(b"x"), appended(0, 1)),
            call(3, 4, append(b"y", 0), conflict(1, b"x")),
            call(5, 6, ("read", 0), b"xy"),
        ],
    ),
    "refused without a reason": (SEGMENT, [call(1, 2, append(b"x", 0), conflict(0))]),
    "refused with bytes that are not there": (
        SEGMENT,
        [call(1, 2, append(b"x"), appended(0, 1)), call(3, 4, append(b"y", 0), conflict(1, b"z"))],
    ),
    "two winners of one compare-and-set": (
        SEGMENT,
        [call(1, 4, set_a(None, b"1"), DONE), call(2, 3, set_a(None, b"2"), DONE)],
    ),
    "a lost update of an attribute": (
        SEGMENT,
        [
            call(1, 2, set_a(None, b"1"), DONE),
            call(3, 4, set_a(b"1", b"2"), DONE),
            call(5, 6, ("attributes",), (("a", b"1"),)),
        ],
    ),
    "a lost compare-and-set takes effect twice": (
        SEGMENT,
        [
            call(1, NEVER, set_a(None, b"1")),
            call(2, 3, ("attributes",), (("a", b"1"),)),
            call(4, 5, set_a(b"1", None), DONE),
            call(6, 7, ("attributes",), (("a", b"1"),)),
        ],
    ),
    "the bytes of an append without its attributes": (
        SEGMENT,
        [
            call(1, 2, set_a(None, b"1"), DONE),
            call(3, 4, append(b"x", 0, ("a", b"0", b"2")), conflict(0, b"", ("a", b"1"))),
            call(5, 6, ("length",), 1),
        ],
    ),
    "the attributes of an append without its bytes": (
        SEGMENT,
        [
            call(1, NEVER, append(b"x", 0, ("a", None, b"1"))),
            call(2, 3, ("attributes",), (("a", b"1"),)),
            call(4, 5, ("length",), 0),
        ],
    ),
    "the attribute is compared and the offset is not": (
        SEGMENT,
        [
            call(1, 2, append(b"x"), appended(0, 1)),
            call(3, 4, append(b"y", 0, ("a", None, b"1")), appended(1, 2)),
        ],
    ),
    "a stale fetch": (
        STATE,
        [call(1, 2, ("add", 1), ((), 1)), call(3, 4, ("fetch",), ((), 0))],
    ),
    "an update takes effect twice": (
        STATE,
        [call(1, 2, ("push", "x"), (("x",), 0)), call(3, 4, ("fetch",), (("x", "x"), 0))],
    ),
    "an update is answered with itself twice": (STATE, [call(1, 2, ("push", "x"), (("x", "x"), 0))]),
    "a lost update": (
        STATE,
        [
            call(1, 2, ("add", 1), ((), 1)),
            call(1, 2, ("add", 2), ((), 2)),
            call(3, 4, ("fetch",), ((), 2)),
        ],
    ),
    "an update on another state than it saw": (
        STATE,
        [
            call(1, 4, ("push_if", "x", 0), (True, (), 0)),
            call(2, 3, ("push_if", "y", 0), (True, (), 0)),
        ],
    ),
    "nothing to do on a state that was gone when the call began": (
        STATE,
        [
            call(1, 2, ("add", 1), ((), 1)),
            call(3, 4, ("add", 1), ((), 2)),
            call(5, 6, ("push_if", "x", 0), (False, (), 1)),
        ],
    ),
    "a part of an update": (
        STATE,
        [call(1, 2, ("push_if", "x", 0), (True, (), 0)), call(3, 4, ("fetch",), (("x",), 0))],
    ),
    "two replicas in different orders": (
        STATE,
        [
            call(1, 9, ("push", "x"), (("x",), 0)),
            call(1, 9, ("push", "y"), (("y",), 0)),
        ],
    ),
}


@pytest.mark.parametrize(("model", "history"), RIGHT.values(), ids=RIGHT)
def test_a_right_history_is_accepted(model: Model, history: list[Call]) -> None:
    assert linearize(history, model).is_linearizable
    assert has_any_order(history, model)


@pytest.mark.parametrize(("model", "history"), WRONG.values(), ids=WRONG)
def test_a_wrong_history_is_refused(model: Model, history: list[Call]) -> None:
    verdict = linearize(history, model)
    assert not verdict.is_linearizable
    assert verdict.blocked and str(verdict)
    assert not has_any_order(history, model)


def test_the_order_that_was_found_explains_every_answer() -> None:
    for model, history in RIGHT.values():
        state: Any = model.initial
        order = linearize(history, model).order
        for each in order:
            state, answer = model.run(state, each.operation)
            assert not each.is_answered or answer == each.answer
        assert {each for each in history if each.is_answered} <= set(order)


def test_a_search_that_takes_too_long_is_given_up() -> None:
    history = [call(1, 9, append(b"%d" % number), appended(0, 1)) for number in range(2)]
    history += [call(1, NEVER, append(b"%d" % number)) for number in range(12)]
    with pytest.raises(UndecidedError):
        linearize([*history, call(10, 11, ("length",), -1)], SEGMENT, max_steps=1000)


# Two checkers


def has_any_order(history: Sequence[Call], model: Model) -> bool:
    """The same question, answered by trying every order of every choice of the calls that were not answered."""
    answered = [each for each in history if each.is_answered]
    unanswered = [each for each in history if not each.is_answered]
    return any(
        _explains(order, model)
        for count in range(len(unanswered) + 1)
        for happened in itertools.combinations(unanswered, count)
        for order in itertools.permutations([*answered, *happened])
    )


def _explains(order: Sequence[Call], model: Model) -> bool:
    state: Any = model.initial
    latest_invocation = -math.inf
    for each in order:
        latest_invocation = max(latest_invocation, each.invoked)
        if each.returned < latest_invocation:  # it was over before one that stands before it began
            return False
        state, answer = model.run(state, each.operation)
        if each.is_answered and answer != each.answer:
            return False
    return True


values = st.sampled_from([None, b"1", b"2"])
segment_operations = st.one_of(
    st.builds(lambda data, at: append(data, at), st.sampled_from([b"", b"x", b"y"]), st.sampled_from([None, 0, 1, 2])),
    st.builds(set_a, values, values),
    st.builds(lambda at, old, new: append(b"z", at, ("a", old, new)), st.sampled_from([None, 0, 1]), values, values),
    st.sampled_from([("read", 0), ("length",), ("attributes",)]),
)
state_operations = st.one_of(
    st.builds(lambda element: ("push", element), st.sampled_from("xy")),
    st.builds(lambda amount: ("add", amount), st.integers(0, 2)),
    st.builds(lambda element, counter: ("push_if", element, counter), st.sampled_from("xy"), st.integers(0, 2)),
    st.just(("fetch",)),
)
OPERATIONS: list[tuple[Model, st.SearchStrategy[Operation]]] = [
    (SEGMENT, segment_operations),
    (STATE, state_operations),
]


@st.composite
def executions(draw: st.DrawFn, max_calls: int) -> tuple[Model, list[Call]]:
    """What really happened one after the other, each within a longer time in which it was asked for and answered."""
    model, operations = draw(st.sampled_from(OPERATIONS))
    state: Any = model.initial
    history = []
    for moment, operation in enumerate(draw(st.lists(operations, max_size=max_calls))):
        before, after = draw(st.floats(0, 4)), draw(st.floats(0, 4))
        is_lost = draw(st.integers(0, 5)) == 0
        if is_lost and draw(st.booleans()):
            history.append(call(moment - before, NEVER, operation))  # never carried out
            continue
        state, answer = model.run(state, operation)
        history.append(
            call(moment - before, NEVER if is_lost else moment + after, operation, None if is_lost else answer)
        )
    return model, draw(st.permutations(history))


@given(executions(max_calls=40))
def test_what_really_happened_is_accepted(execution: tuple[Model, list[Call]]) -> None:
    model, history = execution
    assert linearize(history, model).is_linearizable


@given(executions(max_calls=5), st.data())
def test_both_checkers_agree_on_changed_histories(execution: tuple[Model, list[Call]], data: st.DataObject) -> None:
    model, history = execution
    for _ in range(data.draw(st.integers(1, 3)) if history else 0):
        changes = list(_changed(history, data.draw(st.integers(0, len(history) - 1)), model))
        history = data.draw(st.sampled_from(changes))
    assert linearize(history, model).is_linearizable == has_any_order(history, model)


def _changed(history: list[Call], index: int, model: Model) -> Iterator[list[Call]]:
    """The same history where one call is at another time, or has the answer of another, or one that it had alone."""
    each = history[index]
    others = [*history[:index], *history[index + 1 :]]
    answers = [model.run(model.initial, each.operation)[1]]
    answers += [other.answer for other in others if other.is_answered and other.operation[0] == each.operation[0]]
    for answer in answers:
        yield [*others, each._replace(answer=answer, returned=min(each.returned, each.invoked + 2))]
    for later in (-3, 3):
        yield [*others, each._replace(invoked=each.invoked + later, returned=each.returned + later)]
    yield [*others, each._replace(returned=NEVER)]


# Real processes


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote([recorded_histories.__name__, *recorded_histories.DRIVERS]) as zygote:
        yield zygote


#: All together are in `python -m tests.chaos.linearizability --store nats`.
RECORDED = [
    ("sqlite", "segment"),
    ("sqlite", "state"),
    ("postgresql", "segment"),
    pytest.param("nats", "segment", marks=pytest.mark.broad),
    pytest.param("nats-cluster", "state", marks=pytest.mark.broad),
]


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with ExitStack() as running:
        try:
            host = running.enter_context(host_of(request.param, tmp_path_factory.mktemp("host")))
        except ServerUnavailable as reason:
            pytest.skip(f"no {request.param} here: {reason}")
        yield host


@pytest.mark.parametrize(("host", "kind"), RECORDED, indirect=["host"])
def test_what_real_processes_are_answered_is_linearizable(
    kind: str, host: Host, zygote: Zygote, tmp_path: Path
) -> None:
    report = Report.of(record(zygote, tmp_path, kind, 0, host), KINDS[kind].model)
    print(report)
    assert not report.violations, "\n".join(report.violations)
    assert report.calls > KINDS[kind].calls * (5 if host.kind == "sqlite" else 0.5)  # of those that were not killed
    assert any(verdict.order for verdict in report.verdicts.values())  # of one where nothing was answered it is empty


def test_a_diary_tells_answers_from_refusals_and_from_silence(tmp_path: Path) -> None:
    def refuse() -> Any:
        raise StoreUnavailableError("away")

    def say_nothing() -> Any:
        raise OutcomeUnknownError("lost")

    diary = Diary(tmp_path / "diary")
    assert diary.call("s", ("length",), lambda: 7) == 7
    diary.call("s", ("refused",), refuse)
    diary.call("t", ("lost",), say_nothing)
    diary.call("s", ("read", 0), lambda: b"x" * 100)
    (tmp_path / "diary").write_bytes((tmp_path / "diary").read_bytes()[:-50])  # killed while writing
    found = histories([tmp_path / "diary"])
    assert [(each.operation, each.answer) for each in found["s"]] == [(("length",), 7), (("read", 0), None)]
    assert [each.operation for each in found["t"]] == [("lost",)]
    assert [each.is_answered for each in [*found["s"], *found["t"]]] == [True, False, False]

"""Whether what concurrent processes were answered can be explained by one order of their calls.

A history is linearizable if each call can be given one moment between its invocation and its answer, so that the calls,
carried out one after the other in the order of these moments, are answered as they were (Herlihy and Wing, 1990). One
that never got an answer may have had its moment at any time after its invocation, or have none. The search is that of
Wing and Gong (1993), which does not look again at a set of calls and a state that it has seen (Lowe, 2017).

``python -m tests.chaos.linearizability --seconds 60`` records histories of real processes and checks them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

MAX_STEPS: Final = 2_000_000

Operation = tuple[Any, ...]
Answer = Any


class Call(NamedTuple):
    """One call, as the process saw it that made it. Times are of one clock."""

    process: str
    invoked: float
    returned: float  # math.inf: there was no answer
    operation: Operation
    answer: Answer = None

    @property
    def is_answered(self) -> bool:
        return self.returned != math.inf


class Model(Protocol):
    """What an object does that is used by one process alone."""

    initial: Hashable

    def run(self, state: Any, operation: Operation) -> tuple[Hashable, Answer]:
        """The state after the operation, and its answer."""
        ...


class Verdict(NamedTuple):
    """Whether there is an order, and which; if not, the longest that explains a part of the answers."""

    is_linearizable: bool
    order: Sequence[Call]
    #: Those that could have come next, none of which is answered as it was.
    blocked: Sequence[Call]
    steps: int

    def __str__(self) -> str:
        if self.is_linearizable:
            return f"linearizable, found in {self.steps} steps"
        lines = [f"NOT linearizable. {len(self.order)} calls can be explained, the last of them:"]
        lines += [_described(call) for call in self.order[-8:]]
        lines += ["and then none of:", *(_described(call) for call in self.blocked)]
        return "\n".join(lines)


def _described(call: Call) -> str:
    answer = repr(call.answer) if call.is_answered else "(no answer)"
    if len(answer) > 200:
        answer = f"{answer[:100]} ... {answer[-100:]}"
    return f"  {call.invoked:.6f}-{call.returned:.6f} {call.process}: {call.operation} -> {answer}"


class UndecidedError(Exception):
    """The search took too many steps."""


def linearize(history: Sequence[Call], model: Model, *, max_steps: int = MAX_STEPS) -> Verdict:
    """Look for an order of the calls that explains every answer in ``history``."""
    search = _Search(history, model)
    if not search.answered:
        return Verdict(True, [], [], 0)
    seen: set[tuple[int, Hashable]] = set()
    order: list[Call] = []
    longest: list[Call] = []
    last = (0, model.initial)  # of the longest
    open_steps = [search.steps_from(0, model.initial)]
    while open_steps:
        step = next(open_steps[-1], None)
        if step is None:
            open_steps.pop()
            if order:
                order.pop()
        elif (step.taken, step.state) not in seen:
            seen.add((step.taken, step.state))
            order.append(step.call)
            if step.taken & search.all_answered == search.all_answered:
                return Verdict(True, order, [], len(seen))
            if len(order) > len(longest):
                longest, last = order.copy(), (step.taken, step.state)
            if len(seen) > max_steps:
                raise UndecidedError(f"{len(seen)} steps were not enough for {len(history)} calls")
            open_steps.append(search.steps_from(step.taken, step.state))
    return Verdict(False, longest, [call for _, call in search.next_calls(last[0])], len(seen))


class _Step(NamedTuple):
    call: Call
    taken: int
    state: Hashable


class _Search:
    """The calls of a history, each with a bit of its own in the sets that are ints."""

    def __init__(self, history: Sequence[Call], model: Model) -> None:
        self._run = model.run
        calls = sorted(history, key=lambda call: call.invoked)
        bits = [(1 << number, call) for number, call in enumerate(calls)]
        self.answered = [(bit, call) for bit, call in bits if call.is_answered]
        self._unanswered = [(bit, call) for bit, call in bits if not call.is_answered]
        self.all_answered = sum(bit for bit, _ in self.answered)

    def next_calls(self, taken: int) -> Iterator[tuple[int, Call]]:
        """The calls that may come next: those that were invoked before any other that is left had its answer."""
        first_return = math.inf
        for bit, call in self.answered:
            if call.invoked > first_return:
                break
            if not taken & bit:
                first_return = min(first_return, call.returned)
                yield bit, call
        for bit, call in self._unanswered:
            if call.invoked <= first_return and not taken & bit:
                yield bit, call

    def steps_from(self, taken: int, state: Hashable) -> Iterator[_Step]:
        steps = []
        for bit, call in self.next_calls(taken):
            after, answer = self._run(state, call.operation)
            # A call without an answer counts only if it changes something; otherwise it need not have happened.
            if answer == call.answer if call.is_answered else after != state:
                if after == state:
                    # What changes nothing and may come now, may as well: in no order does it have to come later.
                    return iter([_Step(call, taken | bit, after)])
                steps.append(_Step(call, taken | bit, after))
        return iter(steps)


# The objects. Operations and answers are tuples, as they are written down.


class SegmentModel:
    """A segment of a store: an append-only list of bytes with registers beside it, all or some changed at once.

    ``("append", data, expected offset or None, ((attribute, expected or None, new or None), ...))`` is answered with
    ``("appended", offset, length)`` or ``("conflict", length, delta, ((attribute, value or None), ...))``;
    ``("read", offset)`` with the bytes from there on; ``("length",)``; ``("attributes",)`` with all of them.

    The parts of a conflict, looked at one after the other: ``("fails", expected offset or None, changes)``
    is answered with whether such an append does; ``("seen", offset or None)`` with the length and the bytes from there
    on; ``("seen attributes", names)``. ``("change", changes)`` is an append without bytes, whatever the length.
    """

    initial: Hashable = (b"", ())

    def run(self, state: tuple[bytes, tuple[tuple[str, bytes], ...]], operation: Operation) -> tuple[Hashable, Answer]:
        data, pairs = state
        match operation:
            case ("append", new_data, expected_offset, changes):
                return self._append(data, dict(pairs), new_data, expected_offset, changes)
            case ("read", offset):
                return state, data[offset:]
            case ("length",):
                return state, len(data)
            case ("attributes",):
                return state, pairs
            case ("fails", expected_offset, changes):
                return state, expected_offset not in (None, len(data)) or _present(pairs, changes) != _expected(changes)
            case ("seen", offset):
                return state, (len(data), b"" if offset is None else data[offset:])
            case ("seen attributes", names):
                return state, tuple((name, dict(pairs).get(name)) for name in names)
            case ("change", changes):
                after, answer = self._append(data, dict(pairs), b"", None, changes)
                return after, answer[0]
        raise ValueError(f"no such operation: {operation}")

    def _append(
        self,
        data: bytes,
        attributes: dict[str, bytes],
        new_data: bytes,
        expected_offset: int | None,
        changes: tuple[tuple[str, bytes | None, bytes | None], ...],
    ) -> tuple[Hashable, Answer]:
        present = _present(attributes.items(), changes)
        if expected_offset not in (None, len(data)) or _expected(changes) != present:
            delta = b"" if expected_offset is None else data[expected_offset:]
            return (data, tuple(sorted(attributes.items()))), ("conflict", len(data), delta, present)
        for name, _, new in changes:
            attributes.pop(name, None)
            if new is not None:
                attributes[name] = new
        after = (data + new_data, tuple(sorted(attributes.items())))
        return after, ("appended", len(data), len(after[0]))


_Changes = tuple[tuple[str, bytes | None, bytes | None], ...]


def _present(pairs: Iterable[tuple[str, bytes]], changes: _Changes) -> tuple[tuple[str, bytes | None], ...]:
    values = dict(pairs)
    return tuple((name, values.get(name)) for name, _, _ in changes)


def _expected(changes: _Changes) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((name, value) for name, value, _ in changes)


def taken_apart(history: Iterable[Call]) -> Iterator[Call]:
    """The same history of a segment, where the parts of each conflict may be of different moments.

    The same goes for the length that is answered to an append without bytes and without an offset. What is asked of
    such a store is that an append takes place exactly if its expectations hold, and that each part of a conflict was
    so, while the call lasted.
    """
    for call in history:
        match call.operation, call.answer:
            case (("append", _, offset, changes), ("conflict", length, delta, present)):
                yield call._replace(operation=("fails", offset, changes), answer=True)
                yield call._replace(operation=("seen", offset), answer=(length, delta))
                names = tuple(name for name, _ in present)
                yield call._replace(operation=("seen attributes", names), answer=present)
            case (("append", b"", None, changes), ("appended", *_)):
                yield call._replace(operation=("change", changes), answer="appended")
            case _:
                yield call


class StateModel:
    """A shared state that is a list of elements and a counter; every answer holds both.

    ``("push", element)`` and ``("add", amount)`` are answered with the state after them; ``("push_if", element,
    counter)`` pushes and adds 1 if the counter is that, and is answered with whether it was and the state that it saw;
    ``("fetch",)`` with the state.
    """

    initial: Hashable = ((), 0)

    def run(self, state: tuple[tuple[str, ...], int], operation: Operation) -> tuple[Hashable, Answer]:
        elements, counter = state
        match operation:
            case ("push", element):
                after = ((*elements, element), counter)
                return after, after
            case ("add", amount):
                after = (elements, counter + amount)
                return after, after
            case ("push_if", element, expected):
                if counter != expected:
                    return state, (False, *state)
                return ((*elements, element), counter + 1), (True, *state)
            case ("fetch",):
                return state, state
        raise ValueError(f"no such operation: {operation}")


if __name__ == "__main__":
    from .recorded_histories import main

    main()

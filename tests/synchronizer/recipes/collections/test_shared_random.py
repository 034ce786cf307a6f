"""A shared map against a dict, and a shared set against a set, in random histories: several processes, each opened
again now and then, on stores that fail at any step, with another process acting at any step too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from synchronizer import (
    ANY,
    OutcomeUnknownError,
    SegmentStore,
    SharedMap,
    SharedSet,
    StoreUnavailableError,
    open_store,
)
from synchronizer.testing import FailingStore, Operation
from tests.synchronizer.test_histories import EagerClock

Call = tuple[str, tuple[Any, ...]]


class PlainMap(dict[str, int]):
    """What a shared map does, of one process."""

    def put(self, key: str, value: int) -> None:
        self[key] = value

    def put_if_absent(self, key: str, value: int) -> bool:
        return False if key in self else not self.put(key, value)

    def replace(self, key: str, new: int, expected: Any = ANY) -> bool:
        return not self.put(key, new) if key in self and expected in (ANY, self[key]) else False

    def remove(self, key: str, expected: Any = ANY) -> bool:
        return self.pop(key) is not None if key in self and expected in (ANY, self[key]) else False

    def popitem(self) -> tuple[str, int]:
        key = min(self, default="")
        return key, self.pop(key)


class PlainSet(set[str]):
    """What a shared set does, of one process."""

    def add(self, item: str) -> bool:  # type: ignore[override]
        return False if item in self else super().add(item) is None

    def discard(self, item: str) -> bool:  # type: ignore[override]
        return super().discard(item) is None if item in self else False

    def pop(self) -> str:
        item = min(self, default="", key=lambda item: (len(item), item))
        self.remove(item)
        return item


def answer(target: Any, call: Call) -> Any:
    """What ``call`` answers. What changes in place answers itself."""
    name, arguments = call
    try:
        result = getattr(target, name)(*arguments)
    except KeyError:
        return KeyError
    return None if result is target else result


class SharedHistories(RuleBasedStateMachine):
    """Two processes make calls; what each answers, and what is stored, is what the plain collection says."""

    plain: Callable[[], Any]
    calls: st.SearchStrategy[Call]

    @staticmethod
    def opened(store: SegmentStore, clock: EagerClock) -> Any:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.clock = EagerClock()
        self.inner = open_store("memory://", clock=self.clock)
        self.stores = [FailingStore(self.inner) for _ in range(2)]
        self.shared = [self.opened(store, self.clock) for store in self.stores]
        self.states = [self.plain()]  # all that there were, in order

    process = st.integers(0, 1)
    faults = st.lists(st.sampled_from(["fail_appends", "lose_requests", "lose_answers"]), max_size=2)

    @rule(
        process=process,
        data=st.data(),
        faults=faults,
        fails_at=st.integers(0, 6),
        disturbed_at=st.integers(0, 6),
    )
    def call(self, process: int, data: st.DataObject, faults: Sequence[str], fails_at: int, disturbed_at: int) -> None:
        mine, others = data.draw(self.calls, "call"), data.draw(self.calls, "of the other")
        store, done = self.stores[process], 0
        said: list[Any] = []

        def before(operation: Operation) -> None:
            nonlocal done
            done += 1
            if done == disturbed_at:
                said.append(answer(self.shared[1 - process], others))
            if done == fails_at:
                raise StoreUnavailableError("a fault at this step", verb=operation.verb)

        for fault in faults:
            getattr(store, fault)()
        store.before = before
        unknown, heard = False, None
        try:
            heard = answer(self.shared[process], mine)
        except OutcomeUnknownError:
            unknown = True
        finally:
            store.before = None
            store._append_faults.clear()

        truth = self.truth()
        orders = [[mine, others], [others, mine]] if said else [[mine]]
        outcomes = []
        for order in orders:
            state, answers, passed = copy.copy(self.states[-1]), {}, []
            for each in order:
                answers[id(each)] = answer(state, each)
                passed.append(copy.copy(state))
            outcomes.append((state, answers[id(mine)], [answers[id(others)]] if said else [], passed))
        if unknown:
            state = copy.copy(self.states[-1])
            outcomes.append((state, None, [answer(state, others)] if said else [], [copy.copy(state)]))
        fitting = [
            passed
            for state, own, other, passed in outcomes
            if state == truth and (unknown or own == heard) and other == said
        ]
        assert fitting, (mine, heard, others, said, truth, self.states[-1])
        self.states += fitting[0]
        if not unknown:
            assert any(self.shared[process].copy() == state for _, _, _, passed in outcomes for state in passed)

    @rule(process=process)
    def refresh(self, process: int) -> None:
        self.shared[process].refresh()
        assert self.shared[process].copy() == self.states[-1]
        assert self.shared[process] == self.states[-1]
        assert len(self.shared[process]) == len(self.states[-1])

    @rule(process=process)
    def open_again(self, process: int) -> None:
        self.shared[process].close()
        self.shared[process] = self.opened(self.stores[process], self.clock)
        assert self.shared[process].copy() == self.states[-1]

    def truth(self) -> Any:
        with self.opened(self.inner, self.clock) as other:
            return other.copy()


keys = st.sampled_from(["", "a", "b", "ö"])
values = st.integers(0, 2)
items = st.sampled_from(["", "a", "b", "cc"])
some = st.frozensets(items)


class MapHistories(SharedHistories):
    plain = PlainMap
    calls = st.one_of(
        *(
            st.tuples(st.just(name), st.tuples(*arguments))
            for name, arguments in [
                ("put", (keys, values)),
                ("__setitem__", (keys, values)),
                ("put_if_absent", (keys, values)),
                ("replace", (keys, values)),
                ("replace", (keys, values, values)),
                ("remove", (keys,)),
                ("remove", (keys, values)),
                ("__delitem__", (keys,)),
                ("pop", (keys,)),
                ("pop", (keys, st.none())),
                ("popitem", ()),
                ("setdefault", (keys, values)),
                ("update", (st.dictionaries(keys, values),)),
                ("clear", ()),
            ]
        )
    )

    @staticmethod
    def opened(store: SegmentStore, clock: EagerClock) -> SharedMap[int]:
        return SharedMap(store, "map", int, clock=clock, timeout=5.0, compaction_bytes=300)


class SetHistories(SharedHistories):
    plain = PlainSet
    calls = st.one_of(
        *(
            st.tuples(st.just(name), st.tuples(*arguments))
            for name, arguments in [
                ("add", (items,)),
                ("discard", (items,)),
                ("remove", (items,)),
                ("pop", ()),
                ("update", (some,)),
                ("__ior__", (some,)),
                ("__isub__", (some,)),
                ("__iand__", (some,)),
                ("__ixor__", (some,)),
                ("clear", ()),
            ]
        )
    )

    @staticmethod
    def opened(store: SegmentStore, clock: EagerClock) -> SharedSet[str]:
        return SharedSet(store, "set", str, clock=clock, timeout=5.0, compaction_bytes=300)


SHORT = settings(stateful_step_count=20, suppress_health_check=list(HealthCheck))
TestMap = MapHistories.TestCase
TestMap.settings = SHORT
TestSet = SetHistories.TestCase
TestSet.settings = SHORT

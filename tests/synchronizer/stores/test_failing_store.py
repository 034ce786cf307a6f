from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from synchronizer.errors import SealedError, StoreUnavailableError
from synchronizer.store import Appended, Conflict, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.testing import FailingStore, Operation


@pytest.fixture
def store() -> Iterator[FailingStore]:
    with FailingStore(open_store("memory://")) as store:
        store.create("s")
        yield store


def test_an_append_that_fails_was_not_stored(store: FailingStore) -> None:
    store.fail_appends(2)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            store.append("s", b"data")
    assert store.append("s", b"data") == Appended(0, 4)


def test_a_lost_request_was_not_stored(store: FailingStore) -> None:
    store.lose_requests()
    assert isinstance(store.append("s", b"data", expected_offset=0), UnknownOutcome)
    assert store.append("s", b"data", expected_offset=0) == Appended(0, 4)


def test_a_lost_answer_was_stored(store: FailingStore) -> None:
    store.lose_answers()
    assert isinstance(store.append("s", b"data", expected_offset=0), UnknownOutcome)
    assert store.append("s", b"data", expected_offset=0) == Conflict(4, b"data")


def test_nothing_works_while_the_store_is_unavailable(store: FailingStore) -> None:
    store.unavailable = True
    for call in (lambda: store.append("s", b""), lambda: store.info("s"), lambda: store.wait({"s": 0}, 0)):
        with pytest.raises(StoreUnavailableError):
            call()
    store.unavailable = False
    assert store.info("s").length == 0


def test_a_read_is_cut_short(store: FailingStore) -> None:
    store.append("s", b"data")
    store.cut_reads()
    assert [store.read("s", 0, 10), store.read("s", 0, 10)] == [b"da", b"data"]


def test_a_wait_misses_a_change(store: FailingStore) -> None:
    store.append("s", b"data")
    store.miss_changes()
    assert [store.wait({"s": 0}, 0.01), store.wait({"s": 0}, 0.01)] == [frozenset(), {"s"}]


def test_another_process_acts_just_before_an_operation(store: FailingStore) -> None:
    def interfere(operation: Operation) -> None:
        if operation == ("append", "s"):
            store.before = None
            store.inner.append("s", b"theirs")

    store.before = interfere
    assert store.append("s", b"ours", expected_offset=0) == Conflict(6, b"theirs")


def test_somebody_looks_right_after_each_operation_that_was_carried_out(store: FailingStore) -> None:
    seen = []
    store.after = lambda operation: seen.append((operation.verb, store.inner.info("s")))
    store.append("s", b"data")
    store.lose_requests()
    store.append("s", b"never there")
    store.lose_answers()
    store.append("s", b"!")
    store.seal("s")
    with pytest.raises(SealedError):
        store.append("s", b"")
    assert [(verb, info.length, info.sealed) for verb, info in seen] == [
        ("append", 4, False),
        ("append", 5, False),
        ("seal", 5, True),
    ]


def test_every_operation_is_announced_before_and_told_after(store: FailingStore) -> None:
    told: list[tuple[str, Operation]] = []
    store.before = lambda operation: told.append(("before", operation))
    store.after = lambda operation: told.append(("after", operation))
    store.create("t")
    store.append("s", b"data")
    store.info("s")
    store.list()
    store.read("s", 0, 4)
    store.attributes("s")
    store.wait({"s": 0}, 0)
    store.truncate("s", 1)
    store.seal("s")
    if store.guarantees.fair_lock:
        store.fair_lock("s", 0)
    store.delete("s")
    before, after = told[::2], told[1::2]
    assert [operation for _, operation in before] == [operation for _, operation in after] == store.operations[1:]
    assert {when for when, _ in before} == {"before"} and {when for when, _ in after} == {"after"}


def test_operations_are_recorded_in_order(store: FailingStore) -> None:
    store.append("s", b"")
    store.list()
    assert store.operations == [("create", "s"), ("append", "s"), ("list", "")]
    assert store.count("append") == 1


def test_the_same_seed_gives_the_same_faults() -> None:
    def outcomes(seed: int) -> list[str]:
        with FailingStore(open_store("memory://"), rng=random.Random(seed), fault_rate=0.5) as store:
            store.inner.create("s")
            results = []
            for _ in range(50):
                try:
                    results.append(type(store.append("s", b"x")).__name__)
                except StoreUnavailableError:
                    results.append("unavailable")
            return [*results, str(store.inner.info("s").length)]

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert {"Appended", "UnknownOutcome", "unavailable"} <= set(outcomes(1))

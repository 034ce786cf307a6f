from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from synchronizer import ClosedError, InvalidArgumentError, SharedCounter, ValueChange
from synchronizer.testing import FailingStore
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)

Two = tuple[SharedCounter, SharedCounter]


@pytest.fixture
def two(store: FailingStore) -> Iterator[Two]:
    """The counter as two processes have it."""
    with SharedCounter(store, "visits") as one, SharedCounter(store.inner, "visits") as other:
        yield one, other


def test_each_addition_counts_and_answers_what_it_made(two: Two) -> None:
    one, other = two
    assert (one.value, one.add(), other.add(), other.add(5), one.add(-10)) == (0, 1, 2, 7, -3)
    assert (one.value, other.value) == (-3, 7), "a copy, until it is refreshed"
    other.refresh()
    assert other.value == -3


def test_it_is_replaced_if_the_newest_value_is_the_one_expected(two: Two) -> None:
    one, other = two
    other.add(5)
    assert not one.replace(9, expected=0)
    assert one.value == 5
    assert one.replace(9, expected=5)
    one.put(3)
    assert other.add() == 4


def test_an_answer_that_was_lost_counts_once(two: Two, store: FailingStore) -> None:
    one, other = two
    for fault in (store.lose_answers, store.lose_requests, store.fail_appends):
        fault()
        one.add()
    other.refresh()
    assert other.value == 3


@pytest.mark.stores("memory")
@pytest.mark.parametrize("amount", ["1", 1.0, True, 2**63, -(2**63) - 1, None])
def test_what_is_no_whole_number_of_64_bits_is_refused(amount: Any, two: Two) -> None:
    counter, _ = two
    for call in (counter.add, counter.put, lambda amount: counter.replace(amount, 0)):
        with pytest.raises(InvalidArgumentError):
            call(amount)
    assert counter.value == 0


def test_the_sum_has_64_bits_too_and_what_is_beyond_is_not_written(two: Two) -> None:
    one, other = two
    one.add(2**63 - 1)
    with pytest.raises(InvalidArgumentError, match="64 bits"):
        other.add()
    assert other.add(-1) == 2**63 - 2
    one.put(-(2**63))
    with pytest.raises(InvalidArgumentError, match="64 bits"):
        other.add(-1)
    assert other.add(1) == -(2**63) + 1


def test_listeners_hear_each_value(two: Two) -> None:
    one, other = two
    heard: list[tuple[int, int]] = []

    def listener(change: ValueChange[int]) -> None:
        heard.append((change.before, change.after))

    unregister = one.register_listener(listener)
    other.add()
    one.add(2)
    one.add(0)
    other.put(9)
    until(lambda: len(heard) == 3, "three changes")
    assert heard == [(0, 1), (1, 3), (3, 9)]
    unregister()


def test_watching_gives_the_newest_and_ends_with_the_counter(two: Two) -> None:
    one, other = two
    watched = one.watch()
    assert next(watched) == 0
    other.add()
    assert next(watched) == 1
    one.close()
    assert list(watched) == []
    with pytest.raises(ClosedError):
        one.add()

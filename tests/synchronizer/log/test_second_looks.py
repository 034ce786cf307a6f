"""A replica stops for good only when the store says the same thing several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from synchronizer import AppendResult, Conflict, CorruptStateError, TruncatedError, open_store
from synchronizer.log.follower import LOOKS
from synchronizer.testing import FailingStore
from tests.synchronizer.accounts import Add, Replica, opened


class LyingStore(FailingStore):
    """The next ``lies`` reads, or appends, are answered wrongly."""

    lies = 0
    wrong_read: Callable[[bytes], bytes] | None = None
    wrong_append: Callable[[AppendResult], AppendResult] | None = None

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        data = super().read(segment, offset, max_bytes)
        if self.wrong_read is None or not self._lie():
            return data
        return self.wrong_read(data)

    def append(self, *args: Any, **kwargs: Any) -> AppendResult:
        answer = super().append(*args, **kwargs)
        if self.wrong_append is None or not self._lie():
            return answer
        return self.wrong_append(answer)

    def _lie(self) -> bool:
        self.lies -= 1
        return self.lies >= 0


@pytest.fixture
def store() -> Iterator[LyingStore]:
    with LyingStore(open_store("memory://")) as store:
        yield store


def truncated(data: bytes) -> bytes:
    raise TruncatedError("the data before the segment's start was truncated", start_offset=1 << 20)


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


def cut_off(data: bytes) -> bytes:
    return data[:-1]


def behind(store: LyingStore) -> Replica:
    """A replica that has not seen the last update."""
    replica, other = opened(store), opened(store)
    other.update_state_unconditionally(Add())
    return replica


@pytest.mark.parametrize("wrong_read", [truncated, damaged, cut_off])
@pytest.mark.parametrize("lies", [1, LOOKS - 1])
def test_an_answer_that_the_store_does_not_repeat_stops_no_replica(
    store: LyingStore, wrong_read: Callable[[bytes], bytes], lies: int
) -> None:
    replica = behind(store)
    store.wrong_read, store.lies = wrong_read, lies
    assert replica.fetch_updates().value == 1
    assert replica.update_state_unconditionally(Add()).value == 2


@pytest.mark.parametrize("wrong_read", [truncated, damaged, cut_off])
def test_what_the_store_says_again_and_again_stops_it_for_good(
    store: LyingStore, wrong_read: Callable[[bytes], bytes]
) -> None:
    replica = behind(store)
    store.wrong_read, store.lies = wrong_read, 1 << 20
    reads = store.count("read")
    with pytest.raises(CorruptStateError):
        replica.fetch_updates()
    assert LOOKS <= store.count("read") - reads <= 20 * LOOKS
    store.lies = 0
    with pytest.raises(CorruptStateError):
        replica.fetch_updates()
    assert opened(store).state.value == 1  # another one reads anew


def with_shorter_log(answer: AppendResult) -> AppendResult:
    return Conflict(1)


def with_damaged_delta(answer: AppendResult) -> AppendResult:
    assert isinstance(answer, Conflict)
    return Conflict(answer.length, damaged(answer.delta), answer.attributes)


@pytest.mark.parametrize("wrong_append", [with_shorter_log, with_damaged_delta])
def test_an_append_that_is_answered_wrongly_is_settled_by_reading(
    store: LyingStore, wrong_append: Callable[[AppendResult], AppendResult]
) -> None:
    replica = behind(store)
    store.wrong_append, store.lies = wrong_append, 1
    assert replica.update_state_unconditionally(Add()).value == 2
    assert opened(store).state.value == 2

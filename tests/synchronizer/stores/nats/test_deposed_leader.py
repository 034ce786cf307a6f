"""A leader that was deposed and does not know it yet tells of the past. A process does not unlearn what it has seen.

The histories are scripted: a real server's answers are kept and given again later, as such a leader would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from synchronizer.errors import NotFoundError, ReaderGroupError
from synchronizer.store import MAX_ATTRIBUTE_CHANGES, AttributeChange
from synchronizer.stores import open_store
from synchronizer.stores.nats import reading as nats_reading
from synchronizer.stores.nats.frames import Answer, Outgoing
from synchronizer.stores.nats.reading import Listing, NatsReader
from synchronizer.stores.nats.store import NatsStore


class Past:
    """Keeps what the servers answer, and gives it again for as many calls as it is told."""

    def __init__(self, store: NatsStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ask = store._connection.ask_all
        self._kept: dict[Outgoing, list[Answer]] = {}
        self.is_kept = True
        self.calls = 0
        monkeypatch.setattr(store._connection, "ask_all", self._answers)

    def _answers(self, messages: Sequence[Outgoing]) -> list[list[Answer]]:
        if self.calls and all(message in self._kept for message in messages):
            self.calls -= 1
            return [self._kept[message] for message in messages]
        answers = self._ask(messages)
        if self.is_kept:
            self._kept |= zip(messages, answers, strict=True)
        return answers

    def returns(self, calls: int) -> None:
        self.is_kept, self.calls = False, calls


@pytest.fixture
def store(nats_url: str) -> Iterator[NatsStore]:
    """On one server, that is read as if there were three."""
    with NatsStore(nats_url) as store:
        store._reader._is_replicated = True
        yield store


def change(before: bytes | None, after: bytes) -> dict[str, AttributeChange]:
    return {"a": AttributeChange(before, after)}


@pytest.mark.parametrize("names", [None, ["a"]])
def test_attributes_that_this_process_changed_are_not_those_of_before(
    store: NatsStore, monkeypatch: pytest.MonkeyPatch, names: list[str] | None
) -> None:
    store.create("s")
    store.append("s", b"", attributes=change(None, b"1"))
    past = Past(store, monkeypatch)
    assert store.attributes("s", names=names) == {"a": b"1"}
    store.append("s", b"", attributes=change(b"1", b"2"))
    past.returns(3)
    assert store.attributes("s", names=names) == {"a": b"2"}
    assert past.calls == 0


def test_attributes_that_this_process_saw_are_not_those_of_before(
    store: NatsStore, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process changed them; that they are of the past could not be known before they were seen."""
    store.create("s")
    past = Past(store, monkeypatch)
    assert store.attributes("s") == {}
    with open_store(nats_url) as other:
        other.append("s", b"", attributes=change(None, b"1"))
    assert _attributes(store, past) == {"a": b"1"}
    past.returns(3)
    assert store.attributes("s") == {"a": b"1"}
    assert past.calls == 0


def _attributes(store: NatsStore, past: Past) -> object:
    past.is_kept = False
    return store.attributes("s")


def test_a_segment_that_this_process_created_is_there(store: NatsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    past = Past(store, monkeypatch)
    with pytest.raises(NotFoundError):
        store.attributes("s")
    assert list(store.list()) == []
    past.is_kept = False
    store.create("s")
    past.returns(2)
    assert store.attributes("s") == {}
    past.returns(2)
    assert list(store.list()) == ["s"]
    assert past.calls == 0


def test_a_segment_that_another_process_deleted_is_gone_at_once(
    store: NatsStore, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last head says so: it is not taken for one that a deposed leader does not know yet."""
    monkeypatch.setattr(nats_reading, "_DEPOSED_SECONDS", 3600.0)
    store.create("s")
    store.append("s", b"", attributes=change(None, b"1"))
    with open_store(nats_url) as other:
        other.delete("s")
    with pytest.raises(NotFoundError):
        store.attributes("s")


@pytest.mark.parametrize("read", [lambda store: store.attributes("s"), lambda store: list(store.list())])
def test_what_stays_in_the_past_has_gone_back(
    store: NatsStore, monkeypatch: pytest.MonkeyPatch, read: Callable[[NatsStore], object]
) -> None:
    """As after a backup was restored: the store is as it is."""
    store.create("s")
    past = Past(store, monkeypatch)
    before = read(store)
    past.is_kept = False
    store.append("s", b"", attributes=change(None, b"1"))
    store.create("t")
    monkeypatch.setattr(nats_reading, "_DEPOSED_SECONDS", 0.1)
    past.returns(1 << 30)
    assert read(store) == before


@pytest.mark.parametrize("comes", ["between", "before"])
def test_of_more_attributes_than_are_told_at_once_none_is_left_out(
    store: NatsStore, nats_url: str, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """They are listed first and read afterwards; one may come between, or the list may be one of the past."""
    store.create("s")
    expected = {f"{number:04}": b"0" for number in range(1_100)}
    names = list(expected)
    for first in range(0, len(names), MAX_ATTRIBUTE_CHANGES):
        chunk = names[first : first + MAX_ATTRIBUTE_CHANGES]
        store.append("s", b"", attributes={name: AttributeChange(None, b"0") for name in chunk})
    listed = NatsReader._listed
    stale = store._reader._listed(store._subjects.attributes("s"))
    lists: list[Listing] = []

    def list_late(reader: NatsReader, subject_filter: str) -> Listing:
        listing = listed(reader, subject_filter) if lists or comes == "between" else stale
        if not lists and comes == "between":
            other.append("s", b"", attributes={"new": AttributeChange(None, b"1")})
        lists.append(listing)
        return listing

    with open_store(nats_url) as other:
        if comes == "before":
            other.append("s", b"", attributes={"new": AttributeChange(None, b"1")})
        monkeypatch.setattr(NatsReader, "_listed", list_late)
        assert store.attributes("s") == expected | {"new": b"1"}
    assert len(lists) > 1


def test_errors_of_the_past_are_ours(store: NatsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("s")
    past = Past(store, monkeypatch)
    store.attributes("s")
    past.is_kept = False
    store.append("s", b"", attributes=change(None, b"1"))
    monkeypatch.setattr(store._reader, "_timeout_seconds", 0.05)
    past.returns(1 << 30)
    with pytest.raises(ReaderGroupError):
        store.attributes("s")

"""Attributes that the head of a segment carries: an append of data that changes them is a single message.

Callers must see the same as with any other attribute. So some tests make the same calls on a store in memory, and
compare the answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from synchronizer.errors import CorruptStoreError
from synchronizer.store import ANY, Append, Appended, AttributeChange, Conflict, SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.memory import MemoryStore
from synchronizer.stores.nats import store as backend
from synchronizer.stores.nats.frames import Answer, Outgoing
from synchronizer.stores.nats.reading import Snapshot
from synchronizer.stores.nats.store import NatsStore
from synchronizer.stores.nats.wire import HEAD, Head, carried_in, carrying, head_of
from tests.seeds import seeds


@pytest.fixture
def store(nats_url: str) -> Iterator[NatsStore]:
    with NatsStore(nats_url) as store:
        yield store


def stored(store: NatsStore) -> int:
    """How many messages were stored in the stream so far."""
    answer = store._connection.ask(store._api.info, b"")
    return int(answer.document["state"]["last_seq"])


def head_in(store: NatsStore, segment: str) -> Head:
    return store._reader.head(segment)


def write(store: SegmentStore, value: object, *, name: str = "writer", data: bytes = b"data") -> None:
    change = AttributeChange(ANY, str(value).encode())
    assert isinstance(store.append("s", data, attributes={name: change}), Appended)


def carry(store: SegmentStore, *names: str) -> None:
    """Create the segment, and append until its head carries these attributes."""
    store.create("s")
    for name in names:
        for number in range(2):
            write(store, number, name=name)


def test_the_first_append_of_data_with_an_attribute_says_that_it_is_carried(store: NatsStore) -> None:
    store.create("s")
    write(store, "first")
    assert carried_in(head_in(store, "s")) == {"writer": b"first"}
    before = stored(store)
    assert store.append("s", b"", attributes={"writer": AttributeChange(ANY, None)}) == Appended(4, 4)
    assert stored(store) == before + 1, "a writer that closes removes its number in one message, too"
    assert store.attributes("s") == {}
    assert store.append("s", b"x", attributes={"writer": AttributeChange(b"first", b"2")}) == Conflict(
        4, b"", {"writer": None}
    )
    write(store, "again")
    assert store.attributes("s") == {"writer": b"again"}


def test_an_append_of_data_with_an_attribute_that_is_carried_is_one_message(store: NatsStore) -> None:
    """A single server writes each atomic batch of messages to files of its own before, with six flushes."""
    carry(store, "writer")
    before = stored(store)
    for number in range(10):
        write(store, number)
    assert stored(store) == before + 10
    assert store.attributes("s") == {"writer": b"9"}
    with open_store(store.url) as other:
        assert other.attributes("s", "w") == other.attributes("s", names=["writer"]) == {"writer": b"9"}


def test_an_attribute_that_is_changed_alone_is_not_carried(store: NatsStore) -> None:
    """A lease is such a one: a process takes it with an entry of a log, and renews it alone. Appends to the log would
    lose their races against renewals that store a new head.
    """
    store.create("s")
    write(store, "taken")
    for _ in range(3):
        write(store, "renewed", data=b"")
        assert head_in(store, "s").carried == ""
        write(store, "taken")
        assert head_in(store, "s").carried == ""


def test_a_change_of_a_carried_attribute_alone_takes_it_out_of_the_head(store: NatsStore) -> None:
    carry(store, "a", "b")
    length = store.info("s").length
    assert store.append("s", b"", attributes={"a": AttributeChange(b"1", b"alone")}) == Appended(length, length)
    assert carried_in(head_in(store, "s")) == {"b": b"1"}
    assert store.append("s", b"", attributes={"b": AttributeChange(ANY, None)}) == Appended(length, length)
    assert head_in(store, "s").carried == ""
    assert store.attributes("s") == {"a": b"alone"}
    assert store.append("s", b"", attributes={"b": AttributeChange(None, b"new")}) == Appended(length, length)


def test_truncating_and_sealing_leave_what_the_head_carries(store: NatsStore) -> None:
    carry(store, "writer")
    store.truncate("s", 3)
    assert store.attributes("s") == {"writer": b"1"}
    store.truncate("s", 8)
    write(store, "later")
    store.seal("s")
    with open_store(store.url) as other:
        assert other.attributes("s") == store.attributes("s") == {"writer": b"later"}


def test_a_segment_that_is_made_anew_has_none_of_them(store: NatsStore) -> None:
    carry(store, "writer")
    store.forget("s")
    store.create("s")
    assert store.attributes("s") == {}
    write(store, "new")
    assert store.attributes("s") == {"writer": b"new"}


def test_a_head_carries_no_more_than_fits(store: NatsStore) -> None:
    """Each append stores it again."""
    long, short = [f"writer/{number:032}" for number in range(30)], [f"{number}" for number in range(30)]
    store.create("s")
    for names in long, short:
        for number in range(3):
            for name in names:
                write(store, number, name=name)
                head = head_in(store, "s")
                assert len(head.carried) <= backend._MAX_CARRIED_BYTES
                assert len(carried_in(head)) <= backend._MAX_CARRIED
    assert store.attributes("s") == dict.fromkeys(long + short, b"2")


def test_more_writers_than_a_head_carries_do_not_push_each_other_out_each_time(store: NatsStore) -> None:
    names = [f"writer/{number:032}" for number in range(14)]
    store.create("s")
    took = []
    for number in range(12):
        for name in names:
            before = stored(store)
            write(store, f"{number:016}", name=name)
            took.append(stored(store) - before)
    assert len(carried_in(head_in(store, "s"))) < len(names)
    assert took[28:].count(1) > len(took[28:]) / 2


def test_a_large_value_is_not_carried(store: NatsStore) -> None:
    carry(store, "a", "b")
    large = "large" * 50
    for _ in range(3):
        write(store, large, name="a")
        assert carried_in(head_in(store, "s")) == {"b": b"1"}
    assert store.attributes("s") == {"a": large.encode(), "b": b"1"}


def test_names_and_values_of_any_bytes_are_carried() -> None:
    values = {"a b=c/d%": bytes(range(256)), "\N{GRINNING FACE}\n": b"", "é.~*>": b"=", "None": b" "}
    found = carrying(values)
    assert found.isascii() and found.isprintable()
    assert carried_in(Head(7, 0, 0, 0, "open", found)) == values


def test_a_process_that_knows_an_older_head_gets_the_newest_values(store: NatsStore) -> None:
    with open_store(store.url) as other:
        carry(other, "writer")
        assert store.attributes("s") == {"writer": b"1"}
        write(store, "of the first")
        change = AttributeChange(b"1", b"lost")
        assert other.append("s", b"x", attributes={"writer": change}) == Conflict(12, b"", {"writer": b"of the first"})
        assert other.append("s", b"", attributes={"writer": change}) == Conflict(12, b"", {"writer": b"of the first"})
        write(other, "alone", data=b"")  # it is not carried any more
        change = AttributeChange(b"of the first", b"lost")
        assert store.append("s", b"x", attributes={"writer": change}) == Conflict(12, b"", {"writer": b"alone"})
        assert store.attributes("s") == {"writer": b"alone"}


def test_a_value_that_was_carried_and_removed_is_not_taken_for_the_present_one(store: NatsStore) -> None:
    """By a process that has seen the newest head, and not the attribute since."""
    with open_store(store.url) as other:
        carry(store, "writer")
        assert other.append("s", b"", attributes={"writer": AttributeChange(b"1", None)}) == Appended(8, 8)
        assert store.append("s", b"x") == Appended(8, 9)
        change = AttributeChange(b"1", b"lost")
        assert store.append("s", b"", attributes={"writer": change}) == Conflict(9, b"", {"writer": None})


def test_an_attribute_that_a_head_carries_while_another_process_plans_is_found(
    store: NatsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan reads the head, and then the attributes, which are of another moment."""
    with NatsStore(store.url) as other:
        store.create("s")
        write(store, "first", data=b"")
        ask = other._reader.attributes

        def ask_later(segment: str, names: Collection[str] | None) -> Snapshot:
            monkeypatch.undo()
            write(store, "second")
            write(store, "second")
            return ask(segment, names)

        monkeypatch.setattr(other._reader, "attributes", ask_later)
        assert isinstance(other.append("s", b"", attributes={"writer": AttributeChange(b"second", b"third")}), Appended)
        assert head_in(store, "s").carried == ""
        assert store.attributes("s") == {"writer": b"third"}


def test_appends_together_change_what_the_heads_carry(store: NatsStore) -> None:
    parts = [Append(name, b"data", attributes={"writer": AttributeChange(ANY, b"1")}) for name in ("s", "t")]
    for part in parts:
        store.create(part.segment)
    for _ in range(4):
        assert isinstance(store.append_together(parts), tuple)
    assert carried_in(head_in(store, "s")) == carried_in(head_in(store, "t")) == {"writer": b"1"}
    wrong = Append("t", b"x", attributes={"writer": AttributeChange(b"0", b"2")})
    assert store.append_together([parts[0], wrong]) == {"t": Conflict(16, b"", {"writer": b"1"})}
    assert store.attributes("s") == store.attributes("t") == {"writer": b"1"}


def test_an_append_to_as_many_segments_as_a_transaction_has_makes_no_room(store: NatsStore) -> None:
    """It may be as many messages as a batch can have, so what does not fit into a head is not carried."""
    segments = [f"s/{number}" for number in range(100)]
    full = {f"{number}": AttributeChange(ANY, b"full") for number in range(backend._MAX_CARRIED)}
    store.create_together(dict.fromkeys(segments, b""))
    for segment in segments[:2]:
        store.append(segment, b"data", attributes=full)
    for value in (b"1", b"2"):
        parts = [Append(segment, b"data", attributes={"new": AttributeChange(ANY, value)}) for segment in segments]
        assert isinstance(store.append_together(parts), tuple)
        assert carried_in(head_in(store, "s/1")) == dict.fromkeys(full, b"full")
        assert carried_in(head_in(store, "s/2")) == {"new": value}
        assert store.attributes("s/1") == {**dict.fromkeys(full, b"full"), "new": value}


def test_large_appends_carry_too(store: NatsStore) -> None:
    store.create("s")
    data = bytes(300_000)
    for number in range(4):
        write(store, number, data=data)
    assert carried_in(head_in(store, "s")) == {"writer": b"3"}
    assert store.read("s", 0, 2_000_000) == data * 4


@seeds(4, all=40)
def test_three_processes_see_what_a_store_in_memory_says(seed: int, nats_url: str) -> None:
    """Each knows what it has seen last, which is out of date nearly always."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        right = stack.enter_context(MemoryStore())
        stores = [stack.enter_context(open_store(nats_url)) for _ in range(3)]
        names = [f"{number}" for number in range(rng.choice((2, 4, 30)))]
        for each in (right, stores[0]):
            each.create("s")
        for _ in range(300):
            store = rng.choice(stores)
            do = _any_call(rng, right, names)
            assert do(store) == do(right)
        right_ones = right.attributes("s")
        for store in stores:
            assert store.attributes("s") == right_ones
            assert store.read("s", right.info("s").start_offset, 1 << 20) == right.read(
                "s", right.info("s").start_offset, 1 << 20
            )


def _any_call(rng: random.Random, right: SegmentStore, names: list[str]) -> Callable[[SegmentStore], object]:
    """A call that is likely to succeed: most expectations are right."""
    present, info = right.attributes("s"), right.info("s")
    if rng.random() < 0.1:
        chosen = rng.sample(names, 2)
        return lambda store: store.attributes("s", names=chosen)
    if rng.random() < 0.05:
        offset = rng.randint(info.start_offset, info.length)
        return lambda store: store.truncate("s", offset)
    changes = {}
    for name in rng.sample(names, rng.choice((0, 1, 1, 1, 2))):
        expected: Any = rng.choice((ANY, present.get(name), present.get(name), b"wrong"))
        new = None if rng.random() < 0.1 else rng.randbytes(rng.choice((0, 3, 16, 16, 150)))
        changes[name] = AttributeChange(expected, new)
    data = rng.randbytes(rng.choice((0, 5, 5, 5)))
    offset_or_none = rng.choice((None, None, info.length, max(0, info.length - 5)))
    if offset_or_none is not None and offset_or_none < info.start_offset:
        offset_or_none = None

    def append(store: SegmentStore) -> object:
        result = store.append("s", data, expected_offset=offset_or_none, attributes=changes)
        # Without data it does not depend on what others append, and tells the length that its process knew.
        return None if isinstance(result, Appended) and not data else result

    return append


def test_of_many_processes_that_change_one_attribute_with_data_one_succeeds_at_a_time(nats_url: str) -> None:
    """Some of them change it alone: then the head does not carry it any more."""
    with ExitStack() as stack:
        stores = [stack.enter_context(open_store(nats_url)) for _ in range(4)]
        stores[0].create("s")

        def count(index: int) -> tuple[int, int]:
            store, rng = stores[index], random.Random(index)
            appended = alone = 0
            for _ in range(60):
                now = store.attributes("s").get("a")
                following = b"%d" % (int(now or b"0") + 1)
                data = b"x" if rng.random() < 0.8 else b""
                changes = {"a": AttributeChange(now, following), f"{index}": AttributeChange(ANY, b"%d" % appended)}
                if isinstance(store.append("s", data, attributes=changes), Appended):
                    appended += len(data)
                    alone += not data
            return appended, alone

        with ThreadPoolExecutor(4) as threads:
            counts = list(threads.map(count, range(4)))
        appended, alone = (sum(each) for each in zip(*counts, strict=True))
        assert appended > 20 and alone > 2
        assert stores[0].attributes("s", names=["a"]) == {"a": b"%d" % (appended + alone)}
        assert stores[1].info("s").length == appended


def test_data_and_a_carried_attribute_are_seen_together(nats_url: str) -> None:
    with open_store(nats_url) as store, open_store(nats_url) as other, ThreadPoolExecutor(1) as threads:
        carry(store, "number")

        def append_all() -> None:
            for number in range(2, 200):
                write(store, number, name="number")

        appending = threads.submit(append_all)
        while not appending.done():
            length = other.info("s").length
            number = int(other.attributes("s")["number"])
            assert length <= 4 * (number + 1) <= other.info("s").length
        appending.result()


def test_a_replica_that_is_behind_is_asked_again(store: NatsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer has the newest message of each attribute, but an older head, which had another value."""
    carry(store, "writer")
    ask_all = store._connection.ask_all
    old: list[Sequence[Answer]] = []

    def answer(requests: Sequence[Outgoing]) -> list[Sequence[Answer]]:
        answers = list(ask_all(requests))
        if b"multi_last" in requests[-1].data:
            old.append(answers[-1])
            answers[-1] = old[0]
            if len(old) == 2:
                monkeypatch.undo()
        return answers

    monkeypatch.setattr(store._connection, "ask_all", answer)
    assert store.attributes("s") == {"writer": b"1"}
    write(store, "new")
    assert store.attributes("s") == {"writer": b"new"}
    assert len(old) == 2


# What is damaged, and what is undone


@pytest.mark.parametrize("carried", ["writer", "writer=!", "writer=AQ=", "%FF=AQ==", "=", "a=\N{DEGREE SIGN}"])
def test_a_head_with_what_cannot_be_read_is_damaged(carried: str) -> None:
    with pytest.raises(CorruptStoreError):
        carried_in(head_of(7, {HEAD: f"0 3 0 open {carried}"}))

"""Dead letters are listed, replayed once and discarded, wherever a process that replays them dies."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest

import readergroup as rg
from readergroup.dead_letters.replaying import letter_id, place_of
from synchronizer import open_store
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.dying import Died, dying_after
from tests.waiting import until

ORDERS: Final = "shop/orders"
DEAD: Final = "shop/dead"
KEYS: Final = ("ann", "bob", None)


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        yield client


def set_up(client: rg.Client, count: int = 6, *, origin: str = ORDERS, segments: int = 2) -> list[rg.EventPointer]:
    """Make letters for the events of ``origin``, as a pool does; return the pointers of the events."""
    client.streams.create(origin, scaling=rg.ScalingPolicy.fixed(segments))
    client.streams.create(DEAD, scaling=rg.ScalingPolicy.fixed(2))
    with client.writer(origin) as writer:
        for number in range(count):
            writer.write(b"%d" % number, KEYS[number % 3], headers={"trace": b"%d" % number})
    found = sorted(events(client, origin), key=lambda event: int(event.data))
    with client.writer(DEAD, serializer=rg.PydanticSerializer(rg.DeadLetter)) as letters:
        for event in found:
            error = "ValueError: odd" if int(event.data) % 2 else "KeyError: 'even'"
            letter = rg.DeadLetter(data=event.raw, pointer=event.pointer, error=error, attempts=3)
            letters.write(letter, event.routing_key, event.headers)
    return [event.pointer for event in found]


def events(client: rg.Client, stream: str = ORDERS) -> list[rg.Event[bytes]]:
    return [event for part in client.batch.segment_ranges(stream) for event in client.batch.read(part)]


def replayed(client: rg.Client, stream: str = ORDERS) -> Counter[str]:
    """How often each event was replayed, by the pointer of the event that failed."""
    found = (event.headers.get(rg.REPLAYED_FROM) for event in events(client, stream))
    return Counter(pointer.decode() for pointer in found if pointer is not None)


def numbers(letters: Iterator[rg.StoredDeadLetter]) -> list[int]:
    return sorted(int(each.letter.data) for each in letters)


# ---------------------------------------------------------------------- what is listed


@pytest.mark.stores
def test_letters_are_listed_replayed_and_discarded(client: rg.Client) -> None:
    pointers = set_up(client)
    letters = client.dead_letters(DEAD)
    found = {int(each.letter.data): each for each in letters.list()}
    assert sorted(found) == list(range(6))
    assert found[1].stream == ORDERS and found[1].status == "pending" and found[1].letter.error == "ValueError: odd"

    seen: list[int] = []
    assert letters.replay(error="ValueError", limit=2, on_progress=seen.append) == 2
    assert seen == [2]
    assert letters.discard(found[0].pointer) == 1
    assert len(list(letters.list(status="replayed"))) == 2
    assert numbers(letters.list(status="discarded")) == [0]
    assert len(list(letters.list())) == 3
    assert letters.replay() == 3 and letters.replay() == 0 and letters.discard() == 0

    back = {int(event.data): event for event in events(client) if rg.REPLAYED_FROM in event.headers}
    assert sorted(back) == [1, 2, 3, 4, 5]
    for number, event in back.items():
        assert event.routing_key == KEYS[number % 3]
        assert event.headers == {"trace": b"%d" % number, rg.REPLAYED_FROM: str(pointers[number]).encode()}
    assert len(list(letters.list(status=None))) == 6
    assert letters.show(str(found[0].pointer)).status == "discarded"


def test_letters_are_filtered(client: rg.Client) -> None:
    set_up(client)
    letters = client.dead_letters(DEAD)
    assert numbers(letters.list(error="KeyError")) == [0, 2, 4]
    assert numbers(letters.list(error="ValueError", routing_key="ann")) == [3]
    assert len(list(letters.list(limit=2))) == 2 and not list(letters.list(limit=0))
    now = datetime.now(UTC)
    assert not list(letters.list(since=now + timedelta(hours=1)))
    assert len(list(letters.list(since=now - timedelta(hours=1), until=now + timedelta(hours=1)))) == 6
    assert not list(letters.list(until=now - timedelta(hours=1)))


def test_a_letter_is_found_by_the_pointer_of_its_event(client: rg.Client) -> None:
    pointers = set_up(client)
    letters = client.dead_letters(DEAD)
    found = {int(each.letter.data): each for each in letters.list()}
    assert letters.show(str(pointers[3])) == found[3]
    assert letters.replay(pointers[1], found[1].pointer, str(pointers[2])) == 2
    assert letters.discard(pointers[5]) == 1
    assert numbers(letters.list(status="replayed")) == [1, 2]
    assert numbers(letters.list(status="discarded")) == [5]
    with pytest.raises(rg.InvalidArgumentError, match="was discarded"):
        letters.replay(pointers[5])


def test_a_letter_is_found_by_the_name_that_commands_print(client: rg.Client) -> None:
    set_up(client)
    letters = client.dead_letters(DEAD)
    first, second = list(letters.list())[:2]
    name = f"{first.pointer.segment.rpartition('/')[2]}:{first.pointer.offset}"
    assert letters.show(name) == first
    assert letters.discard(name, second.pointer) == 2
    with pytest.raises(rg.NotFoundError, match="no such dead letter"):
        letters.show("999:0")
    with pytest.raises(rg.InvalidArgumentError, match="such as 0:1234"):
        letters.show("0:x")


def test_of_two_letters_of_an_event_the_pending_one_is_meant(client: rg.Client) -> None:
    pointers = set_up(client)
    letters = client.dead_letters(DEAD)
    first = letters.show(pointers[1])
    letters.replay(first.pointer)
    assert letters.show(pointers[1]).status == "replayed"
    with client.writer(DEAD, serializer=rg.PydanticSerializer(rg.DeadLetter)) as writer:
        writer.write(first.letter, first.routing_key)
    assert letters.show(pointers[1]).status == "pending"
    assert letters.replay(pointers[1]) == 1


def test_a_letter_of_a_pool_is_replayed_to_the_pool(client: rg.Client) -> None:
    client.streams.create(ORDERS)
    client.streams.create(DEAD)
    with client.writer(ORDERS) as writer:
        writer.write_many([b"good", b"bad"], "ann")
    handled: list[bytes] = []

    def handle(event: rg.Event[bytes]) -> None:
        if event.data == b"bad" and rg.REPLAYED_FROM not in event.headers:
            raise ValueError("bad")
        handled.append(event.data)

    group = client.groups.create("billing", streams=[ORDERS])
    pool = group.pool(handle, retry=rg.RetryPolicy(attempts=1, dead_letters=DEAD))
    running = threading.Thread(target=pool.run)
    running.start()
    until(lambda: list(client.dead_letters(DEAD).list()), "a dead letter")
    assert client.dead_letters(DEAD).replay() == 1
    client.streams.seal(ORDERS)
    running.join(60)
    assert handled == [b"good", b"bad"]


# ---------------------------------------------------------------------- once


@pytest.mark.parametrize("dies", ["before", "after"])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_event_is_replayed_once_wherever_the_process_dies(dies: str, seed: int) -> None:
    """At each call of the store another process dies, and the next one goes on."""
    step = 0
    while _replay_and_die(step, dies, random.Random(seed)):
        step += 1
    assert step > 8, "it never died while it replayed"


def _replay_and_die(step: int, dies: str, rng: random.Random) -> bool:
    """Let a process die at this call of the store, and another one finish; return whether the first one died."""
    store = open_store(f"memory://{random.random()}")
    clock = InstantClock()
    whole = rg.Client(store, clock=clock)
    clock.run_when_due(whole.step)
    set_up(whole, segments=rng.choice([1, 3]))
    failing = FailingStore(store)
    dying = rg.Client(failing, clock=clock)
    letters = dying.dead_letters(DEAD)
    letters.list()  # opens what is opened once
    setattr(failing, dies, dying_after(step))
    has_died = False
    try:
        letters.replay(limit=4)
    except Died:
        has_died = True
    if rng.random() < 0.5:
        whole.streams.scale(ORDERS, split=[0])
    assert whole.dead_letters(DEAD).replay(timeout=60) >= 2
    assert set(replayed(whole).values()) == {1} and len(replayed(whole)) == 6
    assert not list(whole.dead_letters(DEAD).list())
    return has_died


@pytest.mark.stores("sqlite", "postgresql")
def test_processes_that_replay_at_once_write_each_event_once(shared_store_url: str) -> None:
    with rg.connect(shared_store_url) as client:
        set_up(client, 300)
    done: list[int] = []

    def replay() -> None:
        with rg.connect(shared_store_url) as own:
            done.append(own.dead_letters(DEAD).replay(timeout=120))

    threads = [threading.Thread(target=replay) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(180)
    with rg.connect(shared_store_url) as client:
        assert sum(done) == 300
        assert len(replayed(client)) == 300 and set(replayed(client).values()) == {1}


KILLED = """
import os, signal, sys
import readergroup as rg
from readergroup.dead_letters import letters

letters._CHUNK_LETTERS = 10
mark = letters._Work._mark
def die(self, status, found):
    if self.done >= 20:
        os.kill(os.getpid(), signal.SIGKILL)  # the events are in the stream, and their letters are not marked
    mark(self, status, found)
letters._Work._mark = die
with rg.connect(sys.argv[1]) as client:
    client.dead_letters(sys.argv[2]).replay()
"""


def test_a_replay_goes_on_after_a_kill(shared_store_url: str) -> None:
    with rg.connect(shared_store_url) as client:
        set_up(client, 60)
        killed = subprocess.run([sys.executable, "-c", KILLED, shared_store_url, DEAD], timeout=120, check=False)
        assert killed.returncode == -signal.SIGKILL
        written = sum(replayed(client).values())
        assert 20 < written < 60 and len(list(client.dead_letters(DEAD).list())) == 40
        assert client.dead_letters(DEAD).replay(timeout=120) == 40
        assert len(replayed(client)) == 60 and set(replayed(client).values()) == {1}


def test_a_replay_that_was_paused_writes_nothing_after_a_discard() -> None:
    store = open_store(f"memory://{random.random()}")
    clock = InstantClock()
    client = rg.Client(store, clock=clock)
    clock.run_when_due(client.step)
    set_up(client)
    paused = FailingStore(store)
    late = rg.Client(paused, clock=clock)

    appends = 0

    def pause(operation: Operation) -> None:
        nonlocal appends
        appends += operation.verb == "append" and "shop/orders" in operation.segment
        if appends == 3:  # the first two take the segments of the stream
            paused.before = None
            assert client.dead_letters(DEAD).discard(timeout=60) == 6

    paused.before = pause
    with pytest.raises(rg.LeaseLostError):
        late.dead_letters(DEAD).replay()
    assert not replayed(client)
    assert numbers(client.dead_letters(DEAD).list(status="discarded")) == list(range(6))


# ---------------------------------------------------------------------- a store that is away


@pytest.mark.parametrize("what", ["replay", "discard", "replay by pointers", "replay since"])
def test_a_call_ends_soon_after_its_timeout_wherever_the_store_goes_away(what: str) -> None:
    step = 0
    while _seconds_until_the_error(what, step) is not None:
        step += 1
    assert step > 20


def _seconds_until_the_error(what: str, step: int) -> float | None:
    """Let the store go away at this call; return how long the call with a timeout of 2 s waited, None: not at all."""
    store = open_store(f"memory://{random.random()}")
    clock = InstantClock()
    client = rg.Client(store, clock=clock)
    clock.run_when_due(client.step)
    pointers = set_up(client)
    failing = FailingStore(store)
    letters = rg.Client(failing, clock=clock).dead_letters(DEAD)
    begun = clock.monotonic()
    left = step

    def go_away(operation: Operation) -> None:
        nonlocal left
        left -= 1
        failing.unavailable = left < 0

    failing.before = go_away
    try:
        match what:
            case "replay":
                letters.replay(timeout=2)
            case "discard":
                letters.discard(timeout=2)
            case "replay by pointers":
                letters.replay(*pointers, timeout=2)
            case _:
                letters.replay(since=datetime.fromtimestamp(0, UTC), timeout=2)
    except rg.ReaderGroupError:
        waited = clock.monotonic() - begun
        assert waited <= 4, step  # the release of the lock has a second more
        return waited
    return None


# ---------------------------------------------------------------------- streams that take nothing


def test_letters_of_a_sealed_or_deleted_stream_stay(client: rg.Client) -> None:
    set_up(client, origin="shop/gone")
    set_up(client, origin="shop/sealed")
    set_up(client)
    client.streams.delete("shop/gone")
    client.streams.seal("shop/sealed")
    letters = client.dead_letters(DEAD)
    with pytest.raises((rg.NotFoundError, rg.SealedError), match="stay pending") as raised:
        letters.replay()
    assert raised.value.facts["replayed"] == 6 and raised.value.facts["left"] == 12
    assert len(replayed(client)) == 6
    assert {each.stream for each in letters.list()} == {"shop/gone", "shop/sealed"}
    gone = [each.pointer for each in letters.list() if each.stream == "shop/gone"]
    with pytest.raises(rg.NotFoundError, match="does not exist any more"):
        letters.replay(*gone)
    assert letters.discard() == 12


def test_what_is_truncated_is_forgotten(client: rg.Client) -> None:
    set_up(client)
    letters = client.dead_letters(DEAD)
    first = next(letters.list()).pointer
    letters.replay()
    client.streams.truncate(DEAD, client.streams.info(DEAD).tail)
    with pytest.raises(rg.NotFoundError, match="truncated"):
        letters.show(first)
    assert letters.replay() == 0
    assert not letters._statuses().places


def test_the_letters_of_a_stream_that_was_created_again_are_others(client: rg.Client) -> None:
    set_up(client)
    old = next(client.dead_letters(DEAD).list()).pointer
    client.dead_letters(DEAD).discard()
    client.streams.delete(DEAD)
    client.streams.delete(ORDERS)
    set_up(client)
    letters = client.dead_letters(DEAD)
    assert len(list(letters.list())) == 6
    assert letters.replay() == 6 and len(replayed(client)) == 6
    with pytest.raises(rg.NotFoundError):
        letters.show(old)


# ---------------------------------------------------------------------- what is refused


def test_what_is_wrong_is_refused_and_creates_nothing(client: rg.Client) -> None:
    set_up(client)
    names = set(client.store.list(""))
    letters = client.dead_letters(DEAD)
    pointer = next(letters.list()).pointer
    with pytest.raises(rg.NotFoundError, match="no stream"):
        client.dead_letters("shop/typo").list()
    with pytest.raises(rg.NotFoundError, match="no stream"):
        client.dead_letters("shop/typo").replay()
    with pytest.raises(rg.InvalidArgumentError, match="scope/name"):
        client.dead_letters("typo")
    with pytest.raises(rg.InvalidArgumentError, match="no dead letter"):
        list(client.dead_letters(ORDERS).list())
    with pytest.raises(rg.InvalidArgumentError, match="timezone"):
        letters.list(since=datetime(2026, 1, 1))
    with pytest.raises(rg.NotFoundError, match="no dead letter at this pointer, nor one of an event there"):
        letters.show("shop/orders/0:0:0")
    with pytest.raises(rg.InvalidArgumentError, match="segment:incarnation:offset"):
        letters.show("shop/orders/0")
    with pytest.raises(rg.InvalidArgumentError, match="not by both"):
        letters.replay(pointer, error="ValueError")
    with pytest.raises(rg.NotFoundError):
        letters.replay(pointer._replace(offset=pointer.offset + 1))
    assert letters.replay(pointer) == 1 and letters.replay(pointer) == 0
    with pytest.raises(rg.InvalidArgumentError, match="was replayed"):
        letters.discard(pointer)
    assert not any("typo" in name for name in set(client.store.list("")) - names)


def test_letters_have_numbers() -> None:
    pointer = rg.EventPointer(rg.SegmentId("shop/dead/7"), "x", 2**42 + 5)
    assert place_of(letter_id(pointer)) == (7, 2**42 + 5)
    with pytest.raises(rg.UnsupportedError, match="too long"):
        letter_id(pointer._replace(offset=2**43))

"""Names of deleted streams and groups are forgotten after a month, and what is left of them does no harm."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import readergroup as rg
from readergroup.streams import deletions
from readergroup.streams.name_expiry import LIST, NAME_RETENTION_SECONDS, DeletedName, NameExpiry
from synchronizer import Deadline, NotFoundError, SegmentStore, StoreFullError
from synchronizer.backoff import Backoff
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.dying import Died
from tests.golden import golden
from tests.waiting import PATIENCE_SECONDS

NAME, GROUP = "shop/orders", "billing"
#: A moment after which the name is forgotten.
MONTH = NAME_RETENTION_SECONDS + 3600.0


@pytest.fixture
def clock() -> InstantClock:
    return InstantClock()


def use(client: rg.Client, *, changes: int = 2) -> None:
    """Create a stream and a group, write and read, change their metadata, and delete them."""
    client.streams.create(NAME, scaling=rg.ScalingPolicy.fixed(3))
    group = client.groups.create(GROUP, streams=[NAME])
    for change in range(changes):
        client.streams.configure(NAME, tags={"change": f"{change}"})
        group.configure(reader_timeout_seconds=change + 5.0)
    assert written_and_read(client, "first") == "first"
    client.groups.delete(GROUP)
    client.streams.delete(NAME)


def written_and_read(client: rg.Client, event: str) -> str | None:
    with client.writer(NAME, serializer=rg.JsonSerializer()) as writer:
        writer.write(event, "key")
    with client.groups.get(GROUP).reader(serializer=rg.JsonSerializer()) as reader:
        for _ in range(10):
            found = reader.read(timeout=0)
            if found is not None:
                return str(found.data)
    return None


def look(store: SegmentStore, clock: InstantClock) -> None:
    """What a process does with its first deletion."""
    with rg.Client(store, clock=clock) as client:
        client.streams.create("shop/other")
        client.streams.delete("shop/other")


def logs(store: SegmentStore) -> list[str]:
    return [
        name for name in store.list() if name.startswith(("stream/", "group/", "snapshot/")) and "other" not in name
    ]


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("changes", [2, 100])
def test_names_are_forgotten_after_a_month(store: SegmentStore, clock: InstantClock, changes: int) -> None:
    with rg.Client(store, clock=clock) as client:
        use(client, changes=changes)
    kept = logs(store)
    assert {"group/billing", "stream/shop/orders"} <= {*kept}
    clock.advance(NAME_RETENTION_SECONDS - 3600.0)
    look(store, clock)
    assert logs(store) == kept
    clock.advance(7200.0)
    look(store, clock)
    assert logs(store) == []


@pytest.mark.stores(round_robin=True)
def test_the_names_of_the_data_segments_are_forgotten_too(store: SegmentStore, clock: InstantClock) -> None:
    with rg.Client(store, clock=clock) as client:
        client.streams.create(NAME, scaling=rg.ScalingPolicy.fixed(3))
        segments = list(store.list("data/"))
        client.streams.delete(NAME)
    assert len(segments) == 3
    clock.advance(MONTH)
    look(store, clock)
    assert [store.create(segment) for segment in segments] == [True] * 3


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("changes", [2, 100])
def test_a_forgotten_name_is_used_again_also_by_clients_that_knew_it(
    store: SegmentStore, clock: InstantClock, changes: int
) -> None:
    with rg.Client(store, clock=clock) as one, rg.Client(store, clock=clock) as other:
        use(one, changes=changes)
        assert [*one.streams.list(), *other.streams.list(), *one.groups.list(), *other.groups.list()] == []
        clock.advance(MONTH)
        look(store, clock)
        for client in (one, other):
            assert not client.streams.exists(NAME)
            with pytest.raises(NotFoundError):
                client.streams.info(NAME)
            with pytest.raises(NotFoundError):
                client.groups.get(GROUP)
        one.streams.create(NAME, scaling=rg.ScalingPolicy.fixed(2))
        one.groups.create(GROUP, streams=[NAME])
        assert written_and_read(other, "second") == "second"
        assert written_and_read(one, "third") == "third"
        assert [*one.streams.list(), *other.groups.list()] == [NAME, GROUP]
        assert len(other.streams.info(NAME).segments) == 2


def test_who_slept_with_the_forgotten_name_in_hand_changes_nothing_of_the_next_one(
    store: SegmentStore, clock: InstantClock
) -> None:
    """Both logs have the same entries up to the point at which the sleeper goes on."""
    with rg.Client(store, clock=clock) as sleeper, rg.Client(store, clock=clock) as client:
        sleeper.streams.create(NAME)
        group = sleeper.groups.create(GROUP, streams=[NAME])
        writer = sleeper.writer(NAME)
        synchronizer, feed = group.synchronizer, group.synchronizer.transitions()
        feed.drain()
        client.groups.delete(GROUP)
        client.streams.delete(NAME)
        clock.advance(MONTH)
        look(store, clock)
        client.streams.create(NAME)
        again = client.groups.create(GROUP, streams=[NAME])
        before = again.synchronizer.snapshot_of_state
        with pytest.raises(NotFoundError):
            writer.write(b"lost")
            writer.flush()
        writer.close()
        seen = []
        synchronizer.update_state(lambda state: seen.append(state) or ())  # type: ignore[func-returns-value]
        assert seen[-1] == before[0]
        assert again.synchronizer.snapshot_of_state == before
        assert [(each.before is None, each.after is None, each.gap) for each in feed.drain()] == [
            (False, True, True),
            (True, False, False),
        ]
        assert synchronizer.revision == again.synchronizer.revision


@pytest.mark.parametrize("changes", [0, 100])
def test_a_name_that_was_used_again_within_the_month_is_kept(
    store: SegmentStore, clock: InstantClock, changes: int
) -> None:
    with rg.Client(store, clock=clock) as client:
        use(client, changes=changes)
        client.streams.create(NAME)
        client.groups.create(GROUP, streams=[NAME])
        clock.advance(MONTH)
        look(store, clock)
        assert written_and_read(client, "event") == "event"
    with rg.Client(store, clock=clock) as client:
        assert [*client.streams.list(), *client.groups.list()] == [NAME, GROUP]
        assert written_and_read(client, "other") == "other"


@pytest.mark.parametrize("verb", ["append", "forget", "info", "truncate", "list"])
def test_what_a_process_that_died_has_left_is_done_by_the_next(
    store: SegmentStore, clock: InstantClock, verb: str
) -> None:
    """It dies before each call of the verb in turn, in the deletion and in the forgetting."""
    for dies_at in itertools.count(1):
        calls = dying_use(store, clock, verb, dies_at)
        with rg.Client(store, clock=clock) as client:
            for name in (NAME, "shop/another"):
                with suppress(NotFoundError):
                    client.streams.delete(name)
        for _ in range(2):
            clock.advance(MONTH)
            look(store, clock)
        assert logs(store) == [] and list(store.list("data/shop/orders")) == [], dies_at
        if calls < dies_at:
            break
    assert dies_at > 1


def dying_use(store: SegmentStore, clock: InstantClock, verb: str, dies_at: int) -> int:
    """Delete two streams, a month after each other, up to a call of the verb; return how many calls there were."""
    calls = 0

    def die(operation: Operation) -> None:
        nonlocal calls
        if operation.verb == verb:
            calls += 1
            if calls == dies_at:
                raise Died

    with rg.Client(store, clock=clock) as client:
        client.streams.create(NAME, scaling=rg.ScalingPolicy.fixed(2))
    failing = FailingStore(store)
    failing.before = die
    with suppress(Died):
        rg.Client(failing, clock=clock).streams.delete(NAME)
        clock.advance(MONTH)
        dying = rg.Client(failing, clock=clock)
        dying.streams.create("shop/another")
        dying.streams.delete("shop/another")
    return calls


def test_a_deletion_in_a_full_store_makes_room_before_it_notes_the_name(
    store: SegmentStore, clock: InstantClock
) -> None:
    def refuse(operation: Operation) -> None:
        if operation.segment == LIST and list(store.list("data/")):
            raise StoreFullError("there is no room")

    failing = FailingStore(store)
    failing.before = refuse
    with rg.Client(failing, clock=clock) as client:
        client.streams.create(NAME)
        began = clock.monotonic()
        client.streams.delete(NAME)
        assert clock.monotonic() - began < 1.0
    clock.advance(MONTH)
    look(store, clock)
    assert logs(store) == []


def test_many_delete_create_and_forget_the_same_names_at_once(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readergroup.streams.name_expiry.NAME_RETENTION_SECONDS", -60.0)
    monkeypatch.setattr(deletions, "LOOK_EVERY", 1)
    monkeypatch.setattr(deletions.Deletions, "_look_through", deletions.Deletions._run)
    names = [NAME, "shop/returns"]
    created: dict[str, int] = dict.fromkeys(names, 0)

    def work(number: int) -> None:
        with rg.connect(store_url) as client:
            for turn in range(12):
                name = names[(number + turn) % 2]
                client.streams.create(name)
                client.groups.create(name.replace("/", "-"), streams=[name])
                created[name] += 1
                with suppress(NotFoundError), client.writer(name) as writer:
                    writer.write(b"event")
                for delete in (
                    lambda name=name: client.groups.delete(name.replace("/", "-")),
                    lambda name=name: client.streams.delete(name),
                ):
                    with suppress(NotFoundError):
                        delete()

    def tolerant(number: int) -> None:
        for _ in range(3):
            try:
                return work(number)
            except NotFoundError:  # the stream was deleted while the group was created
                continue

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(tolerant, number) for number in range(3)]:
            done.result(PATIENCE_SECONDS)
    assert min(created.values()) > 3
    with rg.connect(store_url) as client:
        for name in names:
            for delete in (client.groups.delete, client.streams.delete):
                with suppress(NotFoundError):
                    delete(name if delete == client.streams.delete else name.replace("/", "-"))
            client.streams.create(name)
        assert [*client.streams.list()] == sorted(names)
        for name in names:
            client.streams.delete(name)
        assert logs(client.store) == [] and list(client.store.list("data/")) == []


class TestTheList:
    @pytest.fixture
    def names(self, store: SegmentStore, clock: InstantClock) -> NameExpiry:
        return NameExpiry(store, clock)

    @pytest.fixture
    def backoff(self, clock: InstantClock) -> Callable[[], Backoff]:
        return lambda: Backoff(clock, Deadline(clock, 30.0))

    def test_it_is_read_in_parts(
        self, store: SegmentStore, clock: InstantClock, names: NameExpiry, backoff: Callable[[], Backoff]
    ) -> None:
        for number in range(30):
            store.create(f"log/{number}")
            segments = tuple(f"data/{number}/{'x' * 500}/{part}" for part in range(100))
            assert names.note(DeletedName(f"log/{number}", 0, clock.time(), segments), backoff())
        clock.advance(MONTH)
        names.forget_expired(threading.Event(), backoff)
        assert list(store.list("log/")) == []
        info = store.info(LIST)
        assert info.start_offset == info.length > 1 << 20

    def test_a_name_of_the_far_future_does_not_hold_up_the_others(
        self, store: SegmentStore, clock: InstantClock, names: NameExpiry, backoff: Callable[[], Backoff]
    ) -> None:
        for log, at in (("log/1", clock.time() + 3e9), ("log/2", clock.time())):
            store.create(log)
            names.note(DeletedName(log, 0, at), backoff())
        for _ in range(2):
            clock.advance(MONTH)
            names.forget_expired(threading.Event(), backoff)
        assert list(store.list("log/")) == []

    def test_damage_costs_the_names_up_to_now_and_no_later_ones(
        self,
        store: SegmentStore,
        clock: InstantClock,
        names: NameExpiry,
        backoff: Callable[[], Backoff],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for log in ("log/1", "log/2", "log/3"):
            store.create(log)
        names.note(DeletedName("log/1", 0, clock.time()), backoff())
        store.append(LIST, b"\0" * 50)
        names.note(DeletedName("log/2", 0, clock.time()), backoff())
        clock.advance(MONTH)
        names.forget_expired(threading.Event(), backoff)
        assert "are kept" in caplog.text
        names.note(DeletedName("log/3", 0, clock.time()), backoff())
        clock.advance(MONTH)
        names.forget_expired(threading.Event(), backoff)
        assert "log/3" not in store.list("log/")

    def test_it_ends_when_it_is_stopped(
        self, store: SegmentStore, clock: InstantClock, names: NameExpiry, backoff: Callable[[], Backoff]
    ) -> None:
        store.create("log/1")
        names.note(DeletedName("log/1", 0, clock.time()), backoff())
        clock.advance(MONTH)
        stopping = threading.Event()
        stopping.set()
        names.forget_expired(stopping, backoff)
        assert list(store.list("log/")) == ["log/1"]

    def test_a_store_that_is_full_or_away_keeps_the_name_and_says_so(
        self, store: SegmentStore, clock: InstantClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        failing = FailingStore(store)
        failing.unavailable = True
        assert not NameExpiry(failing, clock).note(
            DeletedName("stream/shop/orders", 0, 0.0), Backoff(clock, Deadline(clock, 0.0))
        )
        assert "the name of the deleted stream/shop/orders is kept" in caplog.text

    def test_a_name_is_stored_as_in_the_first_release(self) -> None:
        name = DeletedName("stream/shop/orders", 1_800_000_000_000_567, 1_800_000_000.5, ("data/shop/orders/a/0",))
        assert DeletedName.decode(golden("deleted-name-v1.msgpack", name.encode())) == name
        assert name.encode() == golden("deleted-name-v1.msgpack", b"")

"""Streams that scale by themselves on real stores: what is measured, who scales, and that it happens once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

import readergroup as rg
from readergroup.streams.maintenance import Maintenance
from readergroup.streams.scaling.applying import REGISTRY
from readergroup.streams.scaling.rates import RateHistory
from readergroup.streams.state import STREAM_UPDATES, StreamState
from synchronizer import AttributeChange, ManualClock, SegmentStore, open_store
from synchronizer.state import StateCodec
from synchronizer.testing import FailingStore, Operation
from tests.waiting import until

STREAM = "shop/orders"
#: Ten events per second and segment.
POLICY = rg.ScalingPolicy.by_event_rate(10, max_segments=4)
METADATA = f"stream/{STREAM}"
#: Keys with the hashes 0.28 and 0.81.
LOW, HIGH = "2", "0"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(store_url: str, clock: ManualClock) -> Iterator[SegmentStore]:
    with open_store(store_url, clock=clock) as store:
        yield store


@pytest.fixture
def client(store: SegmentStore, clock: ManualClock) -> Iterator[rg.Client]:
    with rg.Client(store, clock=clock) as client:
        yield client


@pytest.fixture
def writing(store: SegmentStore, clock: ManualClock) -> Iterator[rg.Client]:
    """A client whose writers apply no policy in the background, so that the test does it."""
    with rg.Client(store, clock=clock) as client:
        client.streams.maintenance = Maintenance([])  # type: ignore[misc]
        yield client


def write(client: rg.Client, count: int, *, size: int = 10, keys: int = 97) -> None:
    with client.writer(STREAM) as writer:
        for number in range(count):
            writer.write(b"x" * size, routing_key=f"key-{number % keys}")


def write_blocks(client: rg.Client, blocks: int, events: int, *, size: int = 10, routing_key: str = LOW) -> None:
    """Write blocks of so many events each. Without a flush, time decides how many share a block, and so their bytes."""
    with client.writer(STREAM) as writer:
        for _ in range(blocks):
            writer.write_many([b"x" * size] * events, routing_key)
            writer.flush()


def run(
    client: rg.Client, clock: ManualClock, seconds: float, load: Callable[[], object] = lambda: None
) -> rg.StreamInfo:
    """Let so many seconds pass, in steps of 30, with this load in each."""
    for _ in range(round(seconds / 30)):
        load()
        clock.advance(30)
        client.streams.maintenance.step()
    return client.streams.info(STREAM)


def report(client: rg.Client) -> rg.ScalingReport:
    found = client.streams.info(STREAM).scaling
    assert found is not None
    return found


def begin(client: rg.Client, policy: rg.ScalingPolicy = POLICY) -> None:
    client.streams.create(STREAM, scaling=policy)
    client.streams.maintenance.follow(client.streams.fetch_state(STREAM))
    client.streams.maintenance.step()


def heat(client: rg.Client, writing: rg.Client, clock: ManualClock) -> None:
    """Make the stream due for a split at the next step: 60 events per second for two minutes."""
    run(client, clock, 90, lambda: write(writing, 1800))
    write(writing, 1800)
    clock.advance(30)
    assert len(client.streams.info(STREAM).segments) == 1


@pytest.mark.stores
def test_a_stream_grows_with_its_load_and_shrinks_when_it_is_gone(
    client: rg.Client, writing: rg.Client, clock: ManualClock
) -> None:
    begin(client)
    assert "not measured yet" in report(client).reason
    assert len(run(client, clock, 120, lambda: write(writing, 1800)).segments) == 2
    assert len(run(client, clock, 900, lambda: write(writing, 1800)).segments) == 4
    assert len(run(client, clock, 1500).segments) == 2
    found = run(client, clock, 1500)
    assert (len(found.segments), found.epoch) == (1, 4)


@pytest.mark.stores(round_robin=True)
def test_a_stream_grows_with_its_bytes(client: rg.Client, writing: rg.Client, clock: ManualClock) -> None:
    begin(client, rg.ScalingPolicy.by_data_rate(1000, max_segments=4))
    assert len(run(client, clock, 120, lambda: write(writing, 120, size=1000)).segments) == 1
    assert len(run(client, clock, 300, lambda: write(writing, 120, size=1000)).segments) == 2
    assert report(client).unit == "bytes"


def test_a_report_has_the_rates_and_the_next_scale(client: rg.Client, writing: rg.Client, clock: ManualClock) -> None:
    begin(client)
    heat(client, writing, clock)
    found = report(client)
    (rates,) = found.rates.values()
    assert found.windows_seconds == (120, 300, 600, 1200) and rates[1:] == (None, None, None)
    client.streams.configure(STREAM, scaling=rg.ScalingPolicy.by_event_rate(10, max_segments=1))
    client.streams.maintenance.step()
    client.streams.configure(STREAM, scaling=POLICY)
    found = report(client)
    (rates,) = found.rates.values()
    assert rates[0] == pytest.approx(60) and found.measured_at == clock.time()
    assert (found.action, found.segments) == ("split", (f"{STREAM}/0",))
    assert found.reason == "segment 0 takes 60 events/s over 2 min, more than 5 times the target of 10"
    assert client.streams.create("shop/other").scaling is None
    client.streams.seal(STREAM)
    assert (report(client).action, report(client).reason) == (None, "the stream is sealed")


def test_events_of_very_different_sizes_are_counted(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore
) -> None:
    begin(client, rg.ScalingPolicy.by_event_rate(1e9, min_segments=2, max_segments=2))
    for size, count in ((10, 500), (20_000, 300), (100, 20_000)):
        before = newest(store).newest.counts
        for key in LOW, HIGH:  # up to 3 MB in each segment: more than the first blocks
            write_blocks(writing, 10, count // 20, size=size, routing_key=key)
        clock.advance(30)
        client.streams.maintenance.step()
        after = newest(store).newest.counts
        assert sum(after.values()) - sum(before.values()) == pytest.approx(count, rel=0.02)


def test_events_are_counted_in_each_segment_by_their_sizes_there(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore
) -> None:
    begin(client, rg.ScalingPolicy.by_event_rate(1e9, min_segments=2, max_segments=2))
    with writing.writer(STREAM) as writer:
        for _ in range(100):
            writer.write(b"x" * 10, routing_key=LOW)
            writer.write(b"x" * 5000, routing_key=HIGH)
    run(client, clock, 30)
    assert newest(store).newest.counts == {0: 100, 1: 100}


def newest(store: SegmentStore) -> RateHistory:
    return RateHistory.decode(store.attributes(REGISTRY)[f"history/{STREAM}"])


def test_events_that_are_deleted_before_they_are_counted_are_estimated(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore
) -> None:
    begin(client, rg.ScalingPolicy.by_event_rate(1e9))
    run(client, clock, 60, lambda: write_blocks(writing, 10, 100))
    before = newest(store).newest.counts[0]
    write_blocks(writing, 10, 100)
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    run(client, clock, 30)
    assert newest(store).newest.counts[0] - before == pytest.approx(1000, rel=0.02)


def test_transactions_count_when_they_are_merged(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore
) -> None:
    begin(client, rg.ScalingPolicy.by_event_rate(1e9))
    with writing.writer(STREAM) as writer, writer.transaction() as transaction:
        for _ in range(300):
            transaction.write(b"x")
    run(client, clock, 30)
    assert newest(store).newest.counts[0] == 300


# ---------------------------------------------------------------------- once, whatever happens


@pytest.mark.stores(round_robin=True)
def test_two_processes_at_once_scale_once(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore
) -> None:
    begin(client)
    heat(client, writing, clock)
    failing = FailingStore(store)
    with rg.Client(failing, clock=clock) as slow:

        def before(operation: Operation) -> None:
            if operation == ("append", METADATA):  # it has decided, and is about to announce
                failing.before = None
                found = store.attributes(REGISTRY)[f"due/{STREAM}"]
                store.append(REGISTRY, b"", attributes={f"due/{STREAM}": AttributeChange(found, b"0 again")})
                clock.advance(60)
                client.streams.maintenance.step()

        failing.before = before
        slow.streams.maintenance.follow(slow.streams.fetch_state(STREAM))
        slow.streams.maintenance.step()
        assert failing.before is None
        found = slow.streams.info(STREAM)
    assert (len(found.segments), found.epoch) == (2, 1)


def test_one_process_at_a_time_measures(
    client: rg.Client, clock: ManualClock, store: SegmentStore, writing: rg.Client
) -> None:
    begin(client)
    with rg.Client(store, clock=clock) as other:
        clock.advance(90)
        client.streams.maintenance.step()
        history = newest(store)
        other.streams.maintenance.step()
        assert newest(store) == history


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", range(1, 4))
def test_a_process_that_is_killed_while_it_scales_leaves_that_to_the_next_one(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore, step: int
) -> None:
    begin(client)
    heat(client, writing, clock)
    failing = FailingStore(store)
    changes = Counter[str]()

    def before(operation: Operation) -> None:
        if operation.verb in ("append", "create", "create_together", "seal") and operation.segment != REGISTRY:
            changes["all"] += 1
            if changes["all"] == step:
                raise Killed

    with rg.Client(failing, clock=clock) as dying:
        dying.streams.maintenance.follow(dying.streams.fetch_state(STREAM))
        failing.before = before
        with pytest.raises(Killed):
            dying.streams.maintenance.step()
        failing.before = None
    found = run(client, clock, 120, lambda: write(writing, 1800))
    assert (len(found.segments), found.epoch) == (2, 1)


@pytest.mark.parametrize("lost", ["lose_requests", "lose_answers"])
@pytest.mark.parametrize("place", range(1, 4))
def test_lost_answers_of_the_registry_scale_once(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore, lost: str, place: int
) -> None:
    begin(client)
    heat(client, writing, clock)
    failing = FailingStore(store)
    seen = Counter[Operation]()

    def before(operation: Operation) -> None:
        seen[operation] += 1
        if operation == ("append", REGISTRY) and seen[operation] == place:
            getattr(failing, lost)()

    with rg.Client(failing, clock=clock) as other:
        other.streams.maintenance.follow(other.streams.fetch_state(STREAM))
        failing.before = before
        other.streams.maintenance.step()
        assert seen["append", REGISTRY] >= place
    found = run(client, clock, 120, lambda: write(writing, 1800))
    assert (len(found.segments), found.epoch) == (2, 1)


@pytest.mark.parametrize("change", ["fixed", "target", "sealed", "scaled", "deleted", "created again"])
def test_a_stream_that_changes_after_the_decision_is_not_scaled(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore, change: str
) -> None:
    begin(client)
    heat(client, writing, clock)
    failing = FailingStore(store)

    def before(operation: Operation) -> None:
        if operation != ("append", METADATA):
            return
        failing.before = None
        if change == "fixed":
            writing.streams.configure(STREAM, scaling=rg.ScalingPolicy.fixed(1))
        elif change == "target":
            writing.streams.configure(STREAM, scaling=rg.ScalingPolicy.by_event_rate(1e6))
        elif change == "sealed":
            writing.streams.seal(STREAM)
        elif change == "scaled":
            writing.streams.scale(STREAM, split=[0])
        else:
            writing.streams.delete(STREAM)
            if change == "created again":
                writing.streams.create(STREAM, scaling=POLICY)

    with rg.Client(failing, clock=clock) as slow:
        slow.streams.maintenance.follow(slow.streams.fetch_state(STREAM))
        failing.before = before
        slow.streams.maintenance.step()
    assert failing.before is None
    if change == "deleted":
        assert not client.streams.exists(STREAM)
    else:
        assert client.streams.info(STREAM).epoch == (1 if change == "scaled" else 0)


def test_a_scale_by_hand_of_another_segment_keeps_the_bound(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore
) -> None:
    begin(client, rg.ScalingPolicy.by_event_rate(5, min_segments=2, max_segments=3))
    run(client, clock, 90, lambda: write(writing, 1800))
    write(writing, 1800)
    clock.advance(30)
    failing = FailingStore(store)

    def before(operation: Operation) -> None:
        if operation == ("append", METADATA):
            failing.before = None
            segments = writing.streams.info(STREAM).scaling
            assert segments is not None and segments.action == "split" and len(segments.segments) == 1
            other = {f"{STREAM}/0": 1, f"{STREAM}/1": 0}[segments.segments[0]]
            writing.streams.scale(STREAM, split=[other])

    with rg.Client(failing, clock=clock) as slow:
        slow.streams.maintenance.follow(slow.streams.fetch_state(STREAM))
        failing.before = before
        slow.streams.maintenance.step()
    assert failing.before is None
    assert len(client.streams.info(STREAM).segments) == 3


def test_a_stream_that_is_created_again_is_measured_anew(
    client: rg.Client, writing: rg.Client, clock: ManualClock
) -> None:
    begin(client)
    run(client, clock, 60, lambda: write(writing, 1800))
    client.streams.delete(STREAM)
    client.streams.create(STREAM, scaling=POLICY)
    run(client, clock, 60, lambda: write(writing, 1800))
    assert len(client.streams.info(STREAM).segments) == 1
    run(client, clock, 90, lambda: write(writing, 1800))
    assert len(client.streams.info(STREAM).segments) == 2


def test_a_pending_scale_is_completed_and_no_other_begins(
    client: rg.Client, writing: rg.Client, clock: ManualClock
) -> None:
    begin(client)
    heat(client, writing, clock)

    def announce(state: StreamState) -> list[object]:
        return [state.split([0])]

    client.streams.synchronizer(STREAM).update_state(announce)  # type: ignore[arg-type]
    assert client.streams.fetch_state(STREAM).is_pending
    client.streams.maintenance.step()
    state = client.streams.fetch_state(STREAM)
    assert (state.is_pending, state.epoch) == (False, 1)


def test_a_stream_whose_metadata_is_full_scales_again_a_day_after_a_truncation(
    store: SegmentStore, writing: rg.Client, clock: ManualClock
) -> None:
    with rg.Client(store, clock=clock, state_limit_bytes=20_000) as client:
        begin(client)
        with pytest.raises(rg.StateTooLargeError):
            while True:
                client.streams.scale(STREAM, split=client.streams.fetch_state(STREAM).current[:1])
                client.streams.scale(STREAM, merge=client.streams.fetch_state(STREAM).current)
        full = run(client, clock, 840, lambda: write(writing, 1800))
        assert full.scaling is not None and full.scaling.action is None
        assert "metadata is full" in full.scaling.reason
        client.streams.configure(STREAM, retention=rg.RetentionPolicy(max_bytes=1 << 30), tags={"team": "x" * 200})
        client.streams.truncate(STREAM, full.tail)
        assert client.streams.info(STREAM).head == full.tail
        clock.advance(25 * 3600)
        before = client.streams.info(STREAM).epoch
        run(client, clock, 30)
        assert run(client, clock, 120, lambda: write(writing, 1800)).epoch > before


def test_a_scale_that_was_announced_in_full_metadata_is_completed(store: SegmentStore) -> None:
    with rg.Client(store) as client:
        client.streams.create(STREAM)
        client.streams.synchronizer(STREAM).update_state(lambda state: [state.split([0], 100)])
        codec = StateCodec(StreamState, STREAM_UPDATES)
        with rg.Client(store, state_limit_bytes=codec.size(client.streams.fetch_state(STREAM))) as other:
            info = other.streams.seal(STREAM)
            assert info.sealed and len(info.segments) == 100


# ---------------------------------------------------------------------- policies that come and go


def test_a_policy_can_be_set_and_taken_away(client: rg.Client, writing: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    info = client.streams.configure(STREAM, scaling=rg.ScalingPolicy.by_event_rate(10, min_segments=3))
    assert len(info.segments) == 2
    assert len(run(client, clock, 90).segments) == 3
    client.streams.configure(STREAM, scaling=rg.ScalingPolicy.fixed(1))
    assert client.streams.info(STREAM).scaling is None
    assert len(run(client, clock, 120).segments) == 3
    assert client.store.attributes(REGISTRY) == {}


@pytest.mark.parametrize("ended", ["sealed", "deleted"])
def test_a_stream_that_ends_is_forgotten(client: rg.Client, clock: ManualClock, ended: str) -> None:
    begin(client)
    if ended == "sealed":
        client.streams.seal(STREAM)
    else:
        client.streams.delete(STREAM)
    clock.advance(90)
    client.streams.maintenance.step()
    assert client.store.attributes(REGISTRY) == {}


def test_a_stream_whose_registration_was_lost_is_registered_again(client: rg.Client, clock: ManualClock) -> None:
    begin(client)
    found = client.store.attributes(REGISTRY)[f"due/{STREAM}"]
    client.store.append(REGISTRY, b"", attributes={f"due/{STREAM}": AttributeChange(found, None)})
    with client.writer(STREAM):
        pass
    clock.advance(90)
    client.streams.maintenance.step()
    assert f"due/{STREAM}" in client.store.attributes(REGISTRY)


def test_the_readers_of_another_stream_scale_it_too(client: rg.Client, writing: rg.Client, clock: ManualClock) -> None:
    begin(client)
    client.streams.create("shop/other")
    with client.groups.create("other", streams=["shop/other"]).reader():
        for _ in range(8):
            write(writing, 1800)
            clock.advance(30)
            client.step()
    assert len(client.streams.info(STREAM).segments) == 2


@pytest.mark.parametrize("seconds", [-400.0, -45.0, 45.0, 400.0])
def test_processes_whose_clocks_differ_split_nothing_that_is_not_hot(
    client: rg.Client, writing: rg.Client, clock: ManualClock, store: SegmentStore, seconds: float
) -> None:
    begin(client)
    other_clock = ManualClock(1000.0 + seconds)
    with rg.Client(store, clock=other_clock) as other:
        other.streams.maintenance.follow(other.streams.fetch_state(STREAM))
        for step in range(60):
            write(writing, 270)  # 9 per second: below the target
            clock.advance(30)
            other_clock.advance(30)
            for each in (client, other) if step % 2 else (other, client):
                each.streams.maintenance.step()
    assert client.streams.info(STREAM).epoch == 0


def test_a_scale_in_the_background_loses_no_event(store_url: str) -> None:
    """With real clocks and threads: a writer scales its own stream while it writes."""
    policy = rg.ScalingPolicy.by_event_rate(20, max_segments=4, window_seconds=1)
    with rg.connect(store_url) as client:
        client.streams.create(STREAM, scaling=policy)
        written = 0

        def write_until_scaled() -> bool:
            nonlocal written
            for _ in range(20):
                writer.write(b"%d" % written, routing_key=f"key-{written % 31}")
                written += 1
            writer.flush()
            return client.streams.fetch_state(STREAM).epoch > 0

        with client.writer(STREAM) as writer:
            until(write_until_scaled, "the stream is split")
            for _ in range(5):
                write_until_scaled()
        client.streams.seal(STREAM)
        group = client.groups.create("all", streams=[STREAM])
        with group.reader() as reader:
            numbers = [int(event.data) for event in reader]
    assert sorted(numbers) == list(range(written))
    by_key = [[n for n in numbers if n % 31 == key] for key in range(31)]
    assert by_key == [sorted(each) for each in by_key]

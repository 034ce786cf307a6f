"""What `serve` asks a store for: only for what may have changed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import readergroup as rg
from readergroup.group import lag as lag_module
from readergroup.serve.measuring import GroupMeter, expired, silent_seconds
from readergroup.serve.sampler import Sampler
from readergroup.streams.config import number_of
from synchronizer import open_store
from synchronizer.testing import FailingStore
from tests.readergroup.serve.serving import GROUP, STREAM, filled

Rows = dict[str, tuple[str | None, int, int, int]]


def rows(lag: rg.GroupLag) -> Rows:
    return {segment: (each.owner, each.offset, each.bytes, each.events) for segment, each in lag.segments.items()}


@pytest.mark.stores
def test_what_is_remembered_is_what_the_group_says(shared_store_url: str) -> None:
    rng = random.Random(3)
    with filled(shared_store_url) as client, rg.connect(shared_store_url) as other:
        group = client.groups.get(GROUP)
        meter = GroupMeter(client, group)
        with other.writer(STREAM) as writer, other.groups.get(GROUP).reader("r1") as reader:
            for number in range(25):
                match rng.choice(("write", "read", "split", "rest", "rest")):
                    case "write":
                        writer.write(b"order", routing_key=f"customer-{number}")
                        writer.flush()
                    case "read":
                        reader.read_batch(rng.randrange(1, 30), timeout=0)
                        reader.commit()
                    case "split" if number < 15:
                        segment = rng.choice([*other.streams.info(STREAM).segments])
                        other.streams.scale(STREAM, split=[number_of(segment)])
                measured = meter.measure()
                assert rows(measured.lag) == rows(group.lag())
                assert measured.lag.seconds == pytest.approx(group.lag().seconds, abs=60)
            other.streams.seal(STREAM)
            for _ in reader:
                pass
            assert rows(meter.measure().lag) == rows(group.lag())


def test_a_truncation_of_events_that_wait_shows_in_the_end(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(store_url) as client:
        meter = GroupMeter(client, client.groups.get(GROUP))
        assert meter.measure().lag.events == 100
        client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
        monkeypatch.setattr(lag_module, "_REMEMBERED_SECONDS", 0.0)
        assert meter.measure().lag.events == 0


def test_a_look_at_an_idle_group_makes_as_many_calls_with_many_segments_as_with_few() -> None:
    def calls(segments: int) -> Counter[str]:
        store = FailingStore(open_store("memory://"))
        with rg.Client(store) as client:
            client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
            client.groups.create(GROUP, streams=[STREAM])
            with client.writer(STREAM) as writer:
                for number in range(100):
                    writer.write(b"order", routing_key=f"customer-{number}")
            sampler = Sampler(client, interval_seconds=5.0, outbox=None)
            sampler.take()
            before = len(store.operations)
            sampler.take()
            assert sampler.sample.groups[GROUP].lag.events == 100
            return Counter(each.verb for each in store.operations[before:])

    few = calls(2)
    assert few == calls(64)
    assert few.total() <= 10
    assert few["info"] == few["infos"] == 0


def test_a_reader_that_joined_again_is_not_as_silent_as_its_predecessor(store_url: str) -> None:
    with filled(store_url) as client:
        group = client.groups.get(GROUP)
        meter = GroupMeter(client, group)
        with group.reader("r1"):
            before = meter.measure()
        much_later = client.clock.monotonic() + 100.0
        assert expired(before.state, silent_seconds(before.state, before.renewed_at, much_later)) == {"r1"}
        with group.reader("r1"):
            state = group.synchronizer.fetch_updates()
            assert silent_seconds(state, before.renewed_at, much_later) == {"r1": 0.0}

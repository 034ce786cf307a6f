"""The events that wait for their next attempt, and the weights of segments, in the web view."""

from __future__ import annotations

import math
from typing import Any

import pytest

import readergroup as rg
from readergroup.retries.waiting import DelayLog, Diverting, WaitingEvent
from readergroup.serve import retries
from readergroup.serve.retries import Waiting
from readergroup.serve.sampler import Sampler
from synchronizer import SystemClock
from tests.readergroup.serve.serving import GROUP, STREAM, filled, viewed


def put(client: rg.Client, delay: float, count: int, due: Any = None, data: bytes = b"order") -> None:
    """Let events of the group wait, as a worker does."""
    events = [event for cut in client.batch.segment_ranges(STREAM) for event in client.batch.read(cut)]
    diverting = Diverting(client.store, GROUP, SystemClock(), 10.0)
    for event in events[:count]:
        waiting = WaitingEvent(2e9 + delay if due is None else due, event.pointer, "key", data, {})
        assert diverting.put(waiting, delay, 1)


@pytest.mark.stores
def test_what_waits_is_counted_by_group_and_read_once(shared_store_url: str) -> None:
    with filled(shared_store_url) as client:
        sampler = Sampler(client, interval_seconds=5.0, outbox=None)
        sampler.take()
        assert sampler.retries.of(GROUP) == Waiting()
        put(client, 1.0, 3)
        put(client, 60.0, 2)
        sampler.retries.find()
        sampler.take()
        assert sampler.retries.of(GROUP) == Waiting(5, False, 2e9 + 1)
        log = DelayLog(client.store, GROUP, 1.0)
        client.store.truncate(log.segment, log.read()[0].end)
        sampler.take()
        assert sampler.retries.of(GROUP) == Waiting(4, False, 2e9 + 1)
        client.store.truncate(log.segment, client.store.info(log.segment).length)
        sampler.take()
        assert sampler.retries.of(GROUP) == Waiting(2, False, 2e9 + 60)
        client.store.delete(DelayLog(client.store, GROUP, 60.0).segment)
        sampler.take()
        assert sampler.retries.of(GROUP) == Waiting()


def test_more_than_can_be_counted_is_said_to_be_more(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "MAX_COUNTED", 2)
    with filled(store_url) as client:
        sampler = Sampler(client, interval_seconds=5.0, outbox=None)
        put(client, 1.0, 20, data=bytes(400_000))
        sampler.take()
        found = sampler.retries.of(GROUP)
        assert found.is_partial and 2 <= found.events < 20


@pytest.mark.parametrize("due", [math.nan, math.inf, "soon"])
def test_whatever_is_stored_hides_no_group(store_url: str, due: Any) -> None:
    with filled(store_url) as client:
        put(client, 1.0, 1, due)
        for name in ("007", "9" * 40, "x"):
            client.store.create(f"retries/{GROUP}/{name}")
        client.store.create(f"retries/{GROUP}/5000")
        client.store.append(f"retries/{GROUP}/5000", b"no frame at all, and long enough to be taken for one")
        with viewed(client) as browser:
            (found,) = browser.get("/groups").json()["groups"]
            assert found["retries"] == {"waiting": 1, "is_partial": True, "next_at": 0.0}
            assert found["lag"]["events"] == 100
            assert f'readergroup_group_waiting_retries{{group="{GROUP}"}} 1.0' in browser.get("/metrics").text


def test_the_loads_of_segments_are_shown_if_the_group_is_balanced_by_them(store_url: str) -> None:
    with filled(store_url) as client:
        with viewed(client) as browser:
            found = browser.get(f"/groups/{GROUP}").json()
            assert not found["is_weighed"] and {row["load"] for row in found["segments"]} == {1}
        client.groups.get(GROUP).configure(balance="load")
        with viewed(client) as browser:
            assert browser.get(f"/groups/{GROUP}").json()["is_weighed"]

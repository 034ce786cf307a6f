"""Shared collections of a client: those of its store, with its timeout, closed with it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from pydantic import BaseModel

import readergroup as rg
from tests.waiting import until


class Shop(BaseModel):
    opens_at: int = 9


@pytest.mark.stores(round_robin=True)
def test_clients_of_one_store_share_them(store_url: str) -> None:
    with rg.connect(store_url) as one, rg.connect(store_url) as other:
        one.shared_map("shop", int)["pear"] = 3
        one.shared_set("shop", str).add("ada")
        one.shared_config("settings", Shop).put("opens_at", 8)
        one.counter("shop").add(7)
        assert other.shared_map("shop", int) == {"pear": 3}
        assert other.shared_set("shop", str) == {"ada"}
        assert other.shared_config("settings", Shop).value == Shop(opens_at=8)
        assert other.counter("shop").value == 7


def test_they_and_their_listeners_end_with_the_client(store_url: str) -> None:
    client = rg.connect(store_url)
    before = {*threading.enumerate()}  # those of other tests, too, which may end at any time
    prices, names, config = (
        client.shared_map("shop", int),
        client.shared_set("shop", str),
        client.shared_config("settings", Shop),
    )
    for shared in (prices, names, config):
        shared.register_listener(print)
    started = [each for each in {*threading.enumerate()} - before if each.name.startswith("updates of ")]
    assert len(started) == 3
    client.close()
    until(lambda: not any(thread.is_alive() for thread in started), "the threads have ended")
    with pytest.raises(rg.ClosedError):
        prices["pear"] = 3
    with pytest.raises(rg.ClosedError):
        names.add("ada")


def test_they_have_the_timeout_and_the_limit_of_the_client(store_url: str) -> None:
    with rg.connect(store_url, timeout=7.0, state_limit_bytes=1000) as client:
        texts = client.shared_map("texts", str)
        assert texts.synchronizer.timeout == 7.0
        with pytest.raises(rg.StateTooLargeError):
            texts.update({str(number): "x" * 100 for number in range(20)})


def test_one_that_nobody_holds_is_forgotten(store_url: str) -> None:
    with rg.connect(store_url) as client:
        held = weakref.ref(client.shared_map("shop", int))
        gc.collect()
        assert held() is None


def test_a_semaphore_that_is_in_use_refuses_another_number_of_permits(store_url: str) -> None:
    with rg.connect(store_url) as client, client.semaphore("berth", permits=2):
        for permits in (1, 3):
            with (
                pytest.raises(rg.InvalidArgumentError, match=f"permits=2 given={permits}"),
                client.semaphore("berth", permits=permits, timeout=0),
            ):
                pytest.fail("it was given")
        assert list(client._locks) == [(rg.Semaphore, "berth")]


def test_a_barrier_that_is_in_use_refuses_another_number_of_parties(store_url: str) -> None:
    with rg.connect(store_url) as client:
        assert client.barrier("start", 2).parties == 2
        with pytest.raises(rg.InvalidArgumentError, match="parties=2 given=3"):
            client.barrier("start", 3)

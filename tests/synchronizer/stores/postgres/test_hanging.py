"""A server that does not answer, and does not close its connections either."""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import pytest

import readergroup as rg
from synchronizer import (
    Deadline,
    OutcomeUnknownError,
    StateSynchronizer,
    StoreUnavailableError,
    SystemClock,
    call_limits,
    open_store,
)
from synchronizer.backoff import Backoff
from synchronizer.stores.postgres import listener
from synchronizer.stores.postgres.connections import parse_address
from tests.servers.postgres import PostgresServer
from tests.synchronizer.accounts import UPDATES, Account, Add, answer, threads
from tests.waiting import PATIENCE_SECONDS, until

#: A call of the store is given up after 20 s by itself.
SOON_SECONDS = 15.0
OPTIONS = "connect_timeout=2"  # for the connections after the first one


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(listener, "LEAST_SECONDS", 0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda replica: replica.update_state_unconditionally(Add(), timeout=1.0),
        lambda replica: replica.fetch_updates(timeout=1.0),
        lambda replica: Backoff(SystemClock(), Deadline(SystemClock(), 1.0)).retry(
            partial(replica.store.info, "account")
        ),
    ],
    ids=["update", "fetch", "call"],
)
def test_a_call_of_a_server_that_hangs_is_given_up_at_the_deadline(
    server: PostgresServer, call: Callable[[StateSynchronizer[Account]], object], request: pytest.FixtureRequest
) -> None:
    with open_store(f"{server.url}?schema={request.node.callspec.id}&{OPTIONS}") as store:
        replica = StateSynchronizer(store, "account", initial=Account(), updates=UPDATES)
        server.pause()
        try:
            begun = time.monotonic()
            with pytest.raises((StoreUnavailableError, TimeoutError, OutcomeUnknownError)):
                call(replica)
            assert time.monotonic() - begun < SOON_SECONDS
        finally:
            server.resume()
        value = replica.fetch_updates().value
        assert replica.update_state_unconditionally(Add()).value == value + 1


def test_a_call_that_waits_for_a_connection_is_given_up_at_the_deadline_too(server: PostgresServer) -> None:
    with open_store(f"{server.url}?schema=busy&pool_size=1&{OPTIONS}") as store, threads(1) as pool:
        store.create("s")
        server.pause()
        try:
            call = pool.submit(store.info, "s")
            until(lambda: store._connections._loans)  # type: ignore[attr-defined]
            begun = time.monotonic()
            with pytest.raises(StoreUnavailableError, match="all connections of this store are in use"):
                Backoff(SystemClock(), Deadline(SystemClock(), 1.0)).retry(partial(store.info, "s"))
            assert time.monotonic() - begun < SOON_SECONDS
        finally:
            server.resume()
        assert answer(call).length == 0


def test_closing_a_store_does_not_wait_for_a_listener_whose_server_hangs(server: PostgresServer) -> None:
    store = open_store(f"{server.url}?schema=listener&{OPTIONS}")
    store.create("s")
    assert not store.wait({"s": 0}, 0.1)
    server.pause()
    try:
        let_interest_end(store._listener)  # type: ignore[attr-defined]
        until(is_giving_up_interest)
        begun = time.monotonic()
        store.close()
        assert time.monotonic() - begun < SOON_SECONDS
    finally:
        server.resume()


def test_closing_a_store_does_not_wait_for_a_listener_that_connects_to_a_server_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and answers none
        address = parse_address(
            f"postgresql://postgres@127.0.0.1:{silent.getsockname()[1]}/postgres?connect_timeout=60"
        )
        connecting = listener.acquire_listener(address, "store")
        with silent.accept()[0]:
            begun = time.monotonic()
            listener.release_listener(address, "store")
            assert time.monotonic() - begun < SOON_SECONDS
            assert connecting.is_closed
        connecting._thread.join(PATIENCE_SECONDS)  # its connection is cut
        assert not connecting._thread.is_alive() and connecting._wake_pipe._writer.closed


def let_interest_end(waiting: listener.Listener) -> None:
    """As if nobody had waited for some seconds."""
    with waiting._lock:
        waiting._expected_until.update(dict.fromkeys(waiting._expected_until, 0.0))
    waiting._wake_pipe.wake()


def is_giving_up_interest() -> bool:
    """Whether the thread that listens waits for the answer to a statement."""
    threads = {thread.ident for thread in threading.enumerate() if thread.name == "postgres-listener"}
    frames = [frame for ident, frame in sys._current_frames().items() if ident in threads]
    return any(
        found.f_code.co_name == "_update_interest" for frame in frames for found, _ in traceback.walk_stack(frame)
    )


def test_closing_a_client_does_not_wait_for_a_server_that_hangs(server: PostgresServer) -> None:
    client = rg.connect(f"{server.url}?schema=closing&{OPTIONS}", timeout=2)
    client.streams.create("shop/orders")
    group = client.groups.create("billing", streams=["shop/orders"])
    reader, lock = group.reader(), client.lock("till")
    reader.read(timeout=0.5)
    held = lock.__enter__()
    server.pause()
    try:
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < SOON_SECONDS
    finally:
        server.resume()
        del reader, held

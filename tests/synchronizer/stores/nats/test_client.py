"""What is used of nats-py and is not public: looked up when it is imported, and done without where it is not there."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from synchronizer.errors import UnsupportedError
from synchronizer.store import Appended
from synchronizer.stores import open_store
from synchronizer.stores.nats import client as nats_client
from synchronizer.stores.nats.store import NatsStore


class WithoutMethod(Client):
    _process_msg = None  # type: ignore[assignment]
    _connect_command = None  # type: ignore[assignment]


class WithOtherParameters(Client):
    async def _process_msg(self, frame: bytes) -> None:  # type: ignore[override]
        """One argument."""

    def _connect_command(self, options: dict[str, Any]) -> bytes:  # type: ignore[override]
        return b""


class OfTheOtherKind(Client):
    def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:  # type: ignore[override]
        """Not awaited."""

    async def _connect_command(self) -> bytes:  # type: ignore[override]
        return b""


class WithAnotherState(Client):
    def __init__(self) -> None:
        super().__init__()
        self._pending = b""  # type: ignore[assignment]
        del self._server_info


class ThatNeedsArguments(Client):
    def __init__(self, loop: object) -> None:
        super().__init__()


OTHERS = [WithoutMethod, WithOtherParameters, OfTheOtherKind, WithAnotherState, ThatNeedsArguments]


def test_the_installed_release_has_what_is_used() -> None:
    """If this fails with a new release, look what has changed, and what the public way costs."""
    assert nats_client._has_what_is_short(Client, Subscription)
    assert nats_client._can_demand_tls(Client)


@pytest.mark.parametrize("client", OTHERS)
def test_another_shape_is_noticed(client: type[Client]) -> None:
    assert not nats_client._has_what_is_short(client, Subscription)
    assert not nats_client._can_demand_tls(client)


def test_subscriptions_without_a_number_are_noticed() -> None:
    class Numberless(Subscription):
        _id = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]

    assert not nats_client._has_what_is_short(Client, Numberless)


def test_a_release_that_cannot_be_held_to_tls_is_refused_for_addresses_with_tls(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_client, "_CAN_DEMAND_TLS", False)
    with pytest.raises(UnsupportedError, match="TLS"):
        open_store(f"{nats_url}&tls=require")
    open_store(nats_url).close()


def test_both_ways_store_and_hear_the_same(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsStore(nats_url) as short:
        monkeypatch.setattr(nats_client, "CAN_BE_SHORT", False)
        with NatsStore(nats_url) as public:
            assert type(short._connection._client) is nats_client.ShortClient
            assert type(public._connection._client) is nats_client.PublicClient
            short.create("s")
            large = bytes(range(256)) * 8_000  # in parts, which is a batch
            assert public.append("s", large) == Appended(0, len(large))
            assert short.append("s", b"x", expected_offset=len(large)) == Appended(len(large), len(large) + 1)
            assert public.read("s", 0, 1 << 24) == short.read("s", 0, 1 << 24) == large + b"x"
            assert public.wait({"s": 0}, 5) == short.wait({"s": 0}, 5) == {"s"}


_WITHOUT = """
import logging, sys
logging.basicConfig(format="%(name)s %(message)s")
import nats.aio.client
handle = nats.aio.client.Client._process_msg
async def _process_msg(self, *frame):  # of another shape, and called as ever
    await handle(self, *frame)
nats.aio.client.Client._process_msg = _process_msg
from synchronizer.stores import open_store
with open_store(sys.argv[1]) as store:
    store.create("s")
    print(store.append("s", b"abc"), type(store._connection._client).__name__)
"""


def test_a_process_with_another_release_works_and_says_that_it_is_slower(nats_url: str) -> None:
    output = subprocess.run([sys.executable, "-c", _WITHOUT, nats_url], capture_output=True, text=True, timeout=300)
    assert output.stdout.strip() == "Appended(offset=0, length=3) PublicClient", output.stderr
    assert "synchronizer.stores.nats.client this release of nats-py is unknown" in output.stderr


class FallsSilent:
    """Greets everyone like a server. It answers its first client until that is sent away, and no later one."""

    def __init__(self) -> None:
        self.accepted = 0
        self.open = 0
        self.sends_away = asyncio.Event()
        self.met_an_attempt = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open += 1
        writer.write(b'INFO {"version": "2.12.0", "headers": true, "max_payload": 1048576}\r\n')
        tasks = [asyncio.ensure_future(self._answer(reader, writer, is_silent=self.accepted > 1))]
        if self.accepted == 1:
            tasks.append(asyncio.ensure_future(self.sends_away.wait()))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        writer.close()
        self.open -= 1

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_silent: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"PING\r\n":
                    if is_silent:
                        self.met_an_attempt.set()
                    else:
                        writer.write(b"PONG\r\n")


def test_a_client_that_is_cut_while_it_reconnects_leaves_no_connection_and_opens_none() -> None:
    async def cut_while_reconnecting() -> tuple[int, int]:
        falls_silent = FallsSilent()
        server = await asyncio.start_server(falls_silent.accept, "127.0.0.1", 0)
        async with server, asyncio.timeout(60):
            port = server.sockets[0].getsockname()[1]
            client = nats_client.new_client(lambda *_: None, lambda _: None, lambda: None, demands_tls=False)
            await client.connect(
                f"nats://127.0.0.1:{port}",
                connect_timeout=1,
                reconnect_time_wait=0,
                max_reconnect_attempts=-1,
            )
            falls_silent.sends_away.set()
            await falls_silent.met_an_attempt.wait()
            client.cut()
            attempts = falls_silent.accepted
            while falls_silent.open or client.is_reconnecting:
                await asyncio.sleep(0.01)
        return attempts, falls_silent.accepted

    attempts_before, attempts = asyncio.run(cut_while_reconnecting())
    assert attempts == attempts_before == 2

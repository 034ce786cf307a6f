"""What is used of nats-py and is not public: looked up when it is imported, and done without where it is not there."""

from __future__ import annotations

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

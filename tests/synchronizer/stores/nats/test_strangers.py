"""What a user may do to a NATS store who may publish on few of its subjects: little, and no more than that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from synchronizer.errors import InvalidArgumentError
from synchronizer.stores import open_store
from synchronizer.stores.nats.address import parse_address
from synchronizer.stores.nats.store import NatsStore
from tests.waiting import until

LONG = 30.0


def as_stranger(url: str, act: Callable[[Client], Awaitable[Any]]) -> Any:
    """The result of ``act`` with a connection of its own."""

    async def run() -> Any:
        async with await nats.connect(url.partition("?")[0]) as connection:
            result = await act(connection)
            await connection.flush()
            return result

    return asyncio.run(run())


def name_of_stream(url: str) -> str:
    return url.partition("stream=")[2].partition("&")[0]


# The line


@pytest.mark.parametrize(
    "ticket",
    [
        "$JS.API.STREAM.DELETE.{victim}",
        "x 0\r\n\r\nPUB $JS.API.STREAM.DELETE.{victim} 0\r\n\r\n",
        "{stream}_turn.x 0\r\n\r\nPUB $JS.API.STREAM.DELETE.{victim} 0\r\n\r\n",
        "{stream}_turn.0123456789abcdef0123456789abcdef\r\n",
        "",
        "\udcff",
    ],
)
def test_a_ticket_that_names_another_subject_is_sent_no_word(nats_url: str, ticket: str) -> None:
    """Tickets are bytes that anybody may have published who may stand in line."""
    stream = name_of_stream(nats_url)
    victim = f"{stream}_victim"
    text = ticket.format(victim=victim, stream=stream).encode(errors="surrogateescape")

    async def stand_in_line(connection: Client) -> None:
        await connection.jetstream().add_stream(name=victim, subjects=[f"{victim}.>"])
        await connection.publish(f"{stream}_line.lock", text)

    with open_store(nats_url) as store:
        with store.fair_lock("lock", 5) as is_held:
            assert is_held
            as_stranger(nats_url, stand_in_line)
        with store.fair_lock("lock", 0.1) as is_held:  # waits behind the stranger, who says nothing
            assert not is_held
        assert store.create("s")  # the connection is whole
    as_stranger(nats_url, lambda connection: connection.jetstream().stream_info(victim))


@pytest.mark.parametrize("headers", [None, {}, {"Rg-Ticket": "first"}, {"Rg-Ticket": ""}, {"Rg-Ticket": "9" * 5000}])
def test_a_word_that_says_nothing_wakes_nobody_and_harms_nobody(nats_url: str, headers: dict[str, str] | None) -> None:
    with NatsStore(nats_url) as store, NatsStore(nats_url) as other:
        with other.fair_lock("lock", 5) as is_held:
            assert is_held
            results: list[bool] = []
            waiting = threading.Thread(target=lambda: results.append(_take(store)))
            waiting.start()
            until(lambda: bool(store._fair_lock._tickets))
            as_stranger(
                nats_url, lambda connection: connection.publish(store._fair_lock._grant_subject, b"", headers=headers)
            )
            assert not results
        waiting.join(LONG)
        assert results == [True]


def _take(store: NatsStore) -> bool:
    with store.fair_lock("lock", LONG) as is_held:
        return is_held


# Subjects of our own making


@pytest.mark.parametrize("prefix", ["", " ", "a b", "a\r\nPUB x 0", "a.*", "a.>", ".a", "a.", "a..b", "ä"])
def test_a_prefix_of_inboxes_is_a_subject_and_nothing_else(prefix: str) -> None:
    with pytest.raises(InvalidArgumentError, match="inbox_prefix"):
        parse_address("nats://localhost:1?inbox_prefix=" + prefix.replace(" ", "%20").replace("\r\n", "%0D%0A"))


def test_an_inbox_prefix_may_have_several_levels(nats_url: str) -> None:
    with open_store(nats_url + "&inbox_prefix=_INBOX.shop-1") as store:
        assert store.create("s")

"""The format of a NATS store: the golden stream and its messages are read and written as in the first release."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from synchronizer.errors import UnsupportedError
from synchronizer.store import SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.nats.address import parse_address
from synchronizer.stores.nats.connection import NatsConnection
from synchronizer.stores.nats.frames import Outgoing
from synchronizer.stores.nats.wire import BATCH_ID, stored
from tests.golden import PERIOD, golden, is_periodic, periodic

from ..golden_contents import check_contents, use_contents, write_contents

#: More than one message may hold.
PARTS = PERIOD * 70_000
#: The settings of a stream that are the SDK's; the server adds others.
SETTINGS = (
    *("subjects", "retention", "discard", "max_age", "max_msgs_per_subject", "allow_direct", "allow_rollup_hdrs"),
    *("allow_atomic", "storage", "num_replicas", "republish", "duplicate_window"),
)
#: Headers for the publish alone, which the server would obey again.
OF_THE_PUBLISH = ("Nats-Expected-", "Nats-Batch-")


def write(store: SegmentStore) -> None:
    write_contents(store)
    store.create("shop/parts")
    store.append("shop/parts", PARTS)


@contextmanager
def connected(url: str) -> Iterator[tuple[NatsConnection, str]]:
    address = parse_address(url)
    connection = NatsConnection(address).open()
    try:
        yield connection, address.stream
    finally:
        connection.close()


def held(url: str) -> str:
    """Return the stream's settings and its messages, without the stream's name, in a line each."""
    with connected(url) as (connection, stream):
        described = connection.ask(f"$JS.API.STREAM.INFO.{stream}", b"").document
        configuration = described["config"]
        settings = {name: configuration[name] for name in SETTINGS}
        settings["metadata"] = {
            name: value for name, value in configuration["metadata"].items() if name.startswith("readergroup.")
        }
        lines = [json.dumps(settings, sort_keys=True).replace(f'"{stream}.', '"STREAM.')]
        for sequence in range(1, described["state"]["last_seq"] + 1):
            answer = connection.ask(f"$JS.API.STREAM.MSG.GET.{stream}", json.dumps({"seq": sequence}).encode())
            if "error" not in answer.document:
                lines.append(line(stored(answer.document), stream))
    return "\n".join(lines) + "\n"


def line(message: Any, stream: str) -> str:
    data: object = base64.b64encode(message.data).decode()
    if (first := is_periodic(message.data)) is not None:
        data = [first, len(message.data)]
    headers = {
        name: "an id" if name == BATCH_ID else value.replace(f"{stream}.", "STREAM.", 1)
        for name, value in message.headers.items()
    }
    subject = message.subject.replace(f"{stream}.", "STREAM.", 1)
    return json.dumps([message.sequence, subject, headers, data], sort_keys=True)


def restore(url: str, text: str) -> None:
    """Make the stream, with its messages at the sequences that they have."""
    with connected(url) as (connection, stream):
        settings, *messages = (json.loads(line.replace('"STREAM.', f'"{stream}.')) for line in text.splitlines())
        ask(connection, f"$JS.API.STREAM.CREATE.{stream}", {**settings, "name": stream})
        at = 1
        for sequence, subject, headers, data in messages:
            while at < sequence:
                connection.ask_all([Outgoing(f"{stream}.n.removed", b"", {})])
                ask(connection, f"$JS.API.STREAM.MSG.DELETE.{stream}", {"seq": at})
                at += 1
            kept = {name: value for name, value in headers.items() if not name.startswith(OF_THE_PUBLISH)}
            body = periodic(*data) if isinstance(data, list) else base64.b64decode(data)
            ((answer, *_),) = connection.ask_all([Outgoing(subject, body, kept)])
            assert answer.document["seq"] == sequence, answer
            at += 1


def ask(connection: NatsConnection, subject: str, body: Mapping[str, object]) -> None:
    answer = connection.ask(subject, json.dumps(body).encode()).document
    assert "error" not in answer, answer


def test_messages_are_written_as_in_the_first_release(nats_url: str) -> None:
    with open_store(nats_url) as store:
        write(store)
    today = held(nats_url)
    assert today == golden("nats-v1-carried.jsonl", today.encode()).decode()


@pytest.mark.parametrize("name", ["nats-v1.jsonl", "nats-v1-carried.jsonl"])
def test_messages_are_read_as_in_the_first_release(name: str, nats_url: str) -> None:
    """Also those of before heads carried attributes."""
    restore(nats_url, golden(name, b"").decode())
    with open_store(nats_url, must_exist=True) as store:
        check_contents(store)
        assert store.read("shop/parts", 0, 1 << 21) == PARTS
        store.delete("shop/parts")
        use_contents(store)


def test_a_stream_of_an_unknown_format_is_refused(nats_url: str) -> None:
    settings, _, _ = golden("nats-v1.jsonl", b"").decode().partition("\n")
    restore(nats_url, settings.replace('{"readergroup.format": "1"}', '{"readergroup.format": "2"}'))
    with pytest.raises(UnsupportedError, match="upgrade to the release that created it.* format='2' known='1'"):
        open_store(nats_url)

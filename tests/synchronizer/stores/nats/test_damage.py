"""Damaged messages: whatever a NATS stream holds and whatever comes over the wire, callers see errors of this SDK only.

Anybody may have stored it who may publish to the subjects of the store. Each case has a seed, and is the same in every
run.
"""

from __future__ import annotations

import base64
import json
import random
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from synchronizer.errors import CorruptStoreError, InvalidArgumentError, ReaderGroupError
from synchronizer.store import AttributeChange, SegmentStore, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.stores.nats import wire as wire
from synchronizer.stores.nats.frames import Answer, Outgoing, answer_of, error_in, framed
from synchronizer.stores.nats.store import NatsStore
from synchronizer.threads.background import background_errors
from tests.seeds import seeds
from tests.servers.nats import NatsServer
from tests.synchronizer.stores.nats.test_store import _proxied
from tests.waiting import until

SEEDS = range(8)
HEADS = ["", " ", "open", "0 0 0 open", "0 3 5 open", "9 3 0 open", "-1 3 0 open", "0 3 0", "0 3 0 shut"]
HEADS += ["0 3 0 open a=AQ==", "0 3 0 open a=!", "0 3 0 open =AQ==", "0 3 0 open a"]
HEADS += [f"0 3 0 {mark}" for mark in (wire.SEALED, wire.DELETED)]
VALUES = [each.encode() for each in (*HEADS, wire.SET, wire.DELETED, "1e3", "NaN", "\N{SUPERSCRIPT TWO}", "9" * 5000)]
VALUES += [b"\xff\xfe"]
NAMES = [wire.HEAD, wire.GROUP, wire.ATTRIBUTE, wire.NAME, "Status", "Nats-Sequence", "Nats-Subject"]


def damaged(rng: random.Random, block: bytes) -> bytes:
    """The bytes with some of them replaced, left out, repeated or put in."""
    data = bytearray(block)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[place : place + rng.randint(1, 8)]
            case 2:
                data[place:place] = data[place : place + rng.randint(1, 8)]
            case 3:
                data[place:place] = rng.choice([b"\r\n", b":", b" ", b"\0", b"\xff", b"-", b'"', b"{"])
    return bytes(data)


# What is read of a message


def blocks() -> list[bytes]:
    headers = [
        wire.head_header(0, 3, 0, wire.OPEN),
        wire.head_header(0, 3, 0, wire.OPEN, wire.carrying({"a/1": b"value", "b": b""})),
        {wire.GROUP: "2", "Nats-Sequence": "7", "Nats-Subject": "s.g.x"},
        {wire.ATTRIBUTE: wire.SET, wire.NAME: "%61", "Nats-Sequence": "7", "Nats-Subject": "s.a.x.~0"},
        {"Nats-Num-Pending": "1", "Nats-UpTo-Sequence": "9", "Nats-Sequence": "7", "Nats-Subject": "s.d.x"},
    ]
    lines = ["".join(f"{name}: {value}\r\n" for name, value in each.items()).encode() for each in headers]
    statuses = [b"NATS/1.0 404 No Messages\r\n\r\n", b"NATS/1.0 503\r\n\r\n"]
    return [b"NATS/1.0\r\n" + each + b"\r\n" for each in lines] + statuses


def readings(headers: Mapping[str, str], data: bytes) -> list[Callable[[], object]]:
    message = wire.Stored(headers.get("Nats-Subject", "s.a.x.~0"), 7, headers, data)
    return [
        lambda: wire.carried_in(wire.head_of(7, headers)),
        lambda: wire.changes_of(message),
        lambda: wire.value_of(message),
        lambda: wire.name_in(message.subject, headers),
        lambda: wire.directly_stored(headers, data),
        lambda: wire.sequence_in(headers),
        lambda: wire.number_in(headers, "Nats-Num-Pending"),
        lambda: wire.Subjects("s").name_at(message.subject),
    ]


@seeds(4, 10)
def test_damaged_headers_are_read_or_raise_corrupt_store_error(seed: int) -> None:
    rng = random.Random(seed)
    for block in 20 * blocks():
        answer = answer_of(damaged(rng, block), b"data")
        for read in readings(answer.headers, b"data"):
            try:
                read()
            except CorruptStoreError as error:
                assert "damaged" in str(error)


@seeds(4, 10)
def test_damaged_answers_of_the_leader_are_read_or_raise_corrupt_store_error(seed: int) -> None:
    rng = random.Random(seed)
    message = {"subject": "s.d.x", "seq": 7, "hdrs": base64.b64encode(blocks()[0]).decode(), "data": "AAAA"}
    for whole in 20 * [{"type": "t", "message": message}, {"type": "t", "error": {"code": 404, "err_code": 10037}}]:
        data = damaged(rng, json.dumps(whole, separators=(",", ":")).encode())
        for read in (
            lambda data=data: wire.stored_head(data),
            lambda data=data: wire.stored(Answer({}, data).document),
            lambda data=data: error_in(Answer({}, data).document),
        ):
            with suppress(CorruptStoreError):
                read()


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"7", b'"x"', b"{", b"\xff", b'{"error":7}', b'{"error":{"err_code":"x"}}']
)
def test_an_answer_that_is_no_object_is_corrupt(data: bytes) -> None:
    try:
        assert error_in(Answer({}, data).document)[0] is None
    except CorruptStoreError:
        assert not data.startswith(b'{"')


def test_a_status_is_the_servers_and_no_header() -> None:
    answer = answer_of(b"NATS/1.0\r\nStatus: 404\r\nNats-Sequence: 7\r\n\r\n", b"x")
    assert answer.status is None and answer.headers["Nats-Sequence"] == "7"
    assert answer_of(b"NATS/1.0 404 No Messages\r\n\r\n", b"").status == "404"
    assert answer_of(None, b"x") == Answer({}, b"x")


@pytest.mark.parametrize(
    "message",
    [
        Outgoing("a b"),
        Outgoing("a\r\nPUB x 0\r\n"),
        Outgoing(""),
        Outgoing("ä"),
        Outgoing("a\t"),
        Outgoing("a", b"", {"x": "1\r\ny: 2"}),
        Outgoing("a", b"", {"x\n": "1"}),
        Outgoing("a", b"", {"x": "\r"}),
    ],
)
def test_no_frame_holds_more_than_one_message(message: Outgoing) -> None:
    with pytest.raises(InvalidArgumentError):
        framed(message, b"")


# What somebody stored


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


class Stranger:
    """Publishes bytes as they are, which no client library would."""

    def __init__(self, server: NatsServer) -> None:
        host, _, port = server.address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._answers = self._socket.makefile("rb")
        self._answers.readline()
        self._socket.sendall(b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"protocol":1}\r\n')

    def publish(self, subject: str, headers: bytes, data: bytes) -> None:
        block = b"NATS/1.0\r\n" + headers + b"\r\n"
        size = len(block)
        self._socket.sendall(
            b"HPUB %b %d %d\r\n%b%b\r\nPING\r\n" % (subject.encode(), size, size + len(data), block, data)
        )
        while not self._answers.readline().startswith(b"PONG"):
            pass

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


def verbs(store: SegmentStore, name: str) -> list[Callable[[], object]]:
    change = {"a": AttributeChange(b"1", b"2")}
    return [
        lambda: store.info(name),
        lambda: store.read(name, 0, 100),
        lambda: store.read(name, 1, 1),
        lambda: store.attributes(name),
        lambda: store.attributes(name, names=["a"]),
        lambda: store.append(name, b"more"),
        lambda: store.append(name, b"more", expected_offset=3),
        lambda: store.append(name, b"", attributes=change),
        lambda: store.append(name, b"x", attributes=change),
        lambda: store.wait({name: 3}, 0.01),
        lambda: store.wait({name: 3}, 0),
        lambda: list(store.list()),
        lambda: store.create(name),
        lambda: store.truncate(name, 1),
        lambda: store.seal(name),
        lambda: store.delete(name),
    ]


@pytest.mark.parametrize("kind", ["d", "g", "a", "n", "w"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.unexpected_errors  # a listener that hears such a message leaves it out, and counts that
def test_what_somebody_else_stored_raises_errors_of_ours_only(server: NatsServer, kind: str, seed: int) -> None:
    rng = random.Random(f"{kind}{seed}")
    stream = f"of_{kind}_{seed}"
    stranger = Stranger(server)
    with (
        _only_listeners_count_errors(),
        NatsStore(f"{server.url}?stream={stream}") as knowing,
        NatsStore(f"{server.url}?stream={stream}") as ignorant,
    ):
        for name in ("s", "other"):
            knowing.create(name)
            knowing.append(name, b"abc", attributes={"a": AttributeChange(None, b"1")})
        for store in (knowing, ignorant):
            _be_impatient(store)
        names = {"a": ["s.a", "s.b", "s.~0", "s." + "~" + "0" * 64], "n": ["s", "~.~0", "%25", "x.y"]}.get(kind, ["s"])
        lines = [f"{name}: ".encode() + rng.choice(VALUES) + b"\r\n" for name in rng.sample(NAMES, rng.randint(0, 4))]
        headers = b"".join(lines) if rng.random() < 0.7 else damaged(rng, b"".join(lines) or b"x: y\r\n")
        stranger.publish(f"{stream}.{kind}.{rng.choice(names)}", headers, rng.choice([b"", b"abc", b"\xff", b"{}"]))
        for store in (knowing, ignorant):
            for verb in verbs(store, "s"):
                with suppress(ReaderGroupError):
                    verb()
        for store in (knowing, ignorant):  # others are not touched, nor is the thread
            _be_patient(store)
            assert store.info("other").length == 3
            assert store.attributes("other") == {"a": b"1"}
            assert store.read("other", 0, 10) == b"abc"
    stranger.close()


def is_corrupt(store: SegmentStore, why: str) -> bool:
    try:
        store.info("s")
    except CorruptStoreError as error:
        return why in str(error)
    return False


def test_a_part_of_no_append_is_corrupt(server: NatsServer) -> None:
    """What is not part of a batch was not torn by a server, and is not removed."""
    stranger = Stranger(server)
    with open_store(f"{server.url}?stream=part") as store:
        store.create("s")
        header = wire.head_header(0, 3, 0, wire.PART)[wire.HEAD].encode()
        stranger.publish("part.d.s", wire.HEAD.encode() + b": " + header + b"\r\n", b"abc")
        until(lambda: is_corrupt(store, "belongs to an atomic append"), "the server has stored it")
    stranger.close()


# What comes over the wire


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.unexpected_errors
def test_a_server_that_talks_nonsense_raises_errors_of_ours_only_and_is_left(nats_url: str, seed: int) -> None:
    """NATS has no checksums: what is read may be wrong, but nothing hangs, ends, or stays broken."""
    rng = random.Random(seed)
    with _proxied(nats_url) as (proxy, url), NatsStore(url + "") as store:
        names = [f"s{number}" for number in range(2)]
        for name in names:
            store.create(name)
        _be_impatient(store)
        proxy.damage_answers(lambda data: damaged(rng, data) if rng.random() < 0.3 else data)
        for name in names:
            for verb in verbs(store, name):
                with suppress(ReaderGroupError):
                    verb()
        proxy.heal()
        proxy.reset()
        _be_patient(store)
        until(lambda: _succeeds(lambda: store.create("new")))
        until(lambda: _succeeds(lambda: store.append("new", b"x")))
        with open_store(nats_url) as fresh:
            assert fresh.info("new").length >= 1


def _be_impatient(store: NatsStore) -> None:
    """For calls that may get no answer; a store is opened with the patience of a busy machine."""
    store._connection._address = replace(store._connection._address, timeout_seconds=0.2)
    store._timeout_seconds = store._reader._timeout_seconds = 0.2


def _be_patient(store: NatsStore) -> None:
    store._connection._address = replace(store._connection._address, timeout_seconds=30.0)


@contextmanager
def _only_listeners_count_errors() -> Iterator[None]:
    """The verbs themselves have met nothing that they do not know."""
    before = background_errors()
    yield
    kinds = {kind for kind, count in background_errors().items() if count != before.get(kind)}
    assert not {kind for kind in kinds if not kind.startswith("CorruptStoreError at stores/nats_wire.py")}


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        return not isinstance(call(), UnknownOutcome)
    except ReaderGroupError:
        return False

"""What is particular to the store on NATS, and what happens when its servers fail."""

from __future__ import annotations

import asyncio
import base64
import datetime
import hashlib
import ipaddress
import json
import logging
import shutil
import socket
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nats
import nkeys
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from synchronizer.errors import (
    AlreadyExistsError,
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    ReaderGroupError,
    SealedError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from synchronizer.store import (
    ANY,
    MAX_ATTRIBUTE_CHANGES,
    Appended,
    AttributeChange,
    Conflict,
    SegmentStore,
    UnknownOutcome,
)
from synchronizer.stores import open_store
from synchronizer.stores.nats import client as nats_client
from synchronizer.stores.nats import store as backend
from synchronizer.stores.nats.connection import NatsConnection
from synchronizer.stores.nats.frames import Answer, Outgoing
from synchronizer.stores.nats.hints import MessageStart
from synchronizer.stores.nats.reading import NatsReader, read_answer
from synchronizer.stores.nats.store import NatsStore
from tests.servers.nats import NatsCluster, NatsServer
from tests.servers.proxy import TcpProxy
from tests.synchronizer.stores.nats.nats_processes import RECORD, append_when_told, open_at_once
from tests.synchronizer.stores.processes import contend, receive, running
from tests.waiting import PATIENCE_SECONDS, busyness

LONG = PATIENCE_SECONDS


def test_a_driver_that_misses_its_cancellation_does_not_hold_up_who_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = nats.aio.client.Client.connect

    async def miss_a_cancellation(client: nats.aio.client.Client, *arguments: object, **options: object) -> None:
        with suppress(asyncio.CancelledError):
            await connect(client, *arguments, **options)  # type: ignore[arg-type]
        await connect(client, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(nats.aio.client.Client, "connect", miss_a_cancellation)
    begin = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="no connection"):
        open_store("nats://127.0.0.1:1?timeout_seconds=1")
    assert time.monotonic() - begin < 30 * busyness()


def test_who_waits_when_the_store_is_closed_hears_that(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(nats_url)
    store.create("s")
    assert isinstance(store, NatsStore)
    look = store._waiters._heads

    def close_and_look(names: Any) -> Any:
        store.close()
        return look(names)

    monkeypatch.setattr(store._waiters, "_heads", close_and_look)
    with pytest.raises(ClosedError):  # also where the loop has ended that would have listened no more
        store.wait({"s": 0}, 10)


def test_who_asks_when_the_store_is_closed_hears_that(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def leave_unanswered(messages: object) -> None:
        asked.set()

    with NatsStore(nats_url) as store:
        store.create("s")
        monkeypatch.setattr(store._connection._client, "send", leave_unanswered)
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(store.info, "s")
            assert asked.wait(LONG)
            store.close()
            with pytest.raises(ClosedError):
                asking.result(LONG)


# Several processes


def test_of_contending_processes_each_append_is_stored_once(nats_url: str) -> None:
    with open_store(nats_url) as store:
        store.create("s")
        results = _run_together(lambda number: (contend, nats_url, number, 400))
        data = store.read("s", 0, 1 << 30)
    for number, (successes, _) in enumerate(results):
        own = [
            data[first : first + RECORD]
            for first in range(0, len(data), RECORD)
            if int(data[first : first + 3]) == number
        ]
        assert own == [b"%03d:%07d;" % (number, count) for count in range(successes)]
    assert len(data) == RECORD * sum(successes for successes, _ in results)


def test_processes_may_open_a_new_store_at_the_same_moment(nats_cluster_url: str) -> None:
    # A cluster that makes four streams at once on a busy machine may take long.
    patient = f"{nats_cluster_url}&timeout_seconds={LONG}"
    assert _run_together(lambda number: (open_at_once, patient, number)) == [True] * 4
    with open_store(nats_cluster_url) as store:
        assert list(store.list()) == [f"segment-{number}" for number in range(4)]


def test_what_nobody_answers_while_a_stream_is_made_is_asked_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unanswered: list[str] = []
    send = nats_client.ShortClient.send

    def leave_the_first_of_each_unanswered(client: nats_client.ShortClient, messages: Any) -> object:
        subject = messages[0].message.subject
        if subject in unanswered:
            return send(client, messages)
        unanswered.append(subject)
        return None

    monkeypatch.setattr(nats_client.ShortClient, "send", leave_the_first_of_each_unanswered)
    with open_store(nats_url) as store:
        monkeypatch.undo()
        assert store.create("s")
    assert len(unanswered) == 3  # is it there, make it, is it led


def test_a_waiting_process_hears_of_an_append_within_milliseconds(nats_url: str) -> None:
    delays = []
    with open_store(nats_url) as store, running(append_when_told, nats_url) as (_, connection):
        store.create("s")
        assert receive(connection) == "ready"
        for turn in range(50):
            with _in_thread(lambda turn=turn: _woken_at(store, turn * RECORD)) as waiting:
                _until(lambda: _is_waiting(store))
                connection.send(True)
                acknowledged_at = receive(connection)
                assert isinstance(acknowledged_at, float)
            delays.append(waiting() - acknowledged_at)
        connection.send(False)
    # The aim is 20 ms for 99 of 100; a busy machine does not keep to it every time.
    assert statistics.median(delays) < 0.05 * busyness()


# Servers that fail


def test_nothing_acknowledged_is_lost_when_the_server_is_killed() -> None:
    with NatsServer() as server, _appending(server.url + "?timeout_seconds=2") as appender:
        for _ in range(2):
            appender.await_more(20)
            server.kill()
            server.restart()
        appender.await_more(20)
        appender.check()


def test_a_cluster_rides_over_the_death_of_its_leader_and_a_rolling_restart() -> None:
    with NatsCluster() as cluster, _appending(cluster.url + "&timeout_seconds=4") as appender:
        appender.await_more(20)
        leader = cluster.kill_leader_of("readergroup")
        appender.await_more(20)
        assert appender.longest_gap < 30 * busyness()
        leader.restart()
        cluster.wait_until_ready()
        cluster.rolling_restart()
        appender.await_more(20)
        appender.check()


def test_a_lost_answer_is_an_unknown_outcome_and_the_next_append_settles_it(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), open_store(url) as store:
        store.create("s")
        store.append("s", b"first")
        proxy.lose_answers(to=b"second")
        assert isinstance(store.append("s", b"second", expected_offset=5), UnknownOutcome)
        assert store.append("s", b"second", expected_offset=5) == Conflict(11, b"second")
        proxy.lose_answers(to=b"third")
        change = {"a": AttributeChange(None, b"1")}
        assert isinstance(store.append("s", b"third", attributes=change), UnknownOutcome)
        assert store.append("s", b"third", attributes=change) == Conflict(16, b"", {"a": b"1"})
        assert store.read("s", 0, 100) == b"firstsecondthird"


def test_without_a_connection_an_append_has_no_effect_and_works_again_later(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), NatsStore(url) as store:
        store.create("s")
        answer_within(store, 1.0)
        proxy.cut()
        for _ in range(2):
            result = _or_error(lambda: store.append("s", b"lost"))
            assert isinstance(result, UnknownOutcome | StoreUnavailableError)  # the first may find the cut itself
        with pytest.raises(StoreUnavailableError):
            store.read("s", 0, 1)
        proxy.heal()
        append = partial(store.append, "s", b"x", expected_offset=0)
        answer_within(store, LONG)
        _until(lambda: isinstance(_or_error(append), Appended | Conflict))
        assert store.read("s", 0, 100) == b"x"


def test_an_append_that_was_given_up_is_not_sent_when_the_connection_is_back(nats_url: str) -> None:
    """A busy thread begins to wait for the connection later than the caller, and must not wait for longer."""
    with open_store(nats_url) as other, NatsStore(nats_url) as store:
        other.create("s")
        assert store.info("s").length == 0  # the append asks nothing more
        connection = store._connection
        loop = connection._hidden.loop
        loop.call_soon_threadsafe(setattr, connection, "_is_connected", False)
        loop.call_soon_threadsafe(time.sleep, 1.8)
        answer_within(store, 2.0)
        with pytest.raises(StoreUnavailableError):
            store.append("s", b"gone", expected_offset=0, attributes={"a": AttributeChange(None, b"1")})
        answer_within(store, LONG)
        loop.call_soon_threadsafe(connection._begin_sending)
        assert store.info("s").length == 0
        assert store.append("s", b"next", expected_offset=0) == Appended(0, 4)
        assert other.attributes("s") == {}


def test_a_call_ends_at_its_deadline_when_nothing_answers(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), NatsStore(url) as store:
        store.create("s")
        answer_within(store, 1.0)
        proxy.silence()
        begin = time.monotonic()
        assert isinstance(store.append("s", b"x"), UnknownOutcome)
        with pytest.raises(StoreUnavailableError):
            store.info("s")
        assert time.monotonic() - begin < 5 * busyness()


def test_a_request_that_nobody_waits_for_is_forgotten_when_nothing_answers(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), NatsStore(url) as store:
        connection, heard = store._connection, list[Any]()
        request = Outgoing(store._api.info, b"")
        connection.ask_later([request], heard.append)
        _until(lambda: bool(heard))
        assert heard[0][0][0].document["state"]
        answer_within(store, 1.0)
        proxy.silence()
        begin = time.monotonic()
        connection.ask_later([request], heard.append)
        _until(lambda: bool(connection._pending))
        _until(lambda: not connection._pending and not connection._expecting)
        assert time.monotonic() - begin < 5 * busyness()  # before the client finds the server dead
        assert len(heard) == 1


def test_a_request_that_nobody_waits_for_is_forgotten_once_it_is_answered(nats_url: str) -> None:
    class Hearing:
        def __call__(self, answers: list[list[Answer]]) -> None:
            heard.set()

    heard = threading.Event()
    with NatsStore(f"{nats_url}&timeout_seconds=3000") as store:
        hearing = Hearing()
        is_kept = weakref.ref(hearing)
        store._connection.ask_later([Outgoing(store._api.info, b"")], hearing)
        del hearing
        assert heard.wait(LONG)
        _until(lambda: is_kept() is None)


def test_messages_without_answers_are_not_waited_for(nats_url: str) -> None:
    with NatsStore(nats_url) as store:
        answer_within(store, LONG)
        assert store._connection.exchange([Outgoing("unheard", b"", has_answer=False)]) == []
        assert store._connection.ask_all([]) == []


def test_who_waits_hears_what_was_appended_while_the_connection_was_gone(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), open_store(url) as store, open_store(nats_url) as other:
        store.create("s")
        with _in_thread(lambda: store.wait({"s": 0}, LONG)) as waiting:
            _until(lambda: _is_waiting(store))
            proxy.cut()
            other.append("s", b"x")
            proxy.heal()
        assert waiting() == {"s"}


def test_who_waits_goes_by_the_store_as_it_is_after_a_backup_was_restored(tmp_path: Path) -> None:
    """Else it is told of the appends that were lost, again and again, and not of those that take their places."""
    with NatsServer(folder=tmp_path) as server, open_store(server.url) as store:
        (data,) = tmp_path.iterdir()
        store.create("s")
        store.append("s", b"one")
        server.kill()
        shutil.copytree(data, tmp_path / "backup")
        server.restart()
        _until(lambda: _answers(store))
        for _ in range(3):
            store.append("s", b"lost")
        assert store.wait({"s": 3}, LONG) == {"s"}
        server.kill()
        shutil.rmtree(data)
        shutil.move(tmp_path / "backup", data)
        server.restart()
        _until(lambda: _answers(store))
        assert store.wait({"s": 3}, 0.3) == frozenset()
        assert store.append("s", b"as long, too") == Appended(3, 15)
        assert store.append("s", b"!") == Appended(15, 16)
        assert store.wait({"s": 15}, LONG) == {"s"}


def test_waiting_goes_on_while_the_servers_are_away() -> None:
    with NatsServer() as server, open_store(server.url) as store:
        store.create("s")
        with _in_thread(lambda: _or_error(lambda: store.wait({"s": 0}, LONG))) as waiting:
            _until(lambda: _is_waiting(store))
            server.restart()
            append = partial(store.append, "s", b"x", expected_offset=0)
            _until(lambda: isinstance(_or_error(append), Appended | Conflict))
        assert waiting() == {"s"} or isinstance(waiting(), StoreUnavailableError)


def test_a_store_is_created_although_a_folder_of_the_server_is_being_removed(tmp_path: Path) -> None:
    """A server that deleted its last stream removes the folder of all streams a little later."""
    with NatsServer(folder=tmp_path) as server:
        with open_store(server.url + "?stream=first") as store:
            store.create("s")
        (streams,) = tmp_path.rglob("streams")
        streams.rename(streams.parent / "elsewhere")
        streams.touch()  # the server cannot create a folder here, and removes it when it has failed
        with open_store(server.url + "?stream=second") as store:
            assert store.create("s")


def test_a_server_that_cannot_write_its_folder_is_named_after_a_while(tmp_path: Path) -> None:
    with NatsServer(folder=tmp_path) as server:
        open_store(server.url + "?stream=first").close()
        (folder,) = tmp_path.rglob("jetstream")
        folder.rename(folder.parent / "elsewhere")
        folder.touch()
        with pytest.raises(StoreUnavailableError, match="cannot be opened: error creating store for stream"):
            open_store(server.url + "?stream=second")


# Threads


def test_threads_that_append_to_one_segment_take_turns(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, each refused append would cost two round trips, and an atomic batch several flushes."""
    refused: list[object] = []
    store_all = NatsStore._store

    def count(store: NatsStore, messages: Any, **options: Any) -> int | None:
        sequence = store_all(store, messages, **options)
        if sequence is None:
            refused.append(messages)
        return sequence

    with NatsStore(nats_url) as store, ThreadPoolExecutor(8) as threads:
        store.create("s")
        monkeypatch.setattr(NatsStore, "_store", count)
        list(threads.map(lambda number: store.append("s", b"%03d" % number), range(200)))
        assert store.info("s").length == 600
    assert not refused


def test_a_thread_that_gets_no_answer_does_not_hold_up_the_others_for_as_long(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_TURN_SECONDS", 0.1)
    hangs, goes_on = threading.Event(), threading.Event()
    store_all = NatsStore._store

    def hang(store: NatsStore, messages: Any, **options: Any) -> int | None:
        if messages[0].data == b"hangs":
            hangs.set()
            assert goes_on.wait(LONG)
        return store_all(store, messages, **options)

    with NatsStore(nats_url) as store, ThreadPoolExecutor(1) as threads:
        store.create("s")
        monkeypatch.setattr(NatsStore, "_store", hang)
        hanging = threads.submit(store.append, "s", b"hangs")
        assert hangs.wait(LONG)
        assert store.append("s", b"other") == Appended(0, 5)
        goes_on.set()
        assert hanging.result(LONG) == Appended(5, 10)


# Sizes


@pytest.fixture(scope="module")
def small_server() -> Iterator[NatsServer]:
    with NatsServer(settings=["max_payload: 8192"], jetstream=["max_file: 3MB", "max_mem: 10MB"]) as server:
        yield server


def test_an_append_larger_than_a_message_goes_in_whole_or_not_at_all(small_server: NatsServer) -> None:
    with open_store(small_server.url + "?stream=parts") as store:
        store.create("s")
        data = _noise(300_000)
        change = {f"{number}": AttributeChange(None, b"%d" % number) for number in range(MAX_ATTRIBUTE_CHANGES)}
        assert store.append("s", data, expected_offset=0, attributes=change) == Appended(0, len(data))
        assert store.append("s", data, expected_offset=7) == Conflict(len(data), data[7 : 7 + 65536])
        assert store.append("s", data[:20_000], attributes={"0": AttributeChange(b"wrong", b"x")}) == Conflict(
            len(data), b"", {"0": b"0"}
        )
        assert store.read("s", 0, 1 << 20) == data
        assert store.read("s", 123_456, 10_000) == data[123_456:133_456]
        assert len(store.attributes("s")) == MAX_ATTRIBUTE_CHANGES
        assert len(data) < store.guarantees.largest_append < 16 * 1024 * 1024
        with pytest.raises(InvalidArgumentError, match="max_payload"):
            store.append("s", bytes(store.guarantees.largest_append + 1))
        with pytest.raises(InvalidArgumentError, match="max_payload"):
            store.append("s", b"", attributes={"large": AttributeChange(ANY, bytes(9000))})
        store.truncate("s", len(data))
        store.delete("s")


def test_an_attribute_fits_into_a_message_with_its_name_or_is_refused(nats_url: str) -> None:
    """A server that is sent a larger one cuts the connection, and the outcome would never be known."""
    with open_store(nats_url) as store:
        store.create("s")
        for name, space in (("a", 4096), ("\N{GRINNING FACE}" * 1000, 4096 + 12 * 1000)):
            most = 1024 * 1024 - space
            assert store.append("s", b"", attributes={name: AttributeChange(None, bytes(most))}) == Appended(0, 0)
            with pytest.raises(InvalidArgumentError, match="max_payload"):
                store.append("s", b"", attributes={name: AttributeChange(ANY, bytes(most + 1))})


def test_a_full_store_refuses_and_takes_appends_again_when_there_is_room(small_server: NatsServer) -> None:
    with open_store(small_server.url + "?stream=full&max_bytes=2000000") as store:
        store.create("s")
        store.create("t")
        with pytest.raises(StoreFullError) as error:
            for _ in range(100):
                store.append("s", bytes(100_000))
        assert error.value.retryable
        length = store.info("s").length
        assert length % 100_000 == 0
        store.truncate("s", length - 50_000)
        assert store.append("s", b"fits again", expected_offset=length) == Appended(length, length + 10)
        assert store.read("s", length - 50_000, 1 << 20) == bytes(50_000) + b"fits again"
        with suppress(StoreFullError):
            for _ in range(100):
                store.append("s", bytes(100_000))
        store.delete("s")
        assert store.append("t", bytes(500_000)) == Appended(0, 500_000)
        store.delete("t")


def test_what_a_server_at_its_own_limit_has_torn_is_removed() -> None:
    with NatsServer(settings=["max_payload: 8192"], jetstream=["max_file: 1MB"]) as server:
        with NatsStore(server.url) as store:
            store.create("s")
            for _ in range(8):
                assert isinstance(store.append("s", bytes(100_000)), Appended)
            append = partial(store.append, "s", bytes(100_000))
            answer_within(store, 2.0)
            for _ in range(2):
                _until(lambda: isinstance(_or_error(append), UnknownOutcome | StoreFullError))
            answer_within(store, LONG)
            whole, torn = divmod(store.info("s").length, 100_000)
            assert torn == 0 and whole >= 8
            store.truncate("s", 300_000)
            assert store.append("s", b"more", expected_offset=whole * 100_000) == Appended(
                whole * 100_000, whole * 100_000 + 4
            )
            assert store.read("s", 300_000, 1 << 20) == bytes((whole - 3) * 100_000) + b"more"


def test_any_place_of_a_long_segment_is_found(nats_url: str) -> None:
    with open_store(nats_url) as store:
        store.create("s")
        data = _noise(8_000_000)
        first = 0
        for size in (1, 500_000, 3, 100, 0, 70_000, 1_000_000, 10):  # uneven on purpose
            for _ in range(4 if size > 1000 else 40):
                store.append("s", data[first : first + size])
                first += size
                store.append("s", b"", attributes={"a": AttributeChange(ANY, b"1")})
        data = data[:first]
    with open_store(nats_url) as store:
        for offset in (0, 1_999_999, 2_000_200, 40, 2_500_000, first - 5, 1_000_000):
            assert store.read("s", offset, 1000) == data[offset : offset + 1000]
        assert store.read("s", 0, 1 << 30) == data
        store.truncate("s", 2_100_000)
        assert store.read("s", 2_100_000, 1 << 30) == data[2_100_000:]


def test_a_truncation_keeps_what_comes_after_it_however_many_appends_that_is(nats_url: str) -> None:
    """By a process that knows nothing of the segment, to a byte that lies more messages ahead than come at once."""
    with open_store(nats_url) as store:
        store.create("s")
        data = b"".join(b"%06d;" % number for number in range(1_300))
        for first in range(0, len(data), 7):
            store.append("s", data[first : first + 7])
    with open_store(nats_url) as store:
        store.truncate("s", 7_500)
    with open_store(nats_url) as store:
        assert store.read("s", 7_500, 1 << 20) == data[7_500:]


@pytest.mark.parametrize("verb", ["truncate", "delete", "forget"])
def test_much_data_is_deleted_in_portions(verb: str, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the server does something else in between."""
    monkeypatch.setattr(backend, "_PURGE_BYTES", 100_000)
    purged: list[int] = []

    def note(connection: NatsConnection, answer: Answer) -> Mapping[str, Any]:
        document = read_answer(connection, answer)
        purged.append(document.get("purged", 0))
        return document

    with open_store(nats_url) as store:
        for segment in ("s", "other"):
            store.create(segment)
        for number in range(64):
            for segment in ("s", "other"):
                store.append(segment, bytes([number]) * 10_000)
        monkeypatch.setattr(backend, "read_answer", note)
        if verb == "truncate":
            store.truncate("s", 630_000)
            assert store.read("s", 630_000, 10_000) == bytes([63]) * 10_000
        else:
            getattr(store, verb)("s")
        assert 60 <= sum(purged) <= 75 and max(purged) <= 20
        assert store.read("other", 0, 10_000) == bytes(10_000)


@pytest.mark.parametrize("create", ["create", "create_together"])
def test_a_name_is_used_again_although_the_process_that_forgot_it_died_before_its_messages_were_gone(
    create: str, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(nats_url) as dying, open_store(nats_url) as store:
        dying.create("s")
        dying.append("s", b"data", attributes={"a": AttributeChange(None, b"1")})
        purge, purges = NatsStore._purge, []
        with monkeypatch.context() as patched:
            patched.setattr(NatsStore, "_purge", lambda _, *purged: purges.append(purged))
            dying.forget("s", expected_offset=4)
        assert purges and list(store.list()) == []
        for call in (lambda: store.info("s"), lambda: store.attributes("s"), lambda: store.delete("s")):
            with pytest.raises(NotFoundError):
                call()
        if create == "create":
            assert store.create("s", start_offset=100)
        else:
            assert store.create_together({"s": b""}, start_offsets={"s": 100})
        store.append("s", b"next", attributes={"b": AttributeChange(None, b"2")})
        for purged in purges:  # it had only slept
            purge(dying, *purged)  # type: ignore[arg-type]
        assert list(store.list()) == ["s"]
        assert store.read("s", 100, 10) == b"next"
        assert store.attributes("s") == {"b": b"2"}
        dying.forget("s", expected_offset=4)
        assert store.append("s", b"!", expected_offset=104) == Appended(104, 105)


@pytest.mark.parametrize("verb", ["seal", "delete"])
def test_a_change_of_attributes_alone_is_refused_if_the_segment_ends_while_it_is_asked_for(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """What the change depends on is asked for after the head, which was open a moment ago."""
    with open_store(nats_url) as other, open_store(nats_url) as store:
        other.create("s")
        ask = NatsReader.life

        def ask_late(reader: NatsReader, segment: str) -> int:
            monkeypatch.setattr(NatsStore, "_purge", lambda *_: None)  # as if `other` stood still there
            getattr(other, verb)("s")
            return ask(reader, segment)

        monkeypatch.setattr(NatsReader, "life", ask_late)
        with pytest.raises(SealedError if verb == "seal" else NotFoundError):
            store.append("s", b"", attributes={"a": AttributeChange(None, b"1")})


def test_f24_an_attribute_takes_one_message_however_often_it_changes(nats_url: str) -> None:
    """Each change replaces the one before, and no limit of the stream does that: it would count for the data too."""
    server, _, name = nats_url.partition("?stream=")

    async def messages() -> int:
        connection = await nats.connect(server)
        info = await connection.jetstream().stream_info(name)
        await connection.close()
        assert info.config.max_msgs_per_subject in (None, -1)
        return int(info.state.messages)

    with open_store(nats_url) as store:
        store.create("s")
        for data in (b"", b"data"):
            number = int(store.attributes("s").get("a", b"0"))
            store.append("s", data, attributes={"a": AttributeChange(b"%d" % number if number else None, b"1")})
            before = asyncio.run(messages())
            for number in range(1, 41):
                change = AttributeChange(b"%d" % number, b"%d" % (number + 1))
                assert isinstance(store.append("s", data, attributes={"a": change}), Appended)
            assert asyncio.run(messages()) == before + 40 * bool(data)


@pytest.mark.parametrize("lands", [True, False])
def test_f24_a_refusal_for_a_proposal_in_flight_is_looked_into_before_it_is_a_conflict(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    """What is in flight may land or not: who is told of a conflict is told what it lost to."""
    store_messages = NatsStore._store
    refusals = 0

    def refuse_once(self: NatsStore, *arguments: Any, **options: Any) -> int | None:
        nonlocal refusals
        if self is not store or refusals:
            return store_messages(self, *arguments, **options)
        refusals += 1
        if lands:
            other.append("s", b"early")
        error = {"err_code": 10164, "description": "atomic publish batch contains a proposal in flight"}
        return self._stored_sequence(Answer({}, json.dumps({"error": error}).encode()), 1)

    with open_store(nats_url) as store, open_store(nats_url) as other:
        store.create("s")
        monkeypatch.setattr(NatsStore, "_store", refuse_once)
        answer = store.append("s", b"data", expected_offset=0)
        assert refusals == 1
        assert answer == (Conflict(5, b"early") if lands else Appended(0, 4))


def test_what_is_known_of_a_segment_is_only_a_hint(nats_url: str) -> None:
    with open_store(nats_url) as one, open_store(nats_url) as other:
        one.create("s")
        assert one.append("s", b"one", attributes={"a": AttributeChange(None, b"1")}) == Appended(0, 3)
        assert other.append("s", b"two", attributes={"a": AttributeChange(b"1", b"2")}) == Appended(3, 6)
        assert one.append("s", b"lost", expected_offset=3, attributes={"a": AttributeChange(b"1", b"3")}) == Conflict(
            6, b"two", {"a": b"2"}
        )
        other.append("s", b"", attributes={"a": AttributeChange(b"2", b"1")})
        assert one.append("s", b"!", attributes={"a": AttributeChange(b"1", b"3")}) == Appended(6, 7)
        other.truncate("s", 3)
        assert one.append("s", b"?", expected_offset=7) == Appended(7, 8)
        other.seal("s")
        for attributes in ({}, {"a": AttributeChange(b"3", b"4")}):
            with pytest.raises(SealedError):
                one.append("s", b"", attributes=attributes)
        other.delete("s")
        with pytest.raises(NotFoundError):
            one.append("s", b"more")
        with pytest.raises(NotFoundError):
            one.attributes("s")


@pytest.mark.parametrize("sequence", [6, 1000])
def test_places_that_are_remembered_wrongly_hide_and_cost_nothing(nats_url: str, sequence: int) -> None:
    """As after a backup was restored and the store has grown again."""
    with open_store(nats_url) as other, NatsStore(nats_url) as store:
        other.create("s")
        for _ in range(4):
            other.append("s", b"data")
        assert store.info("s").length == 16
        store._hints.note_start("s", MessageStart(4, sequence))
        assert store.read("s", 4, 100) == b"data" * 3
        store._hints.note_start("s", MessageStart(4, sequence))
        store.truncate("s", 5)
        assert other.read("s", 5, 100) == b"atadatadata"


# Opening


@pytest.mark.parametrize(
    "option", ["colour=red", "replicas=2", "durable=yes", "timeout_seconds=soon", "stream=a.b", "tls=maybe"]
)
def test_an_option_that_means_nothing_is_refused(option: str) -> None:
    with pytest.raises(InvalidArgumentError):
        open_store(f"nats://localhost:1?{option}")


def test_a_store_that_must_exist_is_not_made(nats_url: str) -> None:
    with pytest.raises(NotFoundError):
        open_store(nats_url, must_exist=True)
    open_store(nats_url).close()
    open_store(nats_url, must_exist=True).close()


def test_another_number_of_replicas_is_refused(nats_url: str) -> None:
    open_store(nats_url).close()
    with pytest.raises(InvalidArgumentError, match="replicas"):
        open_store(nats_url + "&replicas=3")


def test_three_replicas_need_three_servers(nats_url: str) -> None:
    with pytest.raises(UnsupportedError, match="fewer servers"):
        open_store(nats_url + "&replicas=3")


def test_a_stream_of_somebody_else_is_left_alone(nats_url: str) -> None:
    server, _, name = nats_url.partition("?stream=")

    async def make_stream() -> None:
        connection = await nats.connect(server)
        await connection.jetstream().add_stream(name=name, subjects=[f"{name}.>"])
        await connection.close()

    asyncio.run(make_stream())
    with pytest.raises(AlreadyExistsError):
        open_store(nats_url)


def test_a_server_without_jetstream_is_refused() -> None:
    with NatsServer(jetstream=None) as server, pytest.raises(UnsupportedError, match="JetStream"):
        open_store(server.url)


def test_a_server_that_is_too_old_is_refused(nats_url: str) -> None:
    with _speaking_as(nats_url, b"2.11.9") as url, pytest.raises(UnsupportedError, match="2.12"):
        open_store(url)


def test_nobody_there_is_an_error_in_time() -> None:
    with pytest.raises(StoreUnavailableError):
        open_store("nats://127.0.0.1:1?timeout_seconds=0.3")


def test_what_the_operator_states_of_durability_is_what_is_guaranteed(
    nats_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_warned", threading.Event())
    with caplog.at_level(logging.WARNING), open_store(nats_url + "&durable=always") as store:
        assert store.guarantees.durable
    assert "sync_interval" not in caplog.text
    for _ in range(2):
        with open_store(nats_url) as store:
            assert not store.guarantees.durable
    assert sum("sync_interval" in each for each in caplog.messages) == 1


def test_a_read_is_linearizable_with_one_replica_only(nats_url: str, nats_cluster_url: str) -> None:
    with open_store(nats_url) as one, open_store(nats_cluster_url) as three:
        assert one.guarantees.linearizable_append and three.guarantees.linearizable_append
        assert one.guarantees.linearizable_read and not three.guarantees.linearizable_read


def test_closing_leaves_no_thread_and_no_connection() -> None:
    """Of its own: another test of this process may have left a store open, and with it the thread."""

    def loops() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "nats-event-loop"}

    before = loops()
    with NatsServer() as server:
        stores = [NatsStore(server.url) for _ in range(3)]
        stores[0].create("s")
        for store in stores:
            store.wait({"s": 0}, 0.05)
        (loop,) = {store._connection._hidden for store in stores}
        assert len(loops() - before) <= 1
        for store in stores:
            store.close()
        assert not {store._connection for store in stores} & loop.users.keys()
        _until(lambda: not loops() - before)
        _until(lambda: server.monitoring("connz")["num_connections"] == 0)
        with pytest.raises(ClosedError):
            stores[0].info("s")


# Who may


def test_a_user_has_a_password() -> None:
    with NatsServer(settings=["authorization { user: me, password: 'p@ss/word' }"]) as server:
        url = server.url.replace("//", "//me:p%40ss%2Fword@")
        with open_store(url) as store:
            assert store.create("s")
            assert "ss" not in store.url and "ss" not in repr(store) and "me@" in store.url
        with pytest.raises(StoreUnavailableError, match="credentials") as error:
            open_store(server.url.replace("//", "//me:secret@") + "?timeout_seconds=2")
        assert "secret" not in str(error.value)


def test_a_token_opens_the_store() -> None:
    with NatsServer(settings=["authorization { token: s3cret }"]) as server:
        with open_store(server.url.replace("//", "//s3cret@")) as store:
            assert store.create("s")
            assert "s3cret" not in store.url


def test_an_nkey_opens_the_store(tmp_path: Path) -> None:
    seed, public = _key(nkeys.PREFIX_BYTE_USER)
    (tmp_path / "seed").write_bytes(seed)
    with NatsServer(settings=[f"authorization {{ users: [ {{ nkey: {public} }} ] }}"]) as server:
        with open_store(f"{server.url}?nkey={tmp_path}/seed") as store:
            assert store.create("s")


def test_a_credentials_file_opens_the_store(tmp_path: Path) -> None:
    operator_seed, operator = _key(nkeys.PREFIX_BYTE_OPERATOR)
    account_seed, account = _key(nkeys.PREFIX_BYTE_ACCOUNT)
    system_seed, system = _key(nkeys.PREFIX_BYTE_ACCOUNT)
    user_seed, user = _key(nkeys.PREFIX_BYTE_USER)
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    jetstream = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1, "wildcards": True}
    operator_jwt = _jwt(operator_seed, operator, operator, "operator", {"system_account": system})
    account_jwt = _jwt(operator_seed, operator, account, "account", {"limits": {**limits, **jetstream}})
    system_jwt = _jwt(operator_seed, operator, system, "account", {"limits": limits})
    user_jwt = _jwt(account_seed, account, user, "user", {"subs": -1, "data": -1, "payload": -1})
    (tmp_path / "me.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user_seed.decode()}\n------END USER NKEY SEED------\n"
    )
    settings = [
        f"operator: {operator_jwt}",
        "resolver: MEMORY",
        f"resolver_preload: {{ {account}: {account_jwt}, {system}: {system_jwt} }}",
    ]
    with NatsServer(settings=settings) as server:
        with open_store(f"{server.url}?credentials={tmp_path}/me.creds") as store:
            assert store.create("s")
        with pytest.raises(ReaderGroupError):
            open_store(f"{server.url}?timeout_seconds=2")


def test_tls_is_spoken_and_demanded(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    tls = [f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}', "authorization { user: me, password: secret }"]
    with NatsServer(settings=tls) as server:
        url = server.url.replace("//", "//me:secret@")
        with open_store(f"{url}?tls_ca={certificate}") as store:
            assert store.create("s")
        failed = "TLS handshake .* failed; check tls_ca and tls_hostname"
        with pytest.raises(StoreUnavailableError, match=f"{failed}.*CERTIFICATE_VERIFY_FAILED"):
            open_store(f"{url}?tls=require&timeout_seconds=1")
        with pytest.raises(StoreUnavailableError, match=f"{failed}.*ostname mismatch"):
            open_store(f"{url}?tls_ca={certificate}&tls_hostname=other.example&timeout_seconds=1")
        with pytest.raises(StoreUnavailableError, match="refuse the credentials"):
            open_store(f"{url.replace('secret', 'wrong')}?tls_ca={certificate}&timeout_seconds=1")
        with pytest.raises(InvalidArgumentError, match=r"'tls_ca' cannot be read.*/nofile"):
            open_store(f"{url}?tls_ca=/nofile")
    plain = ["authorization { user: me, password: secret }"]
    with NatsServer(settings=plain) as server, pytest.raises(StoreUnavailableError, match=f"{failed}.*requires TLS"):
        open_store(server.url.replace("//", "//me:secret@") + "?tls=require&timeout_seconds=1")


# What the tests need


class _Appender:
    """Appends numbered records one after the other, finds out what became of each, and keeps the acknowledged ones."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._stop = threading.Event()
        self.acknowledged = 0
        self.longest_gap = 0.0
        self._thread = threading.Thread(target=self._run)
        store.create("s")
        self._thread.start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            offset = self.acknowledged * RECORD
            result = _or_error(self._append_next)
            # A conflict can only be with the own record, whose answer was lost.
            if isinstance(result, Appended) or (isinstance(result, Conflict) and result.length == offset + RECORD):
                self.acknowledged += 1
                self.longest_gap = max(self.longest_gap, time.monotonic() - last)
                last = time.monotonic()
            else:
                assert isinstance(result, UnknownOutcome | StoreUnavailableError), result
                self._stop.wait(0.02)

    def _append_next(self) -> object:
        number = self.acknowledged
        return self._store.append("s", self._record(number), expected_offset=number * RECORD)

    @staticmethod
    def _record(number: int) -> bytes:
        return b"%011d;" % number

    def await_more(self, records: int) -> None:
        goal = self.acknowledged + records
        _until(lambda: self.acknowledged >= goal or not self._thread.is_alive())
        assert self._thread.is_alive()

    def check(self) -> None:
        self.stop()
        length = self._store.info("s").length
        assert self._store.read("s", 0, 1 << 20) == b"".join(map(self._record, range(length // RECORD)))
        assert self.acknowledged * RECORD <= length <= (self.acknowledged + 1) * RECORD

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(LONG)


@contextmanager
def _appending(url: str) -> Iterator[_Appender]:
    with open_store(url) as store:
        appender = _Appender(store)
        try:
            yield appender
        finally:
            appender.stop()


def _run_together(work: Callable[[int], tuple[object, ...]]) -> list[object]:
    """What four processes answer that begin at the same moment."""
    with ExitStack() as stack:
        connections = [stack.enter_context(running(*work(number)))[1] for number in range(4)]  # type: ignore[arg-type]
        for connection in connections:
            assert receive(connection) == "ready"
        for connection in connections:
            connection.send("go")
        return [receive(connection) for connection in connections]


def answer_within(store: NatsStore, seconds: float) -> None:
    """Change how long its calls wait for an answer: in a test, not all are to be as short as one."""
    store._connection._address = replace(store._connection._address, timeout_seconds=seconds)


def _is_waiting(store: SegmentStore) -> bool:
    """Whether a thread is past its first look and sleeps, or is about to."""
    waiters = store._waiters  # type: ignore[attr-defined]
    return bool(waiters._waiting) and all(watch.head for watch in waiters._watched.values())


def _answers(store: SegmentStore) -> bool:
    with suppress(StoreUnavailableError):
        store.info("s")
        return True
    return False


def _woken_at(store: SegmentStore, length: int) -> float:
    assert store.wait({"s": length}, LONG) == {"s"}
    return time.monotonic()


def _or_error(call: Callable[[], object]) -> object:
    try:
        return call()
    except ReaderGroupError as error:
        return error


@contextmanager
def _in_thread(call: Callable[[], object]) -> Iterator[Callable[[], object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    try:
        yield lambda: results[0]
    finally:
        thread.join(LONG)


@contextmanager
def _proxied(url: str) -> Iterator[tuple[TcpProxy, str]]:
    """The address of the same store, through a proxy."""
    address = url.removeprefix("nats://").partition("?")[0]
    with TcpProxy(int(address.rpartition(":")[2])) as proxy:
        yield proxy, url.replace(address, proxy.address)


@contextmanager
def _speaking_as(url: str, version: bytes) -> Iterator[str]:
    """The address of a server that says it has that version. It refuses nothing, as an old one would."""
    address = url.removeprefix("nats://").partition("?")[0]
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as server:
        line = server.makefile("rb").readline()
    info = json.loads(line.removeprefix(b"INFO "))
    greeting = b"INFO " + json.dumps({**info, "version": version.decode()}).encode() + b"\r\n"

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, suppress(OSError):
                client.sendall(greeting)
                while data := client.recv(4096):
                    if b"PING" in data:
                        client.sendall(b"PONG\r\n")

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield url.replace(address, f"127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)


def _key(prefix: int) -> tuple[bytes, str]:
    """A new seed and its public key."""
    seed = nkeys.encode_seed(hashlib.sha256(str(time.monotonic_ns()).encode()).digest(), prefix)
    return bytes(seed), nkeys.from_seed(bytearray(seed)).public_key.decode()


def _jwt(seed: bytes, issuer: str, subject: str, kind: str, claims: dict[str, object]) -> str:
    body = {"iss": issuer, "sub": subject, "name": kind, "iat": 0, "nats": {**claims, "type": kind, "version": 2}}
    text = f"{_base64(json.dumps({'typ': 'JWT', 'alg': 'ed25519-nkey'}).encode())}.{_base64(json.dumps(body).encode())}"
    return f"{text}.{_base64(nkeys.from_seed(bytearray(seed)).sign(text.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "certificate.pem", directory / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    no_password = serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password))
    return paths


def _noise(size: int) -> bytes:
    return b"".join(number.to_bytes(4, "big") for number in range(size // 4 + 1))[:size]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_f7_who_knows_a_segment_appends_nothing_after_another_has_sealed_it(nats_url: str) -> None:
    """The server takes whatever is published; only the comparison of each append keeps the seal."""
    with open_store(nats_url) as writer, open_store(nats_url) as sealer:
        writer.create("s")
        writer.append("s", b"first", attributes={"a": AttributeChange(None, b"1")})
        final = sealer.seal("s")
        change, addition = {"a": AttributeChange(b"1", b"2")}, {"b": AttributeChange(None, b"1")}
        for data, changes in ((b"late", {}), (b"", change), (b"late", addition)):
            with pytest.raises(SealedError):
                writer.append("s", data, attributes=changes)
        assert sealer.info("s") == final
        assert sealer.attributes("s") == {"a": b"1"}

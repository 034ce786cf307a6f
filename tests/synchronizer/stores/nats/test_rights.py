"""What a user of NATS servers needs to be allowed: exactly what `nats_rights` lists, and nothing less."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

import readergroup as rg
from synchronizer.errors import StorePermissionError, StoreUnavailableError
from synchronizer.store import MAX_NAME_LENGTH, Appended, AttributeChange, SegmentStore, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.stores.nats.rights import Rights, right_for, rights_of
from synchronizer.stores.nats.store import NatsStore
from synchronizer.testing import SegmentStoreConformance
from tests.places import ROOT
from tests.servers.nats import NatsServer
from tests.synchronizer.stores.nats.test_store import answer_within
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

LONG = PATIENCE_SECONDS
RIGHTS = rights_of("readergroup")
#: Each right, and what is left without it.
WITHOUT = {right: Rights(tuple(r for r in RIGHTS.publish if r != right), RIGHTS.subscribe) for right in RIGHTS.publish}
WITHOUT |= {
    f"subscribe {right}": Rights(RIGHTS.publish, tuple(r for r in RIGHTS.subscribe if r != right))
    for right in RIGHTS.subscribe
}


def account(name: str, rights: Rights) -> str:
    """An account with one user, who may do this. It is small, so that its limit tears appends."""
    publish, subscribe = (", ".join(f'"{right}"' for right in each) for each in rights)
    permissions = f"publish: [{publish}], subscribe: [{subscribe}]"
    user = f"{{ user: {name}, password: secret, permissions: {{ {permissions} }} }}"
    return f"{name}: {{ jetstream: {{ max_mem: 1MB, max_file: 1MB }}, users: [ {user} ] }}"


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """A server with an account for each right that is left out, and for all of them."""
    accounts = [account(f"a{number}", rights) for number, rights in enumerate([*WITHOUT.values(), RIGHTS])]
    settings = ["accounts {", *accounts, "}", "max_payload: 8192"]
    with NatsServer(settings=settings) as server:
        yield server


def url_of(server: NatsServer, number: int, timeout_seconds: float = LONG) -> str:
    return server.url.replace("//", f"//a{number}:secret@") + f"?timeout_seconds={timeout_seconds}"


def test_everything_works_with_these_rights(server: NatsServer) -> None:
    before = len(violations(server))
    url = url_of(server, len(WITHOUT), timeout_seconds=LONG)
    with NatsStore(url) as store, NatsStore(url) as other:
        use(store)
        contend(store, other)
        answer_within(store, 2.0)
        assert tear(store)
    assert violations(server)[before:] == []


@pytest.mark.parametrize("right", WITHOUT)
def test_without_one_right_something_fails_at_once_and_names_it(
    server: NatsServer, right: str, caplog: pytest.LogCaptureFixture
) -> None:
    number = [*WITHOUT].index(right)
    tears = ".MSG.DELETE.readergroup" in right and "line" not in right
    said = ""
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        try:
            url = url_of(server, number, timeout_seconds=LONG)
            with NatsStore(url) as store, NatsStore(url) as other:
                use(store)
                contend(store, other)
                if tears:
                    began = time.monotonic()
                    answer_within(store, 2.0)
                    tear(store)
        except StorePermissionError as error:
            said = str(error)
    missing = right.removeprefix("subscribe ")
    action = "subscribe to" if "subscribe" in right else "publish to"
    sentence = f"may not {action} {missing!r}"
    assert sentence in said or (not said and sentence in caplog.text)
    assert sentence in caplog.text  # also where somebody goes on without it
    assert time.monotonic() - began < LONG


def without(*kinds: str) -> list[str]:
    """The settings of a server with one user, who may publish to all subjects but these of its store."""
    rights = [right for right in RIGHTS.publish if right not in [f"readergroup.{kind}.>" for kind in kinds]]
    publish, subscribe = (", ".join(f'"{right}"' for right in each) for each in (rights, RIGHTS.subscribe))
    user = f"{{ user: shop, password: secret, permissions: {{ publish: [{publish}], subscribe: [{subscribe}] }} }}"
    return [f"authorization {{ users: [ {user} ] }}"]


@pytest.fixture
def changeable() -> Iterator[NatsServer]:
    """A server whose user has all rights, until a test takes one."""
    with NatsServer(settings=without(), credentials="shop:secret") as server:
        yield server


def test_calls_end_at_once_while_a_right_is_missing_and_go_on_when_it_is_granted(changeable: NatsServer) -> None:
    with rg.connect(changeable.url, timeout=LONG) as client:
        client.streams.create("shop/orders")
        group = client.groups.create("billing", streams=["shop/orders"])
        counter = client.counter("orders")
        writer = client.writer("shop/orders")
        with group.reader("r1") as reader:
            changeable.reload(without("d", "a", "g"))
            writer.write(b"x")
            for call in (
                writer.flush,
                lambda: counter.add(1),
                lambda: client.streams.create("shop/returns"),
                lambda: group.configure(max_outstanding_checkpoints=7),
                lambda: client.event_queue("mail").add(b"x"),
            ):
                began = time.monotonic()
                with pytest.raises(StorePermissionError, match="may not publish to 'readergroup"):
                    call()
                assert time.monotonic() - began < LONG / 2
            changeable.reload(without())
            writer.flush()
            event = reader.read(timeout=LONG)
            assert event is not None and event.data == b"x"
            assert counter.add(1) == 1
        writer.close()


def test_of_appends_that_are_refused_at_the_same_time_none_is_certain_not_to_be_stored(changeable: NatsServer) -> None:
    """The server names only the subject: the right may have been revoked after the first of them was stored."""
    with NatsStore(f"{changeable.url}?timeout_seconds={LONG}") as store:
        store.create("s")
        store.append("s", b"first")
        changeable.reload(without("d"))
        with pytest.raises(StorePermissionError):
            store.append("s", b"alone")
        assert store.info("s").length == 5  # by the connection that the server has left after its reload
        changeable.pause()
        try:
            calls = [CallInThread(lambda: store.append("s", b"x")) for _ in range(2)]
            until(lambda: len(store._connection._pending) == 2)
        finally:
            changeable.resume()
        assert [type(call.ended()) for call in calls] == [UnknownOutcome, UnknownOutcome]


def test_reads_that_are_refused_at_the_same_time_all_name_the_right(changeable: NatsServer) -> None:
    with NatsStore(f"{changeable.url}?timeout_seconds={LONG}") as store:
        store.create("s")
        publish = [right for right in RIGHTS.publish if "GET" not in right]
        user = f"{{ user: shop, password: secret, permissions: {{ publish: {json.dumps(publish)} }} }}"
        changeable.reload([f"authorization {{ users: [ {user} ] }}"])
        changeable.pause()
        try:
            calls = [CallInThread(lambda: store.info("s")) for _ in range(2)]
            until(lambda: len(store._connection._pending) == 2)
        finally:
            changeable.resume()
        assert [type(call.ended()) for call in calls] == [StorePermissionError, StorePermissionError]


def test_a_server_that_is_slow_to_refuse_is_waited_for() -> None:
    with slow_server() as url, pytest.raises(StorePermissionError, match=r"may not subscribe to '_INBOX\.>'"):
        open_store(f"{url}?timeout_seconds={LONG}")


@contextmanager
def slow_server() -> Iterator[str]:
    """The address of a server that permits no subscription, and takes its time between two lines that it reads."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=answer, args=[client], daemon=True).start()

    def answer(client: socket.socket) -> None:
        info = {"server_id": "slow", "version": "2.12.0", "headers": True, "jetstream": True, "max_payload": 8192}
        with client, suppress(OSError):
            client.sendall(b"INFO " + json.dumps(info).encode() + b"\r\n")
            for line in client.makefile("rb"):
                if line.startswith(b"PING"):
                    client.sendall(b"PONG\r\n")
                elif line.startswith(b"SUB"):
                    subject = line.split()[1]
                    client.sendall(b"-ERR 'Permissions Violation for Subscription to \"%b\"'\r\n" % subject)
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"nats://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def use(store: SegmentStore) -> None:
    """Every verb, and what stands behind some of them: long names, many attributes, parts, removals."""
    for name in ("shop/orders/0", "x" * MAX_NAME_LENGTH):
        store.create(name)
        store.append(name, b"abc", attributes={"a": AttributeChange(None, b"1"), "b": AttributeChange(None, b"1")})
        store.append(name, b"", attributes={"a": AttributeChange(b"1", b"2"), "b": AttributeChange(b"1", None)})
        store.append(name, b"def", expected_offset=3)
        store.append(name, bytes(20_000))
        assert len(store.read(name, 0, 100_000)) == 20_006
        assert store.attributes(name) == {"a": b"2"}
        assert store.wait({name: 0}, 1.0)
        assert not store.wait({name: 20_006}, 0.01)
        store.truncate(name, 4)
        assert name in store.list()
        store.seal(name)
        store.delete(name)


def contend(store: SegmentStore, other: SegmentStore) -> None:
    """One has the lock, another waits for it and gets it, a third gives up."""
    results: list[bool] = []
    failures: list[BaseException] = []

    def take() -> None:
        try:
            with other.fair_lock("lock", LONG) as is_held:
                results.append(is_held)
        except StoreUnavailableError as error:
            failures.append(error)

    assert isinstance(other, NatsStore)
    thread = threading.Thread(target=take)
    try:
        with store.fair_lock("lock", LONG) as is_held:
            assert is_held
            thread.start()
            until(lambda: bool(other._fair_lock._tickets) or not thread.is_alive())
            with store.fair_lock("lock", 0.05) as is_held_twice:
                assert not is_held_twice or failures
    finally:  # also where the third is refused: the caller closes the store that the other uses
        if thread.ident is not None:
            thread.join(LONG)
    if failures:
        raise failures[0]
    assert results == [True]


def tear(store: SegmentStore) -> bool:
    """Have the account's limit tear an append, repair the segment and go on."""
    store.create("torn")
    whole = 0
    while isinstance(result := _append(store, 100_000), Appended):
        whole += 1
        assert whole < 20
    assert isinstance(result, UnknownOutcome | StoreUnavailableError)
    assert store.info("torn").length == whole * 100_000
    store.truncate("torn", 300_000)
    assert store.append("torn", b"more", expected_offset=whole * 100_000) == Appended(
        whole * 100_000, whole * 100_000 + 4
    )
    return True


def _append(store: SegmentStore, size: int) -> object:
    try:
        return store.append("torn", bytes(size))
    except StoreUnavailableError as error:
        return error


def violations(server: NatsServer) -> list[str]:
    return [line for line in server.log().splitlines() if "Violation" in line]


@pytest.fixture(scope="module")
def urls_with_least_rights() -> Iterator[Iterator[str]]:
    """Empty stores, one after the other, of a user who may do nothing else than use them."""
    names = [f"store-{number}" for number in range(300)]
    rights = [rights_of(name) for name in names]
    publish = ", ".join(f'"{right}"' for right in {right: None for each in rights for right in each.publish})
    subscribe = ", ".join(f'"{right}"' for right in {right: None for each in rights for right in each.subscribe})
    permissions = f"publish: [{publish}], subscribe: [{subscribe}]"
    users = f"users: [ {{ user: shop, password: secret, permissions: {{ {permissions} }} }} ]"
    with NatsServer(settings=[f"authorization {{ {users} }}"], credentials="shop:secret") as server:
        yield (f"{server.url}?stream={name}" for name in names)
        assert violations(server) == []


@pytest.mark.broad
class TestWithTheLeastRights(SegmentStoreConformance):
    """The suite of all stores."""

    @pytest.fixture
    def address(self, urls_with_least_rights: Iterator[str]) -> str:
        return next(urls_with_least_rights)

    @pytest.fixture
    def store(self, address: str) -> Iterator[SegmentStore]:
        with open_store(address) as store:
            yield store


# Where the list is printed


@pytest.mark.parametrize("page", ["docs/operations.md", "deploy/nats.conf"])
def test_the_printed_rights_are_these(page: str) -> None:
    text = (ROOT / page).read_text()
    publish, subscribe = (
        re.findall(r'"([^"]+)"', text[text.index(f"{action}: [") :].partition("]")[0])
        for action in ("publish", "subscribe")
    )
    assert Rights(tuple(publish), tuple(subscribe)) == RIGHTS


def test_a_right_covers_what_is_below_it_and_nothing_else() -> None:
    assert right_for("readergroup.d.x", RIGHTS.publish) == "readergroup.d.>"
    assert right_for("readergroup.dx", RIGHTS.publish) == "readergroup.dx"
    assert right_for("$js.api.stream.msg.delete.readergroup", RIGHTS.publish) == "$JS.API.STREAM.MSG.DELETE.readergroup"

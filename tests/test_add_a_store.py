"""The sample that adds a store on Valkey: it keeps the contract, groups run on it, and its server may fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import readergroup as rg
from synchronizer import Appended, AttributeChange, Conflict, SegmentStore, UnknownOutcome, open_store
from tests.distributions import install_sample
from tests.places import SAMPLES
from tests.servers.unavailable import ServerUnavailable
from tests.servers.valkey import ValkeyServer
from tests.waiting import PATIENCE_SECONDS, until

SAMPLE = SAMPLES / "add_a_store"
LONG = PATIENCE_SECONDS

READER = """
import sys
import readergroup as rg

url, reader_id = sys.argv[1:]
with rg.connect(url) as client, client.groups.get("billing").reader(reader_id) as reader:
    for event in reader:
        print(event.data.decode(), flush=True)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_sample(tmp_path_factory.mktemp("installed"), SAMPLE)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """A server that tests may stop and kill; they leave it running."""
    try:
        started = ValkeyServer().start()
    except ServerUnavailable as reason:
        pytest.skip(f"no Valkey server here: {reason}")
    with started:
        yield started


@pytest.fixture
def url(server: ValkeyServer, installed: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty store."""
    monkeypatch.syspath_prepend(installed)
    return f"{server.url}?prefix={uuid.uuid4()}"


@pytest.fixture
def store(url: str) -> Iterator[SegmentStore]:
    with open_store(url) as store:
        store.create("s")
        yield store


def test_it_is_small() -> None:
    lines = [line.strip() for line in (SAMPLE / "valkey_store.py").read_text().splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) < 200


@pytest.mark.usefixtures("server")  # where none can be had, this is skipped
@pytest.mark.parametrize("named", ["append", pytest.param("test", marks=pytest.mark.broad)])
def test_it_passes_the_suite_of_the_sdk(installed: Path, named: str) -> None:
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    with ValkeyServer(sync="none") as fast:
        done = subprocess.run(
            [*pytest_command, str(SAMPLE / "test_valkey_store.py"), "-k", named],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=SAMPLE,
            env={**os.environ, "PYTHONPATH": str(installed), "VALKEY_URL": fast.url},
        )
    assert done.returncode == 0, done.stdout


def test_two_reader_processes_share_a_stream(url: str, installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    with rg.connect(url) as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(4))
        group = client.groups.create("billing", streams=["shop/orders"], reader_timeout_seconds=60)
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, url, reader_id], env=environment, stdout=subprocess.PIPE, text=True
            )
            for reader_id in ("reader-1", "reader-2")
        ]
        try:
            until(lambda: sorted(len(owned) for owned in group.distribution().readers.values()) == [2, 2])
            written = [b"order %d" % number for number in range(2000)]
            with client.writer("shop/orders") as writer:
                for order in written:
                    writer.write(order, routing_key=order.decode())
            client.streams.scale("shop/orders", split=[0])
            client.streams.seal("shop/orders")
            read = [reader.communicate(timeout=LONG)[0].splitlines() for reader in readers]
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
    assert all(read)
    assert sorted(read[0] + read[1]) == sorted(order.decode() for order in written)


def test_a_password_is_not_shown(url: str) -> None:
    with pytest.raises(rg.StoreUnavailableError) as raised:
        open_store(url.replace("://", "://me:secret@"))
    assert "secret" not in str(raised.value)


def test_an_option_that_nobody_knows_is_refused(url: str) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="replicas"):
        open_store(f"{url}&replicas=3")


def test_a_store_that_must_exist_is_not_made(url: str) -> None:
    with pytest.raises(rg.NotFoundError):
        open_store(url, must_exist=True)
    with open_store(url) as store:
        store.create("s")
    with open_store(url, must_exist=True) as store:
        assert list(store.list()) == ["s"]


def test_an_append_that_no_server_took_had_no_effect(server: ValkeyServer, store: SegmentStore) -> None:
    server.kill()
    try:
        for call in (lambda: store.append("s", b"lost"), lambda: store.wait({"s": 0}, 1)):
            with pytest.raises(rg.StoreUnavailableError):
                call()
    finally:
        server.start()
    assert store.append("s", b"data", expected_offset=0) == Appended(0, 4)  # nor is the script in the server now


def test_an_append_whose_answer_was_lost_is_unknown_and_a_further_one_settles_it(
    server: ValkeyServer, store: SegmentStore, url: str
) -> None:
    with open_hastily(url) as hasty:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            outcome = hasty.append("s", b"data", expected_offset=0, attributes={"a": AttributeChange(None, b"1")})
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert isinstance(outcome, UnknownOutcome)
    until(lambda: store.info("s").length == 4)
    again = store.append("s", b"data", expected_offset=0, attributes={"a": AttributeChange(None, b"1")})
    assert again == Conflict(4, b"data", {"a": b"1"})


def test_acknowledged_appends_survive_a_kill_of_the_server(server: ValkeyServer, store: SegmentStore) -> None:
    acknowledged = 0

    def append_until_killed() -> None:
        nonlocal acknowledged
        while isinstance(store.append("s", b"12345678", expected_offset=acknowledged), Appended):
            acknowledged += 8

    with ThreadPoolExecutor(1) as threads:
        appending = threads.submit(append_until_killed)
        until(lambda: acknowledged > 800 or appending.done())
        server.kill()
        appending.exception(LONG)
    server.start()
    assert store.info("s").length in (acknowledged, acknowledged + 8)


def test_where_memory_is_full_nothing_is_written_and_truncating_makes_room(
    server: ValkeyServer, store: SegmentStore
) -> None:
    redis = pytest.importorskip("redis").Redis.from_url(server.url.replace("valkey:", "redis:"))
    room = redis.info("memory")["used_memory"] + 4_000_000
    store.append("s", bytes(8_000_000), attributes={"a": AttributeChange(None, b"1"), "b": AttributeChange(None, b"2")})
    store.create("t")
    redis.config_set("maxmemory", room)
    try:
        with pytest.raises(rg.StoreFullError):
            store.append("s", b"more", attributes={"a": AttributeChange(b"1", None), "b": AttributeChange(b"2", b"3")})
        assert store.info("s").length == 8_000_000
        assert store.attributes("s") == {"a": b"1", "b": b"2"}
        assert len(store.read("s", 0, 1000)) == 1000
        store.truncate("s", 8_000_000)
        until(lambda: appends(store, "t"))  # the server frees the buffers of its connections in its own time
        store.delete("s")
    finally:
        redis.config_set("maxmemory", "0")
        redis.close()


def open_hastily(url: str) -> SegmentStore:
    """A store that waits for an answer for a second. On a busy machine that may be too short to open it."""
    while True:
        with suppress(rg.StoreUnavailableError):
            return open_store(f"{url}&socket_timeout=1")


def appends(store: SegmentStore, segment: str) -> bool:
    try:
        return isinstance(store.append(segment, b"more"), Appended)
    except rg.StoreFullError:
        return False

"""`samples/fastapi_app` under uvicorn with two workers: real processes, real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import readergroup as rg
from tests.places import SAMPLES
from tests.waiting import PATIENCE_SECONDS, until

APP = SAMPLES / "fastapi_app"
ORDERS, BILLS = "shop/orders", "shop/bills"


class Server:
    """uvicorn with two workers. At the end of the block it gets SIGTERM, and ends in order."""

    def __init__(self, folder: Path, url: str) -> None:
        self._address = str(folder / "socket")
        self._log = folder / "log"
        self._url = url

    @contextmanager
    def running(self) -> Iterator[None]:
        Path(self._address).unlink(missing_ok=True)
        command = ["uvicorn", "app:app", "--workers", "2", "--uds", self._address, "--timeout-graceful-shutdown", "60"]
        with self._log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=APP,
                env={**os.environ, "READERGROUP_URL": self._url},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            # Both work: an order that arrives before would be billed by one of them alone, and then move.
            with rg.connect(self._url) as client:
                until(lambda: process.poll() is not None or _readers(client) == 2, "both processes read")
                assert process.poll() is None
                client.groups.get("billing").configure(reader_timeout_seconds=60)  # and go on, on a busy machine too
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 0
            with rg.connect(self._url) as client:
                client.groups.get("billing").configure(reader_timeout_seconds=10)  # as the next ones create it
            said = self._log.read_text()
            assert "Traceback" not in said and "ERROR" not in said
            assert said.count("Application shutdown complete.") == 2
            until(lambda: not _alive(process.pid), "its processes have ended")
        except AssertionError as error:
            error.add_note(self._log.read_text())
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_SECONDS)

    def get(self, path: str) -> HTTPResponse:
        return self._ask("GET", path)

    def place(self, order: str) -> int:
        """Send an order over a connection of its own, and return the status of the answer."""
        body = json.dumps({"id": order, "customer": f"customer-{crc32(order.encode()) % 20}", "total": 1})
        with closing(self._ask("POST", "/orders", body)) as answer:
            return answer.status

    def _ask(self, method: str, path: str, body: str | None = None) -> HTTPResponse:
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(PATIENCE_SECONDS)
        connection.sock.connect(self._address)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse()


def _alive(group: int) -> list[str]:
    """What the processes of this group run, without those that wait to be reaped."""
    shown = subprocess.run(["ps", "-A", "-o", "pgid=,state=,args="], capture_output=True, text=True, check=True)
    found = (line.split(None, 2) for line in shown.stdout.splitlines())
    return [args for pgid, state, args in found if int(pgid) == group and not state.startswith("Z")]


def _readers(client: rg.Client) -> int:
    """How many readers have segments."""
    try:
        distribution = client.groups.get("billing").distribution()
    except rg.NotFoundError:
        return 0
    return 0 if distribution.unassigned else sum(bool(each) for each in distribution.readers.values())


def _stored(client: rg.Client, stream: str) -> list[Any]:
    events = (client.batch.read(part, serializer=rg.JsonSerializer()) for part in client.batch.segment_ranges(stream))
    return [event.data for each in events for event in each]


def _next_event(stream: HTTPResponse) -> dict[str, Any]:
    while line := stream.readline():
        if line.startswith(b"data: "):
            found: dict[str, Any] = json.loads(line[len(b"data: ") :])
            return found
    raise AssertionError("the stream has ended")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


def test_two_workers_write_bill_and_notify_and_end_in_order(tmp_path: Path, store: Path) -> None:
    server = Server(tmp_path, f"sqlite:///{store}")
    placed = [f"order-{number}" for number in range(60)]
    with rg.connect(f"sqlite:///{store}") as client:
        with server.running():
            # Durable when the answer is here.
            assert server.place(placed[0]) == 201
            assert [each["id"] for each in _stored(client, ORDERS)] == placed[:1]
            assert [server.place(order) for order in placed[1:]] == [201] * 59
            until(lambda: len(_stored(client, BILLS)) >= len(placed), "all are billed")
            bills = _stored(client, BILLS)
            assert Counter(bill["order"] for bill in bills) == Counter(placed)
            assert len({bill["process"] for bill in bills}) == 2
            assert server.get("/health").status == 200

            # Notifications; each of some streams belongs to one of the two workers.
            streams = [server.get("/segments") for _ in range(4)]
            assert [_next_event(stream)["number_of_segments"] for stream in streams] == [4] * 4
            client.streams.scale(ORDERS, split=[0])
            for stream in streams[:2]:
                while _next_event(stream)["number_of_segments"] != 5:
                    pass

            # The last two hang, and orders arrive, while the workers end.
            ordering = _Ordering(server)
            until(lambda: len(ordering.accepted) >= 10)
        ordering.join()
        streams[0].read()  # to its end: a broken connection would raise
        placed += ordering.accepted
        assert {*placed} <= {each["id"] for each in _stored(client, ORDERS)}
        assert client.groups.get("billing").distribution().readers == {}

        # After the restart nothing is billed again, and nothing is left out.
        with server.running():
            orders = {each["id"] for each in _stored(client, ORDERS)}
            until(lambda: {each["order"] for each in _stored(client, BILLS)} == orders, "all are billed")
        assert set(Counter(bill["order"] for bill in _stored(client, BILLS)).values()) == {1}


class _Ordering:
    """Places orders in a thread until the server takes no more connections."""

    def __init__(self, server: Server) -> None:
        self.accepted: list[str] = []
        self._server = server
        self._thread = threading.Thread(target=self._place)
        self._thread.start()

    def _place(self) -> None:
        number = 0
        while True:
            number += 1
            try:
                status = self._server.place(f"late-{number}")
            except OSError:
                return
            if status == 201:
                self.accepted.append(f"late-{number}")

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()


def test_an_outage_is_answered_with_503_and_passes(tmp_path: Path, store: Path) -> None:
    server = Server(tmp_path, f"sqlite:///{store}")
    with server.running():
        with closing(sqlite3.connect(store, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # nobody else can write
            assert server.place("order-1") == 503
            other.execute("ROLLBACK")
        assert server.place("order-1") == 201
        with rg.connect(f"sqlite:///{store}") as client:
            # The caller sent it again because it did not know: it may be there twice.
            assert {each["id"] for each in _stored(client, ORDERS)} == {"order-1"}


def test_the_end_of_the_application_leaves_no_thread(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APP))
    monkeypatch.setenv("READERGROUP_URL", f"sqlite:///{store}")
    from app import app  # type: ignore[import-not-found]

    before = {*threading.enumerate()}
    handlers = signal.getsignal(signal.SIGTERM)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            assert {*threading.enumerate()} - before

    asyncio.run(live())
    until(lambda: {*threading.enumerate()} <= before, "the threads end")
    assert signal.getsignal(signal.SIGTERM) is handlers
    monkeypatch.delitem(sys.modules, "app")

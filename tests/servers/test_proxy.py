"""The proxy passes on what it is to pass on, and has the faults that it is told to have."""

from __future__ import annotations

import asyncio
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.servers.proxy import TcpProxy
from tests.waiting import until

LONG = 20.0


class Echo(socketserver.ThreadingTCPServer):
    """Answers each request with the same bytes, and remembers them."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        self.heard = b""
        self.connections = 0
        super().__init__(("127.0.0.1", 0), _Answering)


class _Answering(socketserver.BaseRequestHandler):
    server: Echo

    def handle(self) -> None:
        self.server.connections += 1
        try:
            with suppress(ConnectionError):
                while data := self.request.recv(65536):
                    self.server.heard += data
                    self.request.sendall(data)
        finally:
            self.server.connections -= 1


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[TcpProxy]:
    with TcpProxy(echo.server_address[1]) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: TcpProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), LONG) as client:
        assert ask(client, b"hello") == b"hello"
        yield client


def ask(client: socket.socket, request: bytes, *, timeout: float = LONG) -> bytes:
    client.sendall(request)
    client.settimeout(timeout)
    answer = b""
    while len(answer) < len(request):
        data = client.recv(65536)
        if not data:
            raise ConnectionResetError
        answer += data
    return answer


def test_it_passes_on_large_requests_and_answers_as_they_are(client: socket.socket) -> None:
    request = os.urandom(5_000_000)
    sending = threading.Thread(target=client.sendall, args=(request,))
    sending.start()
    answer = b""
    while len(answer) < len(request):
        answer += client.recv(65536)
    sending.join()
    assert answer == request


def test_a_cut_resets_the_connections_and_refuses_new_ones_until_it_heals(
    proxy: TcpProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.cut()
    with pytest.raises(ConnectionError):
        ask(client, b"more")
    with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.1", proxy.port), LONG) as refused:
        ask(refused, b"more")
    until(lambda: echo.connections == 0)
    proxy.heal()
    with socket.create_connection(("127.0.0.1", proxy.port), LONG) as again:
        assert ask(again, b"again") == b"again"
    assert b"more" not in echo.heard


def test_a_reset_leaves_new_connections_alone(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.reset()
    with pytest.raises(ConnectionError):
        ask(client, b"more")
    with socket.create_connection(("127.0.0.1", proxy.port), LONG) as again:
        assert ask(again, b"again") == b"again"


def cut_for_a_moment(proxy: TcpProxy) -> None:
    proxy.cut()
    proxy.heal()


@pytest.mark.parametrize("fault", [TcpProxy.reset, cut_for_a_moment], ids=["reset", "cut for a moment"])
def test_a_connection_that_is_being_opened_is_reset_as_well(
    proxy: TcpProxy, fault: Callable[[TcpProxy], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has it already."""
    open_connection, begun, go_on = asyncio.open_connection, threading.Event(), threading.Event()

    async def open_slowly(*arguments: Any, **options: Any) -> object:
        ends = await open_connection(*arguments, **options)
        begun.set()
        await asyncio.to_thread(go_on.wait, LONG)
        return ends

    monkeypatch.setattr(asyncio, "open_connection", open_slowly)
    with socket.create_connection(("127.0.0.1", proxy.port), LONG) as client:
        assert begun.wait(LONG)
        fault(proxy)
        go_on.set()
        with pytest.raises(ConnectionError):
            ask(client, b"more")


def test_what_is_held_back_on_its_way_to_the_server_arrives_when_it_heals(
    proxy: TcpProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.cut_upstream()
    with pytest.raises(TimeoutError):
        ask(client, b"late", timeout=0.2)
    assert b"late" not in echo.heard
    proxy.heal()
    client.settimeout(LONG)
    assert client.recv(10) == b"late"


def test_what_is_held_back_on_its_way_to_the_client_was_done(
    proxy: TcpProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.cut_downstream()
    with pytest.raises(TimeoutError):
        ask(client, b"done", timeout=0.2)
    until(lambda: b"done" in echo.heard)
    proxy.heal()
    client.settimeout(LONG)
    assert client.recv(10) == b"done"


def test_a_client_that_gives_up_in_a_silence_has_its_request_delivered_afterwards(
    proxy: TcpProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.silence()
    client.sendall(b"late")
    client.close()
    proxy.heal()
    until(lambda: b"late" in echo.heard and echo.connections == 0)


def test_a_delay_takes_its_time_in_each_direction(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.delay(0.1)
    begun = time.monotonic()
    assert ask(client, b"slow") == b"slow"
    assert time.monotonic() - begun >= 0.2
    proxy.heal()
    begun = time.monotonic()
    for _ in range(100):
        ask(client, b"fast")
    assert time.monotonic() - begun < 100 * 0.2


def test_a_lost_answer_is_that_of_a_request_that_was_carried_out(
    proxy: TcpProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.lose_answers(1, to=b"store")
    assert ask(client, b"other") == b"other"
    with pytest.raises(ConnectionError):
        ask(client, b"store this")
    assert b"store this" in echo.heard
    assert proxy.lost_answers == 1
    with socket.create_connection(("127.0.0.1", proxy.port), LONG) as again:
        assert ask(again, b"store that") == b"store that"


def test_it_refuses_connections_while_the_server_is_down(echo: Echo) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it does not listen, and as long as it is there nobody else can
        with TcpProxy(nobody.getsockname()[1]) as proxy, pytest.raises(ConnectionError):
            with socket.create_connection(("127.0.0.1", proxy.port), LONG) as client:
                ask(client, b"hello")


def test_it_leaves_nothing_behind(echo: Echo) -> None:
    files, threads = len(os.listdir("/proc/self/fd")), {*threading.enumerate()}
    with TcpProxy(echo.server_address[1]) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), LONG) as client:
            ask(client, b"hello")
            proxy.silence()
            client.sendall(b"held back")
    # What tests before this one have left may come to its end meanwhile.
    until(lambda: echo.connections == 0 and len(os.listdir("/proc/self/fd")) <= files)
    until(lambda: {*threading.enumerate()} <= threads)

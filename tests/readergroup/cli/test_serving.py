"""``readergroup serve`` as a process of its own."""

from __future__ import annotations

import http.client
import json
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

import readergroup as rg
from readergroup.serve import app as view
from readergroup.serve import server
from tests.command import app
from tests.readergroup.serve.serving import GROUP, STREAM, TOKEN, bearer, filled, served
from tests.waiting import PATIENCE_SECONDS, until


def get(address: str, path: str, headers: Mapping[str, str] = {}) -> tuple[int, str]:
    try:
        with urlopen(Request(address + path, headers=dict(headers)), timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def refusal(url: str, *arguments: str, **environment: str) -> str:
    done = CliRunner(env={"READERGROUP_URL": url, **environment}).invoke(app, ["serve", "--port", "0", *arguments])
    assert isinstance(done.exception, SystemExit) and done.exit_code != 0 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("readergroup: ")
    return done.stderr


@pytest.fixture
def url(tmp_path: Path) -> str:
    address = f"sqlite:///{tmp_path}/shop.db"
    with filled(address):
        return address


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_ends_its_live_views(url: str, number: signal.Signals) -> None:
    with served(url) as (address, process):
        assert urlsplit(address).hostname == "127.0.0.1"
        status, page = get(address, "")
        assert status == 200 and "<title>readergroup</title>" in page
        assert json.loads(get(address, "groups")[1])["groups"][0]["lag"]["events"] == 100
        with urlopen(f"{address}events?group={GROUP}", timeout=PATIENCE_SECONDS) as live:
            until(lambda: live.readline().startswith(b"event: group"))
            process.send_signal(number)
            live.read()  # up to the end
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.communicate() == ("", "")


def test_a_store_in_another_process_is_followed(url: str) -> None:
    with served(url) as (address, _), urlopen(f"{address}events?group={GROUP}", timeout=PATIENCE_SECONDS) as live:
        until(lambda: live.readline().startswith(b"event: group"))
        with rg.connect(url) as client:
            client.streams.scale(STREAM, split=[0])
        until(lambda: b"segments: 5 to read" in live.readline())


def test_elsewhere_than_here_it_needs_a_token(url: str) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "readers.example"):
        assert "needs a token" in refusal(url, "--host", host)
    assert "at least 16 printable" in refusal(url, "--host", "0.0.0.0", READERGROUP_SERVE_TOKEN="hunter2")


@pytest.mark.parametrize("way", ["environment", "file", "option"])
def test_the_token_comes_from_the_environment_a_file_or_an_option(url: str, tmp_path: Path, way: str) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    given = {"environment": [], "file": ["--token-file", str(tmp_path / "token")], "option": ["--token", TOKEN]}[way]
    with served(url, "--host", "0.0.0.0", *given, token=TOKEN if way == "environment" else None) as (address, process):
        address = address.replace("0.0.0.0", "127.0.0.1")
        assert get(address, "groups")[0] == 401
        assert get(address, "groups", bearer())[0] == 200
        assert get(address, "healthz")[0] == get(address, "readyz")[0] == 200
        process.terminate()
        assert TOKEN not in "".join(process.communicate(timeout=PATIENCE_SECONDS))


def test_a_foreign_host_name_is_refused_here_even_with_a_token(url: str) -> None:
    with served(url, token=TOKEN) as (address, _):
        assert get(address, "groups", {**bearer(), "Host": "evil.example"})[0] == 421


def test_what_cannot_work_is_said_in_a_line(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another --port" in refusal(url, "--port", str(taken.getsockname()[1]))
    assert "No such file" in refusal(url, "--token-file", str(tmp_path / "nothing"))
    refusal(f"sqlite:///{tmp_path}/nothing.db")
    refusal("memory://")
    (tmp_path / "empty").touch()
    assert "at least 16 printable" in refusal(url, "--token-file", str(tmp_path / "empty"))
    (tmp_path / "random").write_bytes(bytes(range(128, 256)))
    assert "at least 16 printable" in refusal(url, "--token-file", str(tmp_path / "random"))

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said = refusal(url, "--host", "nowhere.invalid", "--token", TOKEN)
    assert "nowhere.invalid: Name or service not known; choose another --host" in said


def test_an_address_of_another_machine_is_refused_with_the_option_to_change(url: str) -> None:
    assert "choose another --host" in refusal(url, "--host", "192.0.2.1", "--token", TOKEN)
    assert "choose another --host" in refusal(url, "--host", "a..b", "--token", TOKEN)


def test_changes_are_allowed_only_if_asked_for(url: str) -> None:
    for arguments, expected in (([], 403), (["--allow-writes"], 200)):
        with served(url, *arguments, token=TOKEN) as (address, _):
            request = Request(
                f"{address}groups/{GROUP}/reset",
                data=b'{"to": "tail"}',
                headers={**bearer(), "content-type": "application/json"},
            )
            try:
                status = urlopen(request, timeout=PATIENCE_SECONDS).status
            except HTTPError as error:
                status = error.code
            assert status == expected
    with rg.connect(url) as client:
        assert client.groups.get(GROUP).lag().events == 0


#: What clients send that never send the rest.
BEGUN = {
    "nothing": b"",
    "a part of its headers": b"GET /metr",
    "a part of its body": b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 16000\r\n\r\n{",
}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_a_thousand_connections_and_one_that_never_reads_stop_no_other(url: str, begun: bytes) -> None:
    with served(url, "--allow-writes") as (address, _), ExitStack() as opened:
        port = urlsplit(address).port
        assert port is not None
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        for _ in range(1000):
            opened.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(begun)
        stuck = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        stuck.sendall(f"GET /events?group={GROUP} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        failed: list[object] = []

        def ask() -> None:
            for _ in range(20):
                status, _text = get(address, "metrics")
                if status != 200:
                    failed.append(status)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_a_request_that_does_not_arrive_in_time_is_closed(
    url: str, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 1.0)
    with in_this_process(url) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.1)

        def is_closed() -> bool:
            try:
                if begun:
                    connection.sendall(b"x")
                return connection.recv(1000) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        connection.sendall(begun)
        until(is_closed)


def test_a_live_view_and_later_requests_of_a_connection_have_their_own_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 2.0)
    with in_this_process(url) as port, ExitStack() as opened:
        live = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        live.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        opened.callback(connection.close)
        began = answered_at = time.monotonic()
        while time.monotonic() < began + 3:
            try:
                log_in_slowly(connection)
            except (ConnectionError, http.client.HTTPException):
                # On a busy machine the request took too long, or began after the server had closed the idle connection.
                assert time.monotonic() - answered_at > server.REQUEST_SECONDS
                connection.close()
                began = time.monotonic()
            answered_at = time.monotonic()
        live.settimeout(0.1)
        with pytest.raises(TimeoutError):  # it is open, and nothing comes
            while live.recv(100_000):
                pass


def log_in_slowly(connection: http.client.HTTPConnection) -> None:
    connection.request("POST", "/login", headers={"Content-Type": "application/json", "Content-Length": "20"})
    connection.send(b'{"token":')
    threading.Event().wait(0.3)
    connection.send(b'"a wrong"} ')
    answer = connection.getresponse()
    assert (answer.status, "token" in answer.read().decode()) == (401, True)


@contextmanager
def in_this_process(url: str) -> Iterator[int]:
    """A server in a thread: its port."""
    with rg.connect(url) as client, socket.create_server(("127.0.0.1", 0)) as listening:
        running = server.Server(view(client))
        thread = threading.Thread(target=running.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            running.stop()
            thread.join()


def test_garbage_is_answered_and_survived(url: str) -> None:
    with served(url) as (address, _):
        port = urlsplit(address).port
        assert port is not None
        for garbage in (b"\x16\x03\x01\x00\xff", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"a" * 200_000, b"\r\n" * 1000):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
                try:
                    connection.sendall(garbage)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1000)
                except ConnectionError:
                    pass
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        connection.request("BREW", "/groups")
        assert connection.getresponse().status in (403, 405)
        assert get(address, "healthz")[0] == 200

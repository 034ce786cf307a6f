"""Commands that write wait for a server that is away, and lose and repeat nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from click.testing import Result
from typer.testing import CliRunner

import readergroup as rg
from readergroup.cli.session import Interruption
from readergroup.cli.writing import patient_writer
from readergroup.streams.data.block import MAX_EVENT_BYTES
from synchronizer import open_store
from synchronizer.testing import FailingStore
from tests.command import app
from tests.servers.postgres import PostgresServer
from tests.servers.unavailable import ServerUnavailable
from tests.waiting import until

STREAM: Final = "shop/orders"
Refused = list[rg.DeadlineExceededError]


def run_with_pipe(server: PostgresServer, lines: Iterator[str], *command: str) -> Result:
    """Run a command whose FILE is a pipe, into which the lines come one by one."""

    def feed() -> None:
        with open(pipe, "w") as opened:
            for line in lines:
                print(line, file=opened, flush=True)

    with TemporaryDirectory() as folder, ThreadPoolExecutor() as executor:
        pipe = f"{folder}/pipe"
        os.mkfifo(pipe)
        fed = executor.submit(feed)
        done = CliRunner(env={"READERGROUP_URL": server.url}).invoke(app, [*command, pipe])
        fed.result()
    return done


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer()
    except ServerUnavailable as error:
        pytest.skip(str(error))
    with server:
        with rg.connect(server.url) as client:
            client.streams.create(STREAM)
        yield server


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rg, "Client", partial(rg.Client, timeout=0.5))


def refusals(monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], object] = lambda: None) -> Refused:
    """What a method of the writer raises for the store that is away, from now on. After the first time, call `then`."""
    call, refused = getattr(rg.EventWriter, name), Refused()

    def noted(*arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except rg.DeadlineExceededError as error:
            refused.append(error)
            if len(refused) == 1:
                then()
            raise

    monkeypatch.setattr(rg.EventWriter, name, noted)
    return refused


def stored(server: PostgresServer) -> list[bytes]:
    with rg.connect(server.url) as client:
        return [event.data for each in client.batch.segment_ranges(STREAM) for event in client.batch.read(each)]


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize(
    ("command", "line"), [(("write", STREAM), "{}"), (("stream", "import", STREAM), '{{"data": "{}"}}')]
)
def test_a_pipe_waits_for_a_server_that_is_away_and_nothing_is_lost(
    server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: tuple[str, ...],
    line: str,
) -> None:
    writes = refusals(monkeypatch, "write")
    flushes = refusals(monkeypatch, "flush", server.start)

    def lines() -> Iterator[str]:
        yield "before"
        until(lambda: stored(server))
        server.stop()
        yield "buffered"
        until(lambda: "the writer keeps trying" in caplog.text)
        yield "refused once"
        until(lambda: writes)
        yield "last"

    done = run_with_pipe(server, map(line.format, lines()), *command)
    assert done.exit_code == 0, done.stderr
    assert flushes and caplog.text.count("the writer keeps trying") == 1
    assert stored(server) == [b"before", b"buffered", b"refused once", b"last"]


def test_a_wrong_line_is_told_after_those_before_it_are_stored(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, short_timeout: None
) -> None:
    """Their number would be wrong, if they were lost."""
    flushes = refusals(monkeypatch, "flush", server.start)

    def lines() -> Iterator[str]:
        yield '{"k": 1}'
        until(lambda: stored(server))
        server.stop()
        yield '{"k": 2}'
        yield "nonsense"

    done = run_with_pipe(server, lines(), "write", "--key", "k", STREAM)
    assert done.exit_code == 1 and "line 3: " in done.stderr and "the lines before it are stored" in done.stderr
    assert flushes and stored(server) == [b'{"k": 1}', b'{"k": 2}']


def test_an_interrupted_write_waits_no_longer_than_its_timeout() -> None:
    store = FailingStore(open_store("memory://"))
    interruption = Interruption()
    with rg.Client(store, timeout=0.1) as client:
        client.streams.create(STREAM)

        def write() -> None:
            with patient_writer(client, STREAM, MAX_EVENT_BYTES, interruption) as writer:
                store.unavailable = interruption.came = True
                writer.write(b"lost")

        with pytest.raises(rg.DeadlineExceededError, match="closed before all events were stored"):
            write()
        store.unavailable = False

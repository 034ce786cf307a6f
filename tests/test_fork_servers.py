"""gunicorn and Celery, which fork their workers, with the files of docs/howto/fork.md as they are printed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

import pytest

import readergroup as rg
from tests.places import DOCS
from tests.waiting import PATIENCE_SECONDS, until

PAGE = (DOCS / "howto" / "fork.md").read_text()
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.stores(round_robin=True),
    pytest.mark.timeout(600),
]


@pytest.fixture
def folder(tmp_path: Path, shared_store_url: str) -> Path:
    """The files of the page, beside a store with the stream that they write to."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(content)
    with rg.connect(shared_store_url) as client:
        client.streams.create("shop/orders")
        client.groups.create("billing", streams=["shop/orders"])
    return folder


@contextmanager
def running(folder: Path, command: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server that is asked to end at the end of the block, does so in order, and says nothing of an error."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
    except AssertionError:
        print(log.read_text())
        raise
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


@pytest.mark.skipif(find_spec("gunicorn") is None, reason="there is no gunicorn here")
def test_gunicorn(folder: Path, shared_store_url: str) -> None:
    address = str(folder / "socket")
    command = ["gunicorn", "--config", "gunicorn_conf.py", "--workers", "2", "--bind", f"unix:{address}", "web:app"]
    with running(folder, command, {"READERGROUP_URL": shared_store_url}) as process:
        until(lambda: listens(address) or process.poll() is not None)
        orders = [f"/{number}" for number in range(20)]
        assert [ask(address, order) for order in orders[:10]] == [200] * 10
        process.send_signal(signal.SIGHUP)  # new workers, forked by the same process
        assert [ask(address, order) for order in orders[10:]] == [200] * 10
    assert read(shared_store_url, 20) == {order.encode() for order in orders}


@pytest.mark.stores("sqlite")  # on the others the same: what differs between stores is in gunicorn's
@pytest.mark.skipif(find_spec("celery") is None, reason="there is no Celery here")
def test_celery(folder: Path, shared_store_url: str) -> None:
    environment = {"READERGROUP_URL": shared_store_url, "BROKER_URL": "filesystem://"}
    with (folder / "tasks.py").open("a") as file:
        file.write(
            "app.conf.broker_transport_options = "
            "{'data_folder_in': 'queue', 'data_folder_out': 'queue', 'control_folder': 'control'}\n"
        )
    (folder / "queue").mkdir()
    orders = [f"order-{number}" for number in range(20)]
    send = f"import tasks\nfor order in {orders}: tasks.store.delay(order)"
    subprocess.run(
        [sys.executable, "-c", send],
        cwd=folder,
        env={**os.environ, **environment},
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    command = ["celery", "--app", "tasks", "worker", "--concurrency", "2", "--loglevel", "WARNING"]
    with running(folder, command, environment):
        assert read(shared_store_url, 20) == {order.encode() for order in orders}


def listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(address) == 0


def ask(address: str, path: str) -> int:
    connection = HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(PATIENCE_SECONDS)
    connection.sock.connect(address)
    connection.request("GET", path)
    answer = connection.getresponse().status
    connection.close()
    return answer


def read(url: str, events: int) -> set[bytes]:
    with rg.connect(url) as client, client.groups.get("billing").reader("r1") as reader:
        found = (reader.read(timeout=PATIENCE_SECONDS) for _ in range(events))
        return {event.data for event in found if event is not None}

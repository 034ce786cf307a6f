"""An etcd server of the benchmark's own, where the program is installed, and puts through its gateway for HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.servers.guard import Guard
from tests.servers.ports import free_port

_HOST: Final = "127.0.0.1"
_LONG_SECONDS: Final = 30.0


class NoEtcd(Exception):
    """There is no server to compare with, and why."""


@contextmanager
def server(folder: Path) -> Iterator[int]:
    """The port of a new server that keeps its data in ``folder``, and syncs it to the disk before it answers."""
    program = shutil.which("etcd")
    if program is None:
        raise NoEtcd("no etcd to compare with; apt-get install etcd-server")
    port = free_port()
    clients, peers = f"http://{_HOST}:{port}", f"http://{_HOST}:{free_port()}"
    command = [program, "--name=bench", f"--data-dir={folder}/data"]
    command += [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"]
    command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
    command += [f"--initial-cluster=bench={peers}"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    guard = Guard(process.pid)
    try:
        _wait_until_it_serves(process, port, folder / "log")
        yield port
    finally:
        process.kill()
        process.wait()
        guard.dismiss()


def _wait_until_it_serves(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _LONG_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError, NoEtcd), puts(port, "ready") as put:
            put(b"")
            return
        time.sleep(0.01)
    raise NoEtcd(f"etcd does not start here: {log.read_text()[-500:]}")


@contextmanager
def puts(port: int, key: str) -> Iterator[Callable[[bytes], None]]:
    """What puts a value under a key, and returns when it is durable, on one connection."""
    connection = http.client.HTTPConnection(_HOST, port, timeout=_LONG_SECONDS)
    encoded = base64.b64encode(key.encode()).decode()

    def put(value: bytes) -> None:
        body = json.dumps({"key": encoded, "value": base64.b64encode(value).decode()})
        connection.request("POST", "/v3/kv/put", body)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise NoEtcd(f"etcd refused a put: {text!r}")

    try:
        yield put
    finally:
        connection.close()

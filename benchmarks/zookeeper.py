"""A ZooKeeper server of the benchmark's own, from the jars that pyspark brings, and kazoo, its client in Python."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from synchronizer import UnsupportedError
from synchronizer.extras import install_hint
from tests.servers.guard import Guard
from tests.servers.ports import free_port

_HOST: Final = "127.0.0.1"
_MAIN: Final = "org.apache.zookeeper.server.ZooKeeperServerMain"
_LONG_SECONDS: Final = 60.0


class NoZooKeeper(Exception):
    """There is no server to compare with, and why."""


@contextmanager
def server(folder: Path) -> Iterator[Any]:
    """A client of a new server that keeps its data in ``folder``, and syncs it to the disk before it answers."""
    try:
        from kazoo.client import KazooClient
    except ImportError as error:
        raise NoZooKeeper(f"no ZooKeeper to compare with: {error}; {install_hint('dev')}") from error
    jars, port = _jars(), free_port()
    settings = folder / "zoo.cfg"
    settings.write_text(
        f"dataDir={folder}/data\nclientPort={port}\nclientPortAddress={_HOST}\ntickTime=2000\nadmin.enableServer=false\n"
    )
    with open(folder / "log", "wb") as log:
        java = Path(os.environ["JAVA_HOME"], "bin/java") if os.environ.get("JAVA_HOME") else "java"
        command = [java, "-Xmx256m", "-cp", f"{jars}/*", _MAIN, str(settings)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    guard = Guard(process.pid)
    try:
        _wait_until_it_serves(process, port, folder / "log")
        client = KazooClient(hosts=f"{_HOST}:{port}")
        client.start(timeout=_LONG_SECONDS)
        try:
            yield client
        finally:
            client.stop()
            client.close()
    finally:
        process.kill()
        process.wait()
        guard.dismiss()


def _jars() -> Path:
    """The folder of pyspark's jars: Spark brings a ZooKeeper, for masters that stand in for one another."""
    try:
        import pyspark

        from readergroup.spark import check_java

        check_java()
    except (ImportError, UnsupportedError) as error:
        raise NoZooKeeper(f"no ZooKeeper to compare with, which comes with Spark: {error}") from error
    jars = Path(pyspark.__file__).parent / "jars"
    if not list(jars.glob("zookeeper-*.jar")):
        raise NoZooKeeper(f"no ZooKeeper to compare with: this Spark brings none, in {jars}")
    return jars


def _wait_until_it_serves(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _LONG_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        # It listens before it serves, and a client that comes then waits for ten seconds.
        with suppress(OSError), socket.create_connection((_HOST, port), timeout=1) as connection:
            connection.sendall(b"srvr")
            if b"Mode: standalone" in connection.makefile("rb").read():
                return
        time.sleep(0.01)
    raise NoZooKeeper(f"ZooKeeper does not start here: {log.read_text()[-500:]}")

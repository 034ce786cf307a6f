"""A session of Spark Connect does what any other does; its server is one of the test's own, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

import readergroup as rg
from tests.readergroup.spark.streams import STREAM, write
from tests.servers.ports import free_port

SERVER = Path(pyspark.__file__).parent / "sbin" / "start-connect-server.sh"


@pytest.fixture
def remote(java: None, tmp_path: Path) -> Iterator[str]:
    """The address of a server that runs; it has this package, and its clients bring nothing."""
    pytest.importorskip("grpc_status")
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.ui.enabled": "false",
        "spark.local.dir": tmp_path / "spark",
        "spark.sql.warehouse.dir": tmp_path / "warehouse",
    }
    command = [SERVER, "--wait", "--master", "local[2]"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    logs = {"SPARK_LOG_DIR": str(tmp_path / "logs"), "SPARK_PID_DIR": str(tmp_path)}
    with (tmp_path / "server.txt").open("w") as output:
        server = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **logs},
            start_new_session=True,
        )
        try:
            yield f"sc://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, 9)
            server.wait()


def test_a_client_reads_writes_follows_and_copies(remote: str, url: str, client: rg.Client, tmp_path: Path) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    for stream in ("shop/written", "shop/streamed"):
        client.streams.create(stream)
    write(client, range(300))
    with client.groups.create("billing", streams=[STREAM]).record_notifications() as recording:
        recording.poll()
    driver = [sys.executable, "-m", "tests.readergroup.spark.connect", remote, url, str(tmp_path)]
    done = subprocess.run(driver, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr + (tmp_path / "server.txt").read_text()
    seen = json.loads(done.stdout)
    assert "no stream" in seen.pop("refused")
    assert "segments" in seen.pop("kinds")
    assert seen == {
        "module": "pyspark.sql.connect.session",
        "cores": 2,
        "found": 300,
        "registered": 300,
        "largest": 299,
        "written": 301,
        "ended": True,
        "streamed": 300,
        "told": [300, 0],
        "copied": True,
    }
    assert client.streams.info("archive/orders").sealed

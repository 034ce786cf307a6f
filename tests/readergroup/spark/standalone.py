"""A standalone cluster of Spark on this machine, whose workers have no Python package but what Spark brings."""

from __future__ import annotations

import os
import subprocess
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pyspark

from tests.servers.ports import free_port

SPARK: Final = Path(pyspark.__file__).parent
WORKERS: Final = 2


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Provide the address of a master with two workers of a core each; all of them end with the block."""
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    java = {name: os.environ[name] for name in ("JAVA_HOME", "JAVA_TOOL_OPTIONS") if name in os.environ}
    bare = folder / "bare"  # its python3 has none of the packages
    venv.create(bare, symlinks=True)
    path = {"PATH": f"{bare / 'bin'}:/usr/bin:/bin"}
    environment = {**path, **java, "SPARK_HOME": str(SPARK), "SPARK_LOCAL_IP": "127.0.0.1"}

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        of_it = folder / name.rpartition(".")[2]
        of_it = of_it.with_name(f"{of_it.name}-{len(list(folder.iterdir()))}")
        of_it.mkdir()
        command = [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
        with (of_it / "log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--webui-port", "0", *arguments],
                cwd=of_it,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    with ExitStack() as ending:
        for name, arguments in (
            ("master.Master", ["--port", str(port)]),
            *[("worker.Worker", ["-c", "1", "-m", "1g", "-d", str(folder), master])] * WORKERS,
        ):
            process = start(name, *arguments)
            ending.callback(process.wait)
            ending.callback(process.terminate)
        _wait_for_workers(folder)
        yield master


def _wait_for_workers(folder: Path) -> None:
    deadline = time.monotonic() + 200
    while sum("Successfully registered" in log.read_text() for log in folder.glob("Worker-*/log")) < WORKERS:
        assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in folder.glob("*/log")]
        time.sleep(0.1)

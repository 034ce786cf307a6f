from __future__ import annotations

import io
import os
import socket
import sys
from pathlib import Path

import pytest

from readergroup.spark import connection
from readergroup.spark.connection import quiet, widen_pipe


def test_the_pipe_to_java_takes_what_one_batch_has_and_other_files_are_left_alone(tmp_path: Path) -> None:
    def room(of: socket.socket) -> int:
        return of.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    here, java = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, java, socket.socket() as unconnected, socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as network, (tmp_path / "file").open("w"):
            before = [room(each) for each in (here, unconnected, server, network)]
            widen_pipe.__wrapped__()
            after = [room(each) for each in (here, unconnected, server, network)]
    limit = Path("/proc/sys/net/core/wmem_max")
    if limit.exists() and 2 * int(limit.read_text()) <= before[0]:
        pytest.skip("this system gives no more")
    assert after[0] > before[0]
    assert after[1:] == before[1:]


def test_a_read_that_spark_cuts_off_writes_to_nowhere_and_leaves_other_connections_alone() -> None:
    here, java = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    store, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, store, server:
        assert list(quiet(iter([1, 2]))) == [1, 2]
        cut_off = quiet(iter([1, 2]))
        next(cut_off)
        java.close()
        with pytest.raises(BrokenPipeError):
            here.send(b"the second batch")
        cut_off.close()
        os.write(here.fileno(), b"what the worker still has to say")
        store.send(b"a query")
        assert server.recv(100) == b"a query"


def test_a_worker_prints_all_but_that_its_last_flush_found_the_pipe_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "PySpark daemon failed to flush the output to the worker process:\nTraceback\n"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    connection._leave_out_hang_ups.__wrapped__()
    print("before", file=sys.stderr)
    print(f"{told}BrokenPipeError: [Errno 32] Broken pipe\n", file=sys.stderr)
    print(f"{told}OSError: [Errno 28] No space left on device", file=sys.stderr)
    print("", file=sys.stderr)
    assert sys.stderr.getvalue() == f"before\n{told}OSError: [Errno 28] No space left on device\n\n"

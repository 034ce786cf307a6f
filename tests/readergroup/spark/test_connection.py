from __future__ import annotations

import socket
from pathlib import Path

import pytest

from readergroup.spark.connection import widen_pipe


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

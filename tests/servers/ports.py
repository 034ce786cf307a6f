"""Where a server of the tests listens."""

from __future__ import annotations

import os
import random
import re
import socket
from contextlib import suppress
from pathlib import Path

_HOST = "127.0.0.1"
_RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Not seeded by a test: two processes must not draw the same ports.
_CHANCE = random.SystemRandom()
_given: set[int] = set()
#: Each process of a run draws its ports from one of this many parts. So no other one takes the port of a server that
#: does not listen yet, or was stopped for a while. From the sixteenth process on, two share a part.
_PARTS = 16
_NUMBER_OF_PROCESS = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))


def free_port() -> int:
    """A port of the loopback interface that nobody had a moment ago, another one at each call.

    It is one that no connection is given as its own, where there are such ports: else one may take it before the server
    has started or while it starts again, even that of a client of the server, which then is connected to itself.
    """
    for _ in range(100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((_HOST, _CHANCE.choice(_servers_own())))
            port = int(probe.getsockname()[1])
            if port not in _given:
                _given.add(port)
                return port
    raise OSError("there is no free port")


def _servers_own() -> range:
    """The ports below those that the system gives to connections, or any (0) where these begin too low."""
    try:
        first = int(_RANGE_OF_CONNECTIONS.read_text().split()[0])
    except OSError:
        first = 0
    if first <= 12_000:
        return range(1)
    part = 1 + int(_NUMBER_OF_PROCESS[1]) % (_PARTS - 1) if _NUMBER_OF_PROCESS else 0
    return range(10_000 + part, first, _PARTS)

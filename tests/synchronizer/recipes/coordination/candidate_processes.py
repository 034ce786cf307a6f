"""Candidates in processes of their own, and a sink outside of the product that is written to by whoever leads."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import readergroup as rg

NAME = "ship"


class Write(NamedTuple):
    """What a leader sent to the sink. Times are of the machine's monotonic clock, which its processes share."""

    candidate: str
    token: int
    #: The check passed between these two.
    from_time: float
    to_time: float


class Sink:
    """Takes a write if no greater token came before. The file keeps all that was sent, in the order of its coming.

    It has no lock: a process that is stopped must not stop the others here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, write: Write) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, json.dumps(write).encode() + b"\n")
        finally:
            os.close(file)

    @property
    def sent(self) -> list[Write]:
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        return [Write(*json.loads(line)) for line in lines]

    @property
    def accepted(self) -> list[Write]:
        greatest, accepted = 0, []
        for write in self.sent:
            if write.token >= greatest:
                greatest = write.token
                accepted.append(write)
        return accepted

    @property
    def leader(self) -> str | None:
        """Whose write was accepted last."""
        accepted = self.accepted
        return accepted[-1].candidate if accepted else None


def lead(connection: Connection, url: str, candidate_id: str, sink: Path, timeout_seconds: float) -> None:
    """Campaign, write to the sink as long as this is the leader, and campaign again."""
    never = threading.Event()
    with rg.connect(url) as client:
        election = client.leader_election(NAME, candidate_id, member_timeout_seconds=timeout_seconds)
        connection.send("ready")
        while not connection.poll():
            try:
                if election.campaign(timeout=60):
                    while not connection.poll():
                        from_time = time.monotonic()
                        token = election.fencing_token
                        Sink(sink).send(Write(candidate_id, token, from_time, time.monotonic()))
                        never.wait(0.01)
            except rg.LeaseLostError:
                pass
    connection.send("closed")


def check_and_write_late(
    connection: Connection, url: str, candidate_id: str, sink: Path, timeout_seconds: float
) -> None:
    """Be elected, check, say so, and write when told, whatever has happened since; then answer what a check says."""
    with rg.connect(url) as client:
        election = client.leader_election(NAME, candidate_id, member_timeout_seconds=timeout_seconds)
        write = _checked_write(election, candidate_id)
        connection.send("checked")
        connection.recv()
        Sink(sink).send(write)
        try:  # it may have been elected again
            connection.send("leads" if election.fencing_token == write.token else "lost")
        except rg.LeaseLostError:
            connection.send("lost")
        connection.recv()


def _checked_write(election: rg.LeaderElection, candidate_id: str) -> Write:
    """Campaign until a check passes: a lease that is as short as in a test may expire before it."""
    while True:
        election.campaign(timeout=60)
        now = time.monotonic()
        with suppress(rg.LeaseLostError):
            return Write(candidate_id, election.fencing_token, now, time.monotonic())

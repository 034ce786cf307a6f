"""A leader is paused for longer than its lease. Another candidate leads, and the late write is refused."""

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


class Ledger:
    """A ledger that only the leader may write to. It refuses a token smaller than one it has seen."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._greatest_token = 0

    def write(self, line: str, fencing_token: int) -> bool:
        if fencing_token < self._greatest_token:
            return False
        self._greatest_token = fencing_token
        self.lines.append(line)
        return True


def lead(url: str, name: str, ledger: Connection) -> None:
    """Get elected, and write a line. Anything may happen between a check and the write."""
    with rg.connect(url) as client:
        election = client.leader_election("ledger", name, member_timeout_seconds=1.0)
        election.campaign(timeout=60)
        token = election.fencing_token
        ledger.send(token)
        ledger.recv()  # anything may pause the process here
        ledger.send((f"written by {name}", token, election.is_leader))
        ledger.recv()


def main(folder: Path) -> None:
    url = f"sqlite:///{folder / 'fleet.db'}"
    ledger = Ledger()
    spawn = multiprocessing.get_context("spawn")

    first, connection = spawn.Pipe()
    leader = spawn.Process(target=lead, args=(url, "first", connection))
    leader.start()
    first_token = first.recv()
    os.kill(leader.pid or 0, signal.SIGSTOP)

    second, connection = spawn.Pipe()
    successor = spawn.Process(target=lead, args=(url, "second", connection))
    successor.start()
    print("the second has a greater token:", second.recv() > first_token)  # after the lease of the first expired
    second.send("go on")
    line, token, leads = second.recv()
    print(f"{line!r}, leads: {leads}, accepted: {ledger.write(line, token)}")

    os.kill(leader.pid or 0, signal.SIGCONT)
    first.send("go on")
    line, token, leads = first.recv()
    print(f"{line!r}, leads: {leads}, accepted: {ledger.write(line, token)}")

    for process, end in ((leader, first), (successor, second)):
        end.send("end")
        process.join(60)
    print(ledger.lines)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))

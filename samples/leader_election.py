"""Two processes want to lead. The leader is paused for longer than its lease; what it writes late is refused."""

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


class Ledger:
    """What only the leader may write to. It refuses a token that is smaller than one it has seen."""

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
    """Be elected, and write a line. Between a check and the writing anything may happen."""
    with rg.connect(url) as client:
        election = client.leader_election("ledger", name, member_timeout_seconds=1.0)
        election.campaign(timeout=60)
        token = election.fencing_token
        ledger.send(token)
        ledger.recv()  # whatever holds this process up
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
    print("the second has a greater token:", second.recv() > first_token)  # when the lease of the first has run out
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

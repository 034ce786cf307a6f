"""Processes join, leave and die. All see the same members, and can tell a dead member from one that left."""

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


def be_there(url: str, name: str, dies: bool) -> None:
    with rg.connect(url) as client, client.membership("fleet", name, member_timeout_seconds=1.0):
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    url = f"sqlite:///{folder / 'fleet.db'}"
    with rg.connect(url) as client, client.membership("fleet", "harbour", member_timeout_seconds=1.0) as harbour:
        gone = threading.Semaphore(0)

        @harbour.on_joined
        def joined(member: str) -> None:
            print(f"{member} has joined")

        @harbour.on_left
        def left(member: str) -> None:
            print(f"{member} has left")
            gone.release()

        @harbour.on_dead
        def dead(member: str) -> None:
            print(f"{member} is dead")
            gone.release()

        spawn = multiprocessing.get_context("spawn")
        for name, dies in (("careful", False), ("reckless", True)):
            ship = spawn.Process(target=be_there, args=(url, name, dies))
            ship.start()
            ship.join(60)
            gone.acquire(timeout=60)
        print("still there:", *harbour.members())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))

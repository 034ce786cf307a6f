"""Open the shop, kill its processes at random, and see whether the books balance.

python -m samples.shop
python -m samples.shop --seconds 600 --store postgresql://user@127.0.0.1/empty
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp

from sqlalchemy import Engine, func, select

from . import ledger
from .picture import Life, draw
from .shop import INVOICES, ORDERS, Shop, invoice_orders, orders, place_orders, prepare, relay_events

#: What the processes do, and how many do it.
JOBS = (("application", place_orders, 2), ("relay", relay_events, 2), ("invoicing", invoice_orders, 3))
PEACE_SECONDS = (0.2, 1.0)
#: On a slow machine the shop stays open for longer.
FEWEST_KILLS = 6
LONG_SECONDS = 120.0

# Processes are forked by one that has imported everything, so that one that was killed is soon replaced.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([place_orders.__module__])


class Worker:
    """A process of the shop, and the one that replaces it when it is killed."""

    def __init__(self, name: str, job: Callable[[Shop], None], shop: Shop) -> None:
        self.name = name
        self.lives: list[Life] = []
        self._job = job
        self._shop = shop
        self.start()

    def start(self) -> None:
        self._began = time.time()
        self._process = context.Process(target=self._job, args=(self._shop,), daemon=True)
        self._process.start()

    def kill(self) -> None:
        if self._process.exitcode is not None:
            sys.exit(f"{self.name} has ended with {self._process.exitcode}")
        self._process.kill()
        self._end(was_killed=True)

    def end(self) -> None:
        self._process.terminate()
        self.wait()

    def wait(self) -> None:
        self._end(was_killed=False)

    def _end(self, *, was_killed: bool) -> None:
        self._process.join(LONG_SECONDS)
        if self._process.exitcode is None:
            sys.exit(f"{self.name} does not end")
        self.lives.append(Life(self.name, self._began, time.time(), was_killed))


def run(shop: Shop, seconds: float) -> Sequence[Life]:
    """Let the shop work while its processes are killed, then let it finish; return the lives of its processes."""
    end = time.monotonic() + seconds
    workers = {
        job: [Worker(f"{job} {number}", work, shop) for number in range(1, count + 1)] for job, work, count in JOBS
    }
    with shop.open() as (client, engine, outbox):
        for kills, job in enumerate(itertools.cycle(workers)):
            leave_in_peace(engine)
            if kills >= FEWEST_KILLS and time.monotonic() > end:
                break
            victim = random.choice(workers[job])
            print("kill -9", victim.name, flush=True)
            victim.kill()
            victim.start()
        for worker in workers["application"]:
            worker.end()
        until(lambda: ORDERS not in outbox.lag().streams)
        client.streams.seal(ORDERS)
        for worker in workers["invoicing"]:
            worker.wait()
        until(lambda: INVOICES not in outbox.lag().streams)
    for worker in workers["relay"]:
        worker.end()
    return [life for each in workers.values() for worker in each for life in worker.lives]


def leave_in_peace(engine: Engine) -> None:
    """Wait for a random time, and until there is another order."""
    before = count_orders(engine)
    time.sleep(random.uniform(*PEACE_SECONDS))
    until(lambda: count_orders(engine) > before)


def count_orders(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(orders)) or 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"the shop did not finish its work in {LONG_SECONDS:g} s")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m samples.shop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where files go (default: a new folder)")
    parser.add_argument("--seconds", type=float, default=60, help="how long the shop is open (default: %(default)s)")
    parser.add_argument("--store", default="sqlite", help="sqlite, or the address of an empty PostgreSQL database")
    arguments = parser.parse_args()
    folder = (arguments.folder or Path(mkdtemp())).absolute()
    folder.mkdir(exist_ok=True)
    if arguments.store == "sqlite":
        shop = Shop(f"sqlite:///{folder}/streams.db", f"sqlite:///{folder}/shop.db")
        with closing(sqlite3.connect(folder / "shop.db")) as database:
            database.execute("PRAGMA journal_mode = WAL")
    else:
        shop = Shop(arguments.store, arguments.store.replace("postgresql:", "postgresql+psycopg:", 1))
    prepare(shop)
    lives = run(shop, arguments.seconds)
    books = ledger.read(shop)
    mistakes = ledger.mistakes(books)
    kills = sum(life.was_killed for life in lives)
    counts = f"{len(books.orders)} orders, {len(books.invoices)} invoices, {len(books.events)} events; {kills} kills"
    print(counts)
    print(*mistakes, sep="\n", end="\n" if mistakes else "")
    verdict = f"the books {'do not balance' if mistakes else 'balance'}"
    draw(lives, books, f"{counts}: {verdict}", folder / "shop.png")
    print("drawn in", folder / "shop.png")
    print(verdict)
    sys.exit(bool(mistakes))


if __name__ == "__main__":
    main()

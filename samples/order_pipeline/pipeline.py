"""Orders go through Spark into Parquet and a second stream, and from there through a reader group into a chart.

    python samples/order_pipeline/pipeline.py [FOLDER] [--kills 3]

A part that dies is started again. ``--kills 3`` kills three parts at random moments. The result is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp

from matplotlib import pyplot
from orders import DEAD, ORDERS, PAYMENTS, REVENUE, SHOPS, truth

import readergroup as rg

HERE = Path(__file__).parent


class Part:
    """A process that is started again until it ends by itself without an error."""

    def __init__(self, log: Path, script: str, *arguments: str) -> None:
        self.log = log
        self.command = [sys.executable, str(HERE / script), *arguments]
        self.name = script.removesuffix(".py")
        self.is_over = False
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, start_new_session=True)

    def look(self) -> None:
        if not self.is_over and (code := self.process.poll()) is not None:
            self.is_over = code == 0
            if code == -signal.SIGKILL:
                self.start()
            elif code:
                raise SystemExit(f"{self.name} failed with exit code {code}; see {self.log}")

    def kill(self) -> None:
        print("kill -9", self.name, flush=True)
        os.killpg(self.process.pid, signal.SIGKILL)  # with Java and the workers of Spark

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def run(client: rg.Client, url: str, folder: Path, kills: int) -> None:
    for stream, segments in {ORDERS: 2, PAYMENTS: 2, REVENUE: 2, DEAD: 1}.items():
        client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(segments))
    client.groups.create("report", streams=[REVENUE], reader_timeout_seconds=2)
    log = folder / "pipeline.log"
    spark = Part(log, "spark_job.py", url, str(folder))
    parts = [spark, Part(log, "report.py", url, str(folder / "report.db")), Part(log, "produce.py", url)]
    kill_at = [time.monotonic() + random.uniform(5, 25) * number for number in range(1, kills + 1)]
    try:
        while not all(part.is_over for part in parts):
            for part in parts:
                part.look()
            if kill_at and time.monotonic() > kill_at[0]:
                kill_at.pop(0)
                victim = random.choice(parts[:2])
                if not victim.is_over:
                    victim.kill()
            if spark.is_over and not client.streams.info(REVENUE).sealed:
                client.streams.seal(REVENUE)  # the report ends when it has read everything
            orders = client.streams.info(ORDERS)
            if orders.epoch == 0 and sum(orders.tail.offsets.values()) > 100_000:
                with suppress(rg.SealedError):
                    client.streams.scale(ORDERS, split=[0])
            time.sleep(0.1)
    finally:
        for part in parts:
            part.end()


def compare(client: rg.Client, folder: Path) -> bool:
    expected = truth()
    with closing(sqlite3.connect(folder / "report.db")) as reported:
        rows = reported.execute("SELECT shop, minute, amount FROM revenue").fetchall()
    revenue = {(shop, datetime.fromisoformat(minute).astimezone(UTC)): amount for shop, minute, amount in rows}
    paid = json.loads((folder / "paid.json").read_text())
    dead = sum(1 for each in client.batch.segment_ranges(DEAD) for _ in client.batch.read(each))
    print(
        f"{len(revenue)} of {len(expected.revenue)} sums of a minute, {paid['orders']} of {expected.paid} paid orders,"
    )
    print(f"{dead} of {expected.dead} damaged orders")
    is_paid_once: bool = paid["rows"] == paid["orders"] == expected.paid
    return revenue == expected.revenue and is_paid_once and dead == expected.dead


def draw(folder: Path) -> Path:
    with closing(sqlite3.connect(folder / "report.db")) as reported:
        rows = reported.execute("SELECT shop, minute, amount FROM revenue ORDER BY minute").fetchall()
    minutes = sorted({minute for _, minute, _ in rows})
    figure, axes = pyplot.subplots(figsize=(8, 4))
    bottom = [0] * len(minutes)
    for shop in SHOPS:
        amounts = {minute: amount for name, minute, amount in rows if name == shop}
        heights = [amounts.get(minute, 0) for minute in minutes]
        axes.bar(range(len(minutes)), heights, bottom=bottom, label=shop)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xlabel("minute")
    axes.set_ylabel("revenue")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(folder / "revenue.png", bbox_inches="tight")
    return folder / "revenue.png"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(mkdtemp())
    folder.mkdir(exist_ok=True)
    url = f"sqlite:///{folder.absolute() / 'shop.db'}"
    with rg.connect(url) as client:
        run(client, url, folder, arguments.kills)
        is_true = compare(client, folder)
    print("drawn in", draw(folder))
    print("equal to the truth:", is_true)
    sys.exit(not is_true)


if __name__ == "__main__":
    main()

"""A windowed count of a stream that is scaled, by drivers that are killed at any moment, is the truth."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import readergroup as rg
from tests.readergroup.spark.streams import STREAM
from tests.readergroup.spark.windows_driver import DELAY, TO_THE_END, WINDOW, start
from tests.waiting import until

_BEGIN = 1_767_225_600.0  # 2026


class Sensors:
    """A stream of events in about the order of their times, most of them under one key, and the truth about it."""

    def __init__(self, client: rg.Client, rng: random.Random) -> None:
        self.truth: Counter[tuple[int, str]] = Counter()
        self._client, self._rng = client, rng
        self._now = _BEGIN
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(3))

    def write(self, events: int) -> None:
        """Write this number of events, five for each second of event time, and flush after twenty."""
        with self._client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
            for number in range(events):
                self._now += 0.2
                key = "hot" if self._rng.random() < 0.6 else f"key-{self._rng.randrange(8)}"
                self._put(writer, self._now - self._rng.uniform(0, DELAY / 2 - 4), key)
                if number % 20 == 19:
                    writer.flush()

    def close_all_windows(self) -> None:
        with self._client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
            self._put(writer, self._now + 100 * DELAY, "last")
        del self.truth[self._window(self._now + 100 * DELAY), "last"]  # its own window stays open

    def scale(self) -> None:
        current = list(self._client.streams.fetch_state(STREAM).current)
        if len(current) < 3 or (len(current) < 8 and self._rng.random() < 0.6):
            self._client.streams.scale(STREAM, split=[self._rng.choice(current)])
        else:
            first = self._rng.randrange(len(current) - 1)
            self._client.streams.scale(STREAM, merge=current[first : first + 2])

    def _put(self, writer: rg.EventWriter[object], at: float, key: str) -> None:
        writer.write({"at": datetime.fromtimestamp(at, UTC).isoformat(), "key": key}, routing_key=key)
        self.truth[self._window(at), key] += 1

    def _window(self, at: float) -> int:
        return int(at // WINDOW) * WINDOW


def live_and_be_killed(url: str, folder: Path, rng: random.Random, sensors: Sensors) -> None:
    """Start a driver, write and scale while it runs, and kill it between two steps of a later batch."""
    command = [sys.executable, "-m", "tests.readergroup.spark.windows_driver", url, str(folder)]
    with open(folder / "errors", "ab") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, start_new_session=True)
    log = folder / "checkpoint" / rng.choice(("offsets", "commits"))
    known = len(list(log.glob("[0-9]*")))
    try:
        for _ in range(rng.randint(1, 3)):
            sensors.write(rng.choice((20, 100, 400)))
            sensors.scale()
        sensors.write(20)
        until(
            lambda: len(list(log.glob("[0-9]*"))) > known or process.poll() is not None, "a batch of the killed driver"
        )
        assert process.poll() is None, (folder / "errors").read_text()[-3000:]
        assert not process.returncode
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(rng.choice((0, 0.05, 0.3, 1)))  # anywhere in the next batches
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.broad  # test_processes kills drivers in every run
@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.timeout(7200))])
def test_windows_of_killed_drivers_have_the_true_counts(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path, kills: int
) -> None:
    folder, rng = tmp_path / "query", random.Random(kills)
    folder.mkdir()
    sensors = Sensors(client, rng)
    for _ in range(kills):
        live_and_be_killed(url, folder, rng, sensors)
    sensors.close_all_windows()
    query = start(spark, url, folder, TO_THE_END)
    assert query.awaitTermination(300)
    dropped = [each["numRowsDroppedByWatermark"] for p in query.recentProgress for each in p["stateOperators"]]
    assert sum(dropped) == 0
    rows = spark.read.parquet(str(folder / "counts")).collect()
    assert len(rows) == len({(row.start, row.key) for row in rows}), "a window that is counted twice"
    assert {(row.start, row.key): row["count"] for row in rows} == dict(sensors.truth)

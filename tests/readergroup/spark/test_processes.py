"""Drivers and executors that are killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyspark
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import readergroup as rg
from tests.readergroup.spark import driver, sink_driver
from tests.readergroup.spark.sink_driver import TARGET
from tests.readergroup.spark.streams import STREAM, assert_in_order, number, recorded, write


def command(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"tests.readergroup.spark.{module}", *map(str, arguments)]


def is_killed(module: str, *arguments: object) -> bool:
    """Start a driver; whether it was killed, and not because it took too long."""
    done = subprocess.run(command(module, *arguments), timeout=300, start_new_session=True, check=False)
    return done.returncode == -signal.SIGKILL


def test_eight_killed_drivers_are_continued_exactly(spark: SparkSession, tmp_path: Path) -> None:
    """Three that read, and beside them five that write: they leave one another time. The ninth goes on to the end."""
    folders = [tmp_path / "reading", tmp_path / "writing"]
    urls = [f"sqlite:///{folder / 'shop.db'}" for folder in folders]
    with ThreadPoolExecutor(2) as pool:
        for done in list(map(pool.submit, (lose_readers, lose_writers), urls, folders)):
            done.result()
    assert driver.start(spark, urls[0], folders[0]).awaitTermination(100)
    assert_in_order(recorded(folders[0]), 500)
    assert sink_driver.start(spark, urls[1], str(folders[1] / "checkpoint")).awaitTermination(100)
    with rg.connect(urls[1]) as client:
        ranges = client.batch.segment_ranges(TARGET)
        assert_in_order([number(event.raw) for each in ranges for event in client.batch.read(each)], 400)


def lose_readers(url: str, folder: Path) -> None:
    folder.mkdir()
    with rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        write(client, range(300))
        client.streams.scale(STREAM, split=[0])
        write(client, range(300, 400))
        assert is_killed("driver", url, folder, "reading", 1)
        assert len(recorded(folder)) == 60
        client.streams.scale(STREAM, merge=[3, 1])
        write(client, range(400, 500))
        assert is_killed("driver", url, folder, "recorded", 3)
        assert is_killed("driver", url, folder, "committed", 5)
        assert (folder / "checkpoint" / "commits" / "5").exists()


def lose_writers(url: str, folder: Path) -> None:
    folder.mkdir()
    checkpoint = folder / "checkpoint"
    with rg.connect(url) as client:
        for stream in (STREAM, TARGET):
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
        write(client, range(400))
        assert is_killed("sink_driver", url, checkpoint, "committed", 0)
        assert not (checkpoint / "commits" / "0").exists()
        client.streams.scale(TARGET, split=[0])
        assert is_killed("sink_driver", url, checkpoint, "staging", 1)
        assert is_killed("sink_driver", url, checkpoint, "decided", 2)
        client.streams.scale(TARGET, merge=[3, 1])
        assert is_killed("sink_driver", url, checkpoint, "staged", 3)
        assert is_killed("sink_driver", url, checkpoint, "committed", 4)
        assert not (checkpoint / "commits" / "4").exists()


def test_of_two_drivers_on_one_checkpoint_one_goes_on_and_nothing_is_read_twice(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    client.streams.create(STREAM)
    write(client, range(1500))
    first = subprocess.Popen(command("driver", url, folder), stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 100
        while len(recorded(folder)) < 300:  # its query has begun, and will go on for a while
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.01)
        second = driver.start(spark, url, folder)
        try:
            second.awaitTermination(200)
            errors = []
        except StreamingQueryException as error:
            errors = [str(error)]
        _, output = first.communicate(timeout=200)
    finally:
        first.kill()
    if first.returncode:
        errors.append(output)
    assert len(errors) == 1 and "oncurrent" in errors[0], errors
    assert_in_order(recorded(folder), 1500)


def test_an_executor_that_is_killed_loses_and_repeats_nothing(
    java: None, client: rg.Client, url: str, tmp_path: Path
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
    write(client, range(400))
    marker = tmp_path / "killed"
    try:
        done = subprocess.run(command("cluster", url, marker), capture_output=True, text=True, timeout=550)
    finally:
        shutil.rmtree(Path(pyspark.__file__).parent / "work", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    assert_in_order(sorted(number(line.encode()) for line in done.stdout.split()), 400)

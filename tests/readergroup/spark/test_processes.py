"""Drivers and executors that are killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyspark
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import readergroup as rg
from tests.readergroup.spark import driver, sink_driver
from tests.readergroup.spark.sink_driver import SECOND_TARGET, TARGET
from tests.readergroup.spark.streams import STREAM, assert_in_order, number, recorded, write
from tests.waiting import PATIENCE_SECONDS, until


def command(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"tests.readergroup.spark.{module}", *map(str, arguments)]


def is_killed(module: str, *arguments: object) -> bool:
    """Start a driver; whether it was killed, and not because it took too long."""
    done = subprocess.run(command(module, *arguments), timeout=300, start_new_session=True, check=False)
    return done.returncode == -signal.SIGKILL


class Losing(NamedTuple):
    """A driver with executors, one of which is killed."""

    process: subprocess.Popen[str]
    marker: Path


@pytest.fixture(scope="module", autouse=True)
def losing_an_executor(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Losing]:
    """Runs beside the other tests here, since all of them mostly wait for Java, and is looked at in the last one."""
    folder = tmp_path_factory.mktemp("cluster")
    url, marker = f"sqlite:///{folder / 'shop.db'}", folder / "killed"
    with rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
        write(client, range(400))
    process = subprocess.Popen(
        command("cluster", url, marker), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Losing(process, marker)
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(Path(pyspark.__file__).parent / "work", ignore_errors=True)


def test_a_driver_that_is_killed_in_a_commit_is_continued_exactly(
    spark: SparkSession, postgres_url: str, tmp_path: Path
) -> None:
    with writing(postgres_url) as client:
        assert is_killed("sink_driver", postgres_url, tmp_path / "checkpoint", "between", 1)
        assert not (tmp_path / "checkpoint" / "commits" / "1").exists()
        for stream in (STREAM, TARGET):
            client.streams.scale(stream, split=[0])
        write(client, range(400, 500))
    assert_written_once(spark, postgres_url, tmp_path, 500)


@pytest.mark.broad
def test_killed_drivers_are_continued_exactly(spark: SparkSession, postgres_url: str, tmp_path: Path) -> None:
    """In a task, in the commit of a batch, and after it, while the streams of both sides are scaled."""
    commits = tmp_path / "checkpoint" / "commits"
    with writing(postgres_url) as client:
        assert is_killed("sink_driver", postgres_url, tmp_path / "checkpoint", "staged", 1)
        client.streams.scale(TARGET, split=[0])
        client.streams.scale(STREAM, split=[0])
        write(client, range(400, 500))
        assert is_killed("sink_driver", postgres_url, tmp_path / "checkpoint", "between", 2)
        assert not (commits / "2").exists()
        client.streams.scale(STREAM, merge=[3, 1])
        write(client, range(500, 600))
        assert is_killed("sink_driver", postgres_url, tmp_path / "checkpoint", "noted", 4)
        assert (commits / "4").exists()
    assert_written_once(spark, postgres_url, tmp_path, 600)


@pytest.mark.broad
def test_killed_drivers_with_a_function_for_each_batch_are_continued_exactly(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "record"
    lose_readers(url, folder)
    assert driver.start(spark, url, folder).awaitTermination(PATIENCE_SECONDS)
    assert_in_order(recorded(folder), 500)


@pytest.mark.broad
def test_drivers_that_are_killed_earlier_in_a_commit_are_continued_exactly(
    spark: SparkSession, nats_url: str, tmp_path: Path
) -> None:
    lose_writers(nats_url, tmp_path)
    assert_written_once(spark, nats_url, tmp_path, 400)


def assert_written_once(spark: SparkSession, url: str, folder: Path, count: int) -> None:
    """Another driver goes on to the end; both streams together have each event once, in order."""
    assert sink_driver.start(spark, url, str(folder / "checkpoint")).awaitTermination(PATIENCE_SECONDS)
    with rg.connect(url) as client:
        ranges = [part for stream in (TARGET, SECOND_TARGET) for part in client.batch.segment_ranges(stream)]
        events = [event for part in ranges for event in client.batch.read(part)]
        assert_in_order([number(event.raw) for event in events], count)
        assert {event.segment.startswith(f"{SECOND_TARGET}/") for event in events} == {True, False}


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
    checkpoint = folder / "checkpoint"
    with writing(url) as client:
        assert is_killed("sink_driver", url, checkpoint, "committed", 0)
        assert not (checkpoint / "commits" / "0").exists()
        client.streams.scale(TARGET, split=[0])
        assert is_killed("sink_driver", url, checkpoint, "staging", 1)
        assert is_killed("sink_driver", url, checkpoint, "decided", 2)
        client.streams.scale(TARGET, merge=[3, 1])


@contextmanager
def writing(url: str) -> Iterator[rg.Client]:
    """A stream to be copied to two others by queries."""
    with rg.connect(url) as client:
        for stream in (STREAM, TARGET, SECOND_TARGET):
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
        write(client, range(400))
        yield client


@pytest.mark.broad  # in every run, test_positions has two queries on one group
def test_of_two_drivers_on_one_checkpoint_one_goes_on_and_nothing_is_read_twice(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    client.streams.create(STREAM)
    write(client, range(480))
    held = command("driver", url, folder, "held", 2)
    first = subprocess.Popen(held, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until(lambda: (folder / "held").exists() or first.poll() is not None, "a batch of both")
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
    assert_in_order(recorded(folder), 480)


def test_an_executor_that_is_killed_loses_and_repeats_nothing(losing_an_executor: Losing) -> None:
    output, error = losing_an_executor.process.communicate(timeout=550)
    assert losing_an_executor.process.returncode == 0, error
    assert losing_an_executor.marker.exists()
    assert_in_order(sorted(number(line.encode()) for line in output.split()), 400)

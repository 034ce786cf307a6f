"""Drivers and executors that are killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyspark
import pytest

import readergroup as rg
from tests.readergroup.spark.sink_driver import TARGET
from tests.readergroup.spark.streams import STREAM, assert_in_order, number, recorded, write

pytestmark = pytest.mark.usefixtures("java")


def command(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"tests.readergroup.spark.{module}", *map(str, arguments)]


def drive(url: str, folder: Path, *arguments: object, module: str = "driver") -> int:
    return subprocess.run(command(module, url, folder, *arguments), timeout=300, start_new_session=True).returncode


def test_eight_killed_drivers_are_continued_exactly(tmp_path: Path) -> None:
    """Three that read, and beside them five that write: they leave one another time."""
    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(lose_drivers, tmp_path / lose_drivers.__name__) for lose_drivers in (reading, writing)
        ]:
            done.result()


def reading(folder: Path) -> None:
    folder.mkdir()
    url = f"sqlite:///{folder / 'shop.db'}"
    with rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        write(client, range(300))
        client.streams.scale(STREAM, split=[0])
        write(client, range(300, 400))
        assert drive(url, folder, "reading", 1) == -signal.SIGKILL
        assert len(recorded(folder)) == 60
        client.streams.scale(STREAM, merge=[3, 1])
        write(client, range(400, 500))
        assert drive(url, folder, "recorded", 3) == -signal.SIGKILL
        assert drive(url, folder, "committed", 5) == -signal.SIGKILL
        assert (folder / "checkpoint" / "commits" / "5").exists()
        assert drive(url, folder) == 0
        assert_in_order(recorded(folder), 500)


def writing(folder: Path) -> None:
    folder.mkdir()
    url = f"sqlite:///{folder / 'shop.db'}"
    killed = partial(drive, url, folder / "checkpoint", module="sink_driver")
    commits = folder / "checkpoint" / "commits"
    with rg.connect(url) as client:
        for stream in (STREAM, TARGET):
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
        write(client, range(400))
        assert killed("committed", 0) == -signal.SIGKILL
        assert not (commits / "0").exists()
        client.streams.scale(TARGET, split=[0])
        assert killed("staging", 1) == -signal.SIGKILL
        assert killed("decided", 2) == -signal.SIGKILL
        client.streams.scale(TARGET, merge=[3, 1])
        assert killed("staged", 3) == -signal.SIGKILL
        assert killed("committed", 4) == -signal.SIGKILL
        assert not (commits / "4").exists()
        assert killed() == 0
        ranges = client.batch.segment_ranges(TARGET)
        assert_in_order([number(event.raw) for each in ranges for event in client.batch.read(each)], 400)


def test_of_two_drivers_on_one_checkpoint_one_goes_on_and_nothing_is_read_twice(
    client: rg.Client, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    client.streams.create(STREAM)
    write(client, range(800))
    drivers = [
        subprocess.Popen(command("driver", url, folder), stderr=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]
    errors = [driver.communicate(timeout=550)[1] for driver in drivers]
    ended = [driver.returncode for driver in drivers]
    assert 0 in ended, errors
    for code, error in zip(ended, errors, strict=True):
        assert code == 0 or "oncurrent" in error
    assert_in_order(recorded(folder), 800)


def test_an_executor_that_is_killed_loses_and_repeats_nothing(client: rg.Client, url: str, tmp_path: Path) -> None:
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

"""What is missing is named, with what to install."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import readergroup as rg
from readergroup.spark import check_java
from readergroup.spark.executors import _cancelled_after
from tests.waiting import PATIENCE_SECONDS


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow", "msgspec"])
def test_without_pyspark_the_import_names_the_extra(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import readergroup; import readergroup.spark"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert "UnsupportedError" in done.stderr
    assert "pip install '.[spark]'" in done.stderr


@pytest.mark.parametrize("timeout", [math.inf, 1e12])
def test_a_job_may_take_as_long_as_one_likes(timeout: float) -> None:
    before = set(threading.enumerate())
    with _cancelled_after(SimpleNamespace(interruptAll=pytest.fail), timeout):
        (timer,) = set(threading.enumerate()) - before
        timer.join(0.2)
        assert timer.is_alive()
    timer.join(PATIENCE_SECONDS)


def java_that_says(folder: Path, text: str) -> None:
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    java.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "version"),
    [('openjdk version "17.0.19" 2026-04-21', 17), ('openjdk version "21" 2023-09-19', 21)],
)
def test_the_java_that_spark_would_start_is_asked_for_its_version(
    text: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java_that_says(tmp_path, text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert check_java() == version
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert check_java() == version


@pytest.mark.parametrize("text", ['java version "1.8.0_392"', 'openjdk version "11.0.2"', "what?"])
def test_an_old_java_is_refused_with_what_to_install(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java_that_says(tmp_path, text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(rg.UnsupportedError, match="openjdk-17-jre-headless"):
        check_java()


def test_no_java_is_told_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(rg.UnsupportedError, match="openjdk-17-jre-headless"):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(rg.UnsupportedError, match="Java 17 or newer"):
        check_java()

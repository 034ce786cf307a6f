"""The demo on Spark, with few lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from typer.testing import CliRunner

from readergroup.demo import on_spark
from readergroup.demo.corpus import of_path
from readergroup.demo.on_spark import Count, module_of, run_on_spark
from tests.command import app


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """1000 lines of three modules, one of which has two files."""
    folder = tmp_path / "input"
    (folder / "pack").mkdir(parents=True)
    for name, lines in (("a.py", 100), ("b.txt", 300), ("pack/one.py", 200), ("pack/two.py", 400)):
        (folder / name).write_bytes(b"".join(b"%d caf\xe9 \xff_x \n" % number for number in range(lines)))
    return folder


@pytest.fixture
def shared(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo takes the session of the tests."""

    @contextmanager
    def session(folder: Path, console: Console) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(on_spark, "_session", session)


@pytest.mark.usefixtures("shared")
def test_words_are_counted_at_once_and_while_the_stream_grows(files: Path, tmp_path: Path) -> None:
    outcome = run_on_spark(of_path(files), tmp_path, Console(quiet=True))
    assert outcome.truth == {"a": Count(100, 300), "b.txt": Count(300, 900), "pack": Count(600, 1800)}
    assert outcome.whole == outcome.growing == outcome.truth
    assert not outcome.differences
    assert [each.title for each in outcome.story.happenings] == ["split", "merge"]
    assert outcome.batches >= 4
    assert outcome.picture.read_bytes().startswith(b"\x89PNG")


def test_what_was_counted_wrong_makes_the_demo_fail(
    files: Path, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def session(folder: Path, console: Console) -> Iterator[SparkSession]:
        with (files / "a.py").open("ab") as file:  # its words are counted by now
            file.write(b"one more\n")
        yield spark

    monkeypatch.setattr(on_spark, "_session", session)
    result = CliRunner().invoke(app, ["demo", "--spark", str(files), "--output", str(tmp_path / "output")])
    assert result.exit_code == 1
    for source in ("the whole stream", "the stream that grew"):
        assert f"wrong: a: 101 lines and 302 words in {source}, and in the files 100 and 300" in result.stdout
    assert "2 differences; all files are kept in" in result.stderr


@pytest.mark.parametrize(
    ("name", "module"), [("os.py", "os"), ("asyncio/events.py", "asyncio"), ("a/b/c.py", "a"), ("x.py.txt", "x.py.txt")]
)
def test_a_module_is_the_first_part_of_a_path(name: str, module: str) -> None:
    assert module_of(name) == module

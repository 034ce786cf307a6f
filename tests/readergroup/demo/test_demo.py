"""The demo: its parts on data made by hand, the check on wrong data, and all of it on small folders."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import readergroup as rg
from notifications import Change
from readergroup.cli import demo as command
from readergroup.cli.exit_codes import INTERRUPTED
from readergroup.demo.checking import FileTruth, Verdict, check
from readergroup.demo.corpus import MAX_LINE_BYTES, Corpus, LineSerializer, of_path, standard_library
from readergroup.demo.counting import BatchRecord, RecordedLines, encode, number_of_words, read_records, record_file
from readergroup.demo.feeding import Feeder
from readergroup.demo.ownership import Ownership
from readergroup.demo.picture import draw
from readergroup.demo.story import Sample, Story
from tests.command import app
from tests.waiting import PATIENCE_SECONDS, until

# ---------------------------------------------------------------------- the check, on wrong data

TEXT = {"a.py": [b"one two", b"", b"three", b"four five six", b"seven"], "b.py": [b"eight", b"nine ten"]}


def truth() -> dict[str, FileTruth]:
    return {name: FileTruth(lines) for name, lines in TEXT.items()}


def record(token: int, *runs: tuple[str, int, int], segment: str = "demo/lines/0", at: int = 0) -> BatchRecord:
    """A batch that holds runs of lines: of a file, from a number, up to but without a number. ``at``: its offset."""
    lines = [(name, number) for name, first, end in runs for number in range(first, end)]
    return BatchRecord(
        segment=segment,
        fencing_token=token,
        files=[(name, end - first) for name, first, end in runs],
        numbers=array("Q", [number for _, number in lines]),
        offsets=array("Q", range(at, at + len(lines))),
        words=array("Q", [number_of_words(TEXT[name][number]) for name, number in lines]),
        checksums=array("Q", [zlib.crc32(TEXT[name][number]) for name, number in lines]),
    )


def verdict_on(*records: BatchRecord, died: set[int] | None = None) -> Verdict:
    return check(truth(), records, died or set())


def test_what_was_read_right_is_right() -> None:
    verdict = verdict_on(record(1, ("a.py", 0, 5), ("b.py", 0, 2)))
    assert verdict.right
    assert (verdict.lines, verdict.words, verdict.repeated, verdict.missing) == (7, 10, 0, 0)


def test_owners_follow_each_other_by_their_tokens_whatever_the_order_of_their_records() -> None:
    successor = record(9, ("b.py", 1, 2), segment="demo/lines/4")
    assert verdict_on(successor, record(5, ("a.py", 2, 5), ("b.py", 0, 1), at=2), record(1, ("a.py", 0, 2))).right


def test_a_stretch_may_be_repeated_from_its_start_after_a_death() -> None:
    dead = record(1, ("a.py", 0, 4))
    verdict = verdict_on(dead, record(5, ("a.py", 1, 5), ("b.py", 0, 2), at=1), died={1})
    assert verdict.right
    assert verdict.repeated == 3
    assert verdict.words == 10


def test_words_that_were_not_counted_are_told() -> None:
    verdict = verdict_on(record(1, ("a.py", 0, 4), ("b.py", 0, 2)))
    assert "a.py: 6 words were counted, and there are 7" in verdict.differences


WRONG = [
    pytest.param([record(1, ("a.py", 0, 4), ("b.py", 0, 2))], "were never read", id="last line missing"),
    pytest.param([record(1, ("a.py", 0, 5))], "were never read", id="file missing"),
    pytest.param([], "were never read", id="all missing"),
    pytest.param(
        [record(1, ("a.py", 0, 2)), record(1, ("a.py", 3, 5), ("b.py", 0, 2), at=3)], "skipped", id="line skipped"
    ),
    pytest.param(
        [record(1, ("a.py", 0, 2)), record(5, ("a.py", 3, 5), ("b.py", 0, 2), at=3)],
        "skipped",
        id="line skipped by the next owner",
    ),
    pytest.param(
        [record(1, ("a.py", 0, 5)), record(1, ("a.py", 3, 5), ("b.py", 0, 2), at=5)],
        "again by the same owner",
        id="repeated by one owner",
    ),
    pytest.param(
        [record(1, ("a.py", 0, 5)), record(5, ("a.py", 3, 5), at=3), record(5, ("b.py", 0, 2), at=5)],
        "without a death",
        id="repeated after a hand-over",
    ),
    pytest.param(
        [record(1, ("a.py", 0, 2), ("a.py", 3, 4), ("a.py", 2, 3), ("a.py", 4, 5), ("b.py", 0, 2))],
        "skipped",
        id="two lines swapped",
    ),
    pytest.param(
        [record(1, ("a.py", 0, 5), ("b.py", 0, 2))._replace(files=[("a.py", 7)])],
        "were read in this order",
        id="two files mixed up",
    ),
    pytest.param(
        [record(1, ("a.py", 0, 5), ("b.py", 0, 2))._replace(files=[("a.py", 5), ("c.py", 2)])],
        "no such file",
        id="unknown file",
    ),
    pytest.param(
        [record(1, ("a.py", 0, 5), ("b.py", 0, 2))._replace(words=array("Q", [2, 0, 1, 3, 1, 1, 3]))],
        "line 1 has wrong words",
        id="words counted wrong",
    ),
    pytest.param(
        [record(1, ("a.py", 0, 5), ("b.py", 0, 2))._replace(checksums=array("Q", range(7)))],
        "line 0 has wrong text",
        id="text changed",
    ),
    pytest.param(
        [record(1, ("a.py", 0, 5), ("b.py", 0, 2))._replace(offsets=array("Q", [0, 1, 3, 2, 4, 5, 6]))],
        "out of order",
        id="offsets go back",
    ),
    pytest.param(
        [
            record(1, ("a.py", 0, 5), ("b.py", 0, 2)),
            record(5, ("b.py", 0, 2), at=5)._replace(numbers=array("Q", [1, 2])),
        ],
        "there are 2 lines",
        id="more lines than there are",
    ),
]


@pytest.mark.parametrize(("records", "says"), WRONG)
def test_what_was_read_wrong_is_found(records: list[BatchRecord], says: str) -> None:
    verdict = verdict_on(*records)
    assert not verdict.right
    assert any(says in difference for difference in verdict.differences), verdict.differences


def test_a_repeated_line_has_the_pointer_that_it_had() -> None:
    first = record(1, ("a.py", 0, 5), ("b.py", 0, 2))
    assert verdict_on(first, record(5, ("a.py", 3, 5), ("b.py", 0, 2), at=3), died={1}).right
    elsewhere = verdict_on(first, record(5, ("a.py", 3, 5), ("b.py", 0, 2), at=4), died={1})
    assert any("another pointer" in difference for difference in elsewhere.differences)
    other_segment = record(5, ("a.py", 3, 5), ("b.py", 0, 2), at=3, segment="demo/lines/1")
    assert any("another pointer" in difference for difference in verdict_on(first, other_segment, died={1}).differences)


def test_many_differences_are_counted_and_the_first_told() -> None:
    lines = {f"{n}.py": FileTruth([b"x"]) for n in range(1000)}
    verdict = check(lines, [], set())
    assert verdict.missing == 1000
    assert verdict.number_of_differences >= 1000
    assert len(verdict.differences) < 100


# ---------------------------------------------------------------------- records


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = [record(1, ("a.py", 0, 5)), record(7, ("b.py", 0, 2), ("a.py", 0, 1), segment="demo/lines/3")]
    file = record_file(tmp_path, 42)
    file.write_bytes(b"".join(map(encode, written)))
    read = list(read_records(file))
    assert [each._replace(files=[tuple(run) for run in each.files]) for each in read] == written  # type: ignore[misc]


@pytest.mark.parametrize("lost", [1, 10, 60, 10_000])
def test_a_record_that_was_cut_off_by_a_kill_is_left_out(tmp_path: Path, lost: int) -> None:
    first, second = encode(record(1, ("a.py", 0, 3))), encode(record(1, ("a.py", 3, 5), at=3))
    file = record_file(tmp_path, 42)
    file.write_bytes(first + second[: max(0, len(second) - lost)])
    progress = RecordedLines(tmp_path)
    progress.look()
    assert [len(each.numbers) for each in read_records(file)] == [3]
    assert progress.lines == {42: 3}


def test_progress_counts_what_was_added(tmp_path: Path) -> None:
    progress = RecordedLines(tmp_path)
    progress.look()
    assert progress.total == 0
    for pid in (7, 8, 7):
        with record_file(tmp_path, pid).open("ab") as file:
            file.write(encode(record(1, ("a.py", 0, 5))))
        progress.look()
    assert progress.lines == {7: 10, 8: 5}


@pytest.mark.parametrize(
    ("line", "words"), [(b"", 0), (b"def f(x1, _y):", 4), ("für Ünë".encode(), 2), (b"a\xff\xfeb", 2), (b"\0\1", 0)]
)
def test_words_are_counted_in_any_bytes(line: bytes, words: int) -> None:
    assert number_of_words(line) == words


# ---------------------------------------------------------------------- input


def test_the_standard_library_is_the_running_pythons_and_nothing_else() -> None:
    corpus = standard_library()
    assert {"os.py", "asyncio/events.py"} <= set(corpus.files)
    assert not any("-packages" in name for name in corpus.files)
    assert all(name.endswith(".py") for name in corpus.files)
    assert corpus.files["os.py"].samefile(os.__file__)


def test_a_file_or_a_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.txt").write_bytes(b"one\ntwo")
    (tmp_path / "b.bin").write_bytes(b"\xff\n\n")
    folder = of_path(tmp_path)
    assert {name: list(folder.lines(name)) for name in folder.files} == {
        "b.bin": [b"\xff", b""],
        "inner/a.txt": [b"one", b"two"],
    }
    assert list(of_path(tmp_path / "b.bin").files) == ["b.bin"]


def test_a_line_that_is_longer_than_an_event_can_be_counts_as_several(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * (2 * MAX_LINE_BYTES + 5) + b"\nend\n")
    assert [len(line) for line in of_path(tmp_path).lines("long")] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 5, 3]


@pytest.mark.parametrize("line", [b"", b" ", b"a b", b"\xff\0", b"12 13"])
def test_a_line_survives_its_serializer(line: bytes) -> None:
    assert LineSerializer().loads(LineSerializer().dumps((17, line))) == (17, line)


# ---------------------------------------------------------------------- the writer


def test_the_writer_waits_for_the_readers_and_for_leave(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"line\n" * 5000)
    with rg.connect("memory://") as client:
        client.streams.create("demo/lines")
        feeder = Feeder(client, "demo/lines", of_path(tmp_path), backlog=1000)
        feeder.start()
        feeder.let(may_write=2500)
        until(lambda: feeder.written == 1000)
        feeder.let(read=1000)
        until(lambda: feeder.written == 2000)
        feeder.let(read=2000)
        until(lambda: feeder.written == 2500)
        feeder.let(read=2500)
        assert feeder.written == 2500 and not feeder.done
        feeder.let(may_write=5000, read=5000)
        until(lambda: feeder.done)
        assert (feeder.written, feeder.failure) == (5000, None)


def test_the_writer_can_be_stopped_while_it_waits(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"line\n" * 10)
    with rg.connect("memory://") as client:
        client.streams.create("demo/lines")
        feeder = Feeder(client, "demo/lines", of_path(tmp_path), backlog=100)
        feeder.start()
        feeder.stop()
        assert feeder.done and feeder.written == 0


# ---------------------------------------------------------------------- ownership and picture


@pytest.fixture
def group() -> Iterator[rg.ReaderGroup]:
    with rg.connect("memory://") as client:
        client.streams.create("demo/lines", scaling=rg.ScalingPolicy.fixed(2))
        yield client.groups.create("g", streams=["demo/lines"])


S0, S1 = rg.SegmentId("demo/lines/0"), rg.SegmentId("demo/lines/1")


def followed(group: rg.ReaderGroup) -> Ownership:
    """Two readers; one segment is handed over, and its new owner dies. An entry a second."""
    feed = group.synchronizer.transitions()
    for update in (
        rg.AddReader(reader="a"),
        rg.AddReader(reader="b"),
        rg.ReassignSegment(segment=S0, reader="a"),
        rg.ReassignSegment(segment=S1, reader="a"),
        rg.ReassignSegment(segment=S1, reader="b"),
        rg.ReleaseSegment(reader="a", segment=S1, offset=0),
        rg.RemoveReader(reader="b", cause="dead"),
        rg.ReassignSegment(segment=S1, reader="a"),
        rg.RemoveReader(reader="a", cause="closed"),
    ):
        group.synchronizer.update_state_unconditionally(update)
    ownership = Ownership()
    for second, transition in enumerate(feed.drain()):
        ownership.apply(transition, float(second))
    feed.close()
    return ownership


def test_ownership_is_folded_from_the_log(group: rg.ReaderGroup) -> None:
    ownership = followed(group)
    assert ownership.readers == ["a", "b"]
    assert [(each.segment, each.reader, each.start, each.end, each.died) for each in ownership.assignments] == [
        (S0, "a", 3.0, 9.0, False),
        (S1, "a", 4.0, 6.0, False),
        (S1, "b", 6.0, 7.0, True),
        (S1, "a", 8.0, 9.0, False),
    ]
    assert ownership.dead == {"b"}
    assert ownership.died == {ownership.assignments[2].fencing_token}
    assert ownership.segments_of("a") == []


def test_a_picture_is_drawn(group: rg.ReaderGroup, tmp_path: Path) -> None:
    times = iter(range(100))
    said: list[str] = []
    story = Story(lambda: float(next(times)), said.append)
    change = Change.model_validate(
        {"source": "g", "revision": rg.Revision(0, 0), "cause": "test", "seen_at": "2026-01-01T00:00:00Z"}
    )
    story.hear(rg.SegmentNotification(change=change, number_of_segments=2, number_of_readers=0, segments=(S0, S1)))
    story.hear(rg.ReaderNotification(change=change, readers=("a",), joined=("a",), left=("b",), dead=("b",)))
    story.hear(rg.EndOfDataNotification(change=change, cuts={}))
    story.happened("segment 0 split", "segment 0 is split")
    story.happened("reader 2 killed", "reader 2 is killed", reader="b")
    story.samples += [Sample(0.0, 0, 0), Sample(10.0, 100, 100)]
    path = tmp_path / "demo.png"
    draw(story, followed(group), "a title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert any("reader 2 was declared dead" in sentence for sentence in said)


# ---------------------------------------------------------------------- all of it


def start_demo(*args: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "readergroup.cli", "demo", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Its output as it comes; the process is ended when that takes too long."""
    timer = threading.Timer(PATIENCE_SECONDS, process.kill)
    timer.start()
    assert process.stdout is not None
    try:
        yield from process.stdout
        process.wait()
    finally:
        timer.cancel()


def many_lines(folder: Path) -> None:
    """60,000 lines of 30 files."""
    folder.mkdir()
    for file in range(30):
        (folder / f"{file}.txt").write_text("".join(f"line {n} of {file}\n" for n in range(2000)))


def lines_in(record: BatchRecord) -> set[tuple[str, int]]:
    """The lines that a record is about, by file and number."""
    names = [name for name, count in record.files for _ in range(count)]
    return set(zip(names, record.numbers, strict=True))


def test_the_demo_survives_a_kill_and_shows_that_nothing_is_lost(tmp_path: Path) -> None:
    many_lines(tmp_path / "input")
    process = start_demo(tmp_path / "input", "--output", tmp_path / "output")
    shown = "".join(lines_of(process))
    assert process.stderr is not None
    assert (process.returncode, process.stderr.read()) == (0, ""), shown
    for sentence in (
        "input: 60,000 lines in 30 files",
        "the pool has grown to 4 readers",
        "is killed",
        "was declared dead",
        "its segments have other readers",
        "notification: end of data",
        "60,000, each read at least once",
    ):
        assert sentence in shown
    assert (tmp_path / "output/demo.png").read_bytes().startswith(b"\x89PNG")
    records = [each for file in (tmp_path / "output").glob("*.records") for each in read_records(file)]
    assert len({each.fencing_token for each in records}) >= 4
    assert sum(len(each.numbers) for each in records) >= 60_000
    corpus = of_path(tmp_path / "input")
    in_files = {name: FileTruth(corpus.lines(name)) for name in corpus.files}
    lost = lines_in(records[0])
    left = [each for each in records if lost.isdisjoint(lines_in(each))]  # nor read again after the kill
    verdict = check(in_files, left, {each.fencing_token for each in records})
    assert not verdict.right  # with one batch less it is wrong


def test_a_pool_that_looks_only_when_everything_is_read_grows_all_the_same(tmp_path: Path) -> None:
    many_lines(tmp_path / "input")
    program = f"""
import itertools, threading
from readergroup.cli.app import app_with
from readergroup.scaling import pool
at_once, delays = pool.ReaderPool._on_segments, itertools.chain([0.0], itertools.repeat(4.0))
pool.ReaderPool._on_segments = lambda self, told: threading.Timer(next(delays), at_once, [self, told]).start()
pool.LOOK_SECONDS = 10.0
app_with("demo")(["demo", {str(tmp_path / "input")!r}, "--output", {str(tmp_path / "output")!r}])
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    grown = any("the pool has grown to 4 readers" in line for line in lines_of(process))
    process.terminate()
    process.wait(PATIENCE_SECONDS)
    assert grown


@pytest.mark.broad  # every run has the check, on wrong data
def test_a_file_that_differs_from_what_was_read_makes_the_demo_fail(tmp_path: Path) -> None:
    many_lines(tmp_path / "input")
    process = start_demo(tmp_path / "input", "--output", tmp_path / "output")
    shown = ""
    for line in lines_of(process):
        shown += line
        if "is killed" in line:  # the first files are read
            with (tmp_path / "input/0.txt").open("a") as file:
                file.write("a late line\n")
    assert process.stderr is not None
    assert process.returncode == 1, shown
    assert "wrong: 0.txt: lines from 2000 on, of 2001, were never read in order" in shown
    assert "all files are kept in" in process.stderr.read()


@pytest.mark.broad
def test_files_of_any_bytes_will_do(tmp_path: Path) -> None:
    folder = tmp_path / "input"
    folder.mkdir()
    (folder / "empty").write_bytes(b"")
    (folder / "no end").write_bytes(b"one line")
    (folder / "bytes").write_bytes(bytes(range(256)) * 40)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff name")).write_bytes(b"\xfe\n\xff\xff\n\n")
    process = start_demo(folder, "--output", tmp_path / "output")
    shown = "".join(lines_of(process))
    assert process.returncode == 0, shown
    assert "each read at least once" in shown


def test_input_without_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    result = CliRunner().invoke(app, ["demo", str(tmp_path)])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "there are no lines to read" in result.stderr


def test_a_demo_that_is_terminated_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_lines(tmp_path / "input")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = start_demo(tmp_path / "input")
    lines = lines_of(process)
    while not list(temporary.glob("readergroup-demo-*/demo.db")):
        next(lines)
    process.terminate()
    rest = "".join(lines)
    assert process.returncode == INTERRUPTED, rest
    assert not list(temporary.iterdir())


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"a line\n")
    result = CliRunner().invoke(app, ["demo", str(tmp_path), "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "the folder is not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_without_matplotlib_the_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "pip install '.[demo]'" in result.stderr


def test_the_corpus_keeps_count_of_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a").write_bytes(b"a\n")
    corpus = of_path(tmp_path)
    assert (list(corpus.files), corpus.unreadable) == (["a"], 1)
    assert replace(corpus, unreadable=0) == Corpus(tmp_path.name, {"a": tmp_path / "a"})

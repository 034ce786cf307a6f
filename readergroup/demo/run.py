"""Runs the demo from start to end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import track

from synchronizer import Deadline, ReaderGroupError, SystemClock

from ..client import Client, connect
from ..group.reader_group import ReaderGroup
from ..scaling.policy import ReaderScalingPolicy
from ..scaling.pool import PoolWorker, ReaderPool
from ..streams.config import ScalingPolicy, SegmentId, number_of
from .checking import FileTruth, Verdict, check
from .corpus import Corpus, LineSerializer
from .counting import CountWords, RecordedLines, read_records, record_files
from .display import Display, ReaderRow
from .feeding import Feeder
from .ownership import Ownership, OwnershipFollower
from .picture import draw
from .story import Sample, Story

STREAM: Final = "demo/lines"
GROUP: Final = "word-counters"
SEGMENTS: Final = 3
READER_TIMEOUT_SECONDS: Final = 3.0

#: Fractions of all lines. `_SPLIT` is written when the stream is split, `_KILL` is read when a reader is killed. The
#: writer stops at the others until the pool has grown, the reader is killed, and its segments are taken over.
_SPLIT: Final = 0.2
_BEFORE_GROWTH: Final = 0.4
_KILL: Final = 0.45
_BEFORE_KILL: Final = 0.6
_BEFORE_TAKEOVER: Final = 0.85
#: Until the kill, the writer is ahead of the readers by at most this fraction of all lines.
_BACKLOG: Final = 0.05

#: With fewer lines the pool may have read all of them before it could grow.
_ENOUGH_LINES: Final = 50_000
_TICK_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 60.0
_PATIENCE_FOR_FEW_LINES_SECONDS: Final = 3.0


class DemoFailedError(ReaderGroupError):
    """The demo did not finish."""


@dataclass(frozen=True)
class DemoResult:
    """The result of the demo. ``verdict.right`` says whether all lines are right."""

    verdict: Verdict
    picture: Path
    readers: int
    seconds: float
    takeover_seconds: float


def run(corpus: Corpus, folder: Path, console: Console) -> DemoResult:
    """Write, read, split, kill, check and draw. All files are in ``folder``, which exists."""
    looked_at = _tracked(console, "looking at the files", corpus.files)
    total = sum(sum(1 for _ in corpus.lines(name)) for name in looked_at)
    if not total:
        raise DemoFailedError("there are no lines to read", input=corpus.title)
    console.print(f"{corpus.title}: {total:,} lines in {len(corpus.files):,} files")
    with Display(console, total) as display:
        performance = _DemoRun(corpus, folder, total, display)
        performance.run()
    truth = {name: FileTruth(corpus.lines(name)) for name in _tracked(console, "reading the files", corpus.files)}
    records = [record for path in record_files(folder) for record in read_records(path)]
    with busy(console, "comparing"):
        verdict = check(truth, records, performance.ownership.died)
    picture = folder / "demo.png"
    with busy(console, "drawing"):
        draw(performance.story, performance.ownership, _title(corpus, total), picture)
    return DemoResult(
        verdict=verdict,
        picture=picture,
        readers=len(performance.ownership.readers),
        seconds=performance.story.samples[-1].at,
        takeover_seconds=performance.takeover_seconds,
    )


def _tracked(console: Console, what: str, names: Collection[str]) -> Iterable[str]:
    """Iterate over the names, with a progress bar on a terminal."""
    return track(names, what, console=console, transient=True) if console.is_terminal else names


def busy(console: Console, what: str) -> AbstractContextManager[object]:
    """Show on a terminal that the block takes a moment."""
    return console.status(what) if console.is_terminal else contextlib.nullcontext()


def _title(corpus: Corpus, total: int) -> str:
    return f"{total:,} lines of {corpus.title}, and the processes that read them"


class _DemoRun:
    """One run: the writer, the pool, the script, and their state."""

    def __init__(self, corpus: Corpus, folder: Path, total: int, display: Display) -> None:
        self.corpus = corpus
        self.folder = folder
        self.total = total
        self.takeover_seconds = 0.0
        self._clock = SystemClock()
        self._began_at = self._clock.monotonic()
        self.story = Story(self.now, display.say)
        self.ownership = Ownership()
        self._display = display
        self._progress = RecordedLines(folder)
        self._pids: dict[str, int] = {}
        self._killed: str | None = None
        self._tick = threading.Event()  # never set: the run polls

    def now(self) -> float:
        return self._clock.monotonic() - self._began_at

    # ------------------------------------------------------------------ the stage

    def run(self) -> None:
        with ExitStack() as stack:
            self._client: Client = stack.enter_context(connect(f"sqlite:///{self.folder.resolve() / 'demo.db'}"))
            self._client.streams.create(STREAM, scaling=ScalingPolicy.fixed(SEGMENTS))
            self._group: ReaderGroup = self._client.groups.create(
                GROUP, streams=[STREAM], reader_timeout_seconds=READER_TIMEOUT_SECONDS
            )
            for notifier in (
                self._group.segment_notifier,
                self._group.reader_notifier,
                self._group.end_of_data_notifier,
            ):
                notifier.register_listener(self.story.hear)
            self.ownership = stack.enter_context(OwnershipFollower(self._group, self.now))
            self._feeder = Feeder(self._client, STREAM, self.corpus, backlog=max(100, int(self.total * _BACKLOG)))
            self._pool = PoolThread(
                self._group.pool(
                    handle_batch=CountWords(self.folder),
                    serializer=LineSerializer(),
                    workers="process",
                    readers=ReaderScalingPolicy(
                        min_readers=SEGMENTS, max_readers=8, target_lag_seconds=30, cooldown_seconds=300
                    ),
                )
            )
            stack.callback(self._pool.stop)
            self._pool.start()
            self._feeder.start()
            stack.callback(self._feeder.stop)
            for _ in self._script():
                self._look()
                self._clock.wait(self._tick, _TICK_SECONDS)
            self._look()

    def _look(self) -> None:
        """Check the progress, and show it."""
        self._pool.check()
        if self._feeder.failure is not None:
            raise self._feeder.failure
        self._progress.look()
        self._pids.update((worker.reader_id, worker.pid) for worker in self._pool.workers)
        read = self._progress.total
        self._feeder.let(read=read)
        at = self.now()
        self.story.samples.append(Sample(at, self._feeder.written, read))
        self._display.show(at, self._feeder.written, read, [self._row(reader) for reader in self.ownership.readers])

    def _row(self, reader: str) -> ReaderRow:
        pid = self._pids.get(reader, 0)
        segments = [number_of(segment) for segment in self.ownership.segments_of(reader)]
        if reader in self._group.state.readers:
            condition = "killed" if reader == self._killed else "working"
        else:
            condition = "declared dead" if reader in self.ownership.dead else "left"
        return ReaderRow(self.story.name(reader), pid, condition, segments, self._progress.lines.get(pid, 0))

    # ------------------------------------------------------------------ the script

    def _script(self) -> Iterator[None]:
        """Run the steps in order. Each step waits until the one before has taken effect."""
        self._feeder.let(may_write=int(self.total * _BEFORE_GROWTH))
        yield from self._until("the readers start", lambda: self._everybody_reads(SEGMENTS))
        yield from self._until("a part is written", lambda: self._feeder.written >= int(self.total * _SPLIT))
        segments = self._split()
        yield from self._until_the_pool_has_grown(segments)
        self._feeder.let(may_write=int(self.total * _BEFORE_KILL))
        yield from self._until("a part is read", lambda: self._progress.total >= int(self.total * _KILL))
        victim, owned = self._kill()
        # Only events in the segments of the killed reader have to wait.
        self._feeder.let(may_write=int(self.total * _BEFORE_TAKEOVER), backlog=self.total)
        killed_at = self.now()
        yield from self._until(
            "the segments of the killed reader are taken over", lambda: self._taken_over(owned, victim, killed_at)
        )
        self.takeover_seconds = self.now() - killed_at
        self.story.happened(
            "taken over", f"its segments have other readers, {self.takeover_seconds:.1f} s after the kill"
        )
        self._feeder.let(may_write=self.total)
        yield from self._until("everything is written", lambda: self._feeder.done)
        self._client.streams.seal(STREAM)
        self.story.happened("sealed", "the stream is sealed")
        yield from self._until("the end of the data stops the pool", lambda: self._pool.done)

    def _until(self, what: str, condition: Callable[[], bool], patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
        deadline = Deadline(self._clock, patience)
        while not condition():
            if deadline.passed:
                raise DemoFailedError(f"this did not happen within {patience:.0f} s: {what}")
            yield

    def _everybody_reads(self, readers: int) -> bool:
        return len(self._owners()) >= readers

    def _owners(self) -> list[str]:
        return [reader for reader in self._group.state.readers if self._group.state.segments_of(reader)]

    def _split(self) -> int:
        """Split the segment with the most data; return the new number of segments."""
        tail = self._client.streams.info(STREAM).tail.offsets
        number = number_of(max(tail, key=lambda segment: tail[segment]))
        segments = self._client.streams.scale(STREAM, split=[number]).segments
        halves = sorted({number_of(segment) for segment in segments} - {number_of(segment) for segment in tail})
        self.story.happened(f"segment {number} split", f"segment {number} is split into {halves[0]} and {halves[1]}")
        return len(segments)

    def _until_the_pool_has_grown(self, segments: int) -> Iterator[None]:
        few = self.total < _ENOUGH_LINES
        try:
            patience = _PATIENCE_FOR_FEW_LINES_SECONDS if few else _PATIENCE_SECONDS
            deadline = Deadline(self._clock, patience)
            for _ in self._until(
                f"the pool grows to {segments} readers", lambda: self._everybody_reads(segments), patience
            ):
                # A pool grows only while events wait, so keep writing a little until it has grown.
                waited = 1.0 - deadline.remaining() / patience
                part = _BEFORE_GROWTH + (_BEFORE_KILL - _BEFORE_GROWTH) * waited
                self._feeder.let(may_write=int(self.total * part))
                yield
        except DemoFailedError:
            if not few:
                raise
            self.story.say("there are so few lines that they were read before the pool could grow")
        else:
            self.story.say(f"the pool has grown to {segments} readers")

    def _kill(self) -> tuple[str, list[SegmentId]]:
        """Kill the reader that has read most, with SIGKILL; return it and its segments."""
        owners = self._owners()
        pids = {worker.reader_id: worker.pid for worker in self._pool.workers if worker.reader_id in owners}
        victim = max(pids, key=lambda reader: self._progress.lines.get(pids[reader], 0))
        owned = sorted(self._group.state.segments_of(victim))
        self._killed = victim
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
        name = self.story.name(victim)
        self.story.happened(
            f"{name} killed",
            f"{name} (process {pids[victim]}) is killed; "
            f"it owns {', '.join(f'segment {number_of(segment)}' for segment in owned)}",
            reader=victim,
        )
        return victim, owned

    def _taken_over(self, owned: Collection[SegmentId], victim: str, killed_at: float) -> bool:
        others = {
            assignment.segment
            for assignment in self.ownership.assignments
            if assignment.reader != victim and assignment.start >= killed_at
        }
        return victim in self.ownership.dead and others >= set(owned)


class PoolThread:
    """A pool that runs in a thread of its own, so that the script can act on it."""

    def __init__(self, pool: ReaderPool[Any]) -> None:
        self._pool = pool
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="demo pool", daemon=True)

    def _run(self) -> None:
        try:
            self._pool.run()
        except BaseException as error:
            self._failure = error

    def start(self) -> None:
        self._thread.start()

    @property
    def workers(self) -> Sequence[PoolWorker]:
        return self._pool.workers

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise the error that ended the pool, if there is one."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._pool.stop()
        self._thread.join()

"""The demo on Spark: counts the words of each module in a whole stream, and in one that grows and is scaled.

It compares both counts with the truth, which is computed directly from the files.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from synchronizer import Deadline, SystemClock

from ..client import Client, connect
from ..spark import local_session
from ..spark.stderr import stderr_in
from ..streams.config import ScalingPolicy, SegmentId, number_of
from .corpus import Corpus, LineSerializer
from .feeding import Feeder
from .run import DemoFailedError, busy
from .spark_outcome import Count, Counts, SparkOutcome
from .spark_picture import draw
from .story import Sample, Story

WHOLE: Final = "demo/lines"
GROWING: Final = "demo/live"
SEGMENTS: Final = 4
#: The growing stream is split and merged when this fraction of the lines is read.
_SPLIT: Final = 0.3
_MERGE: Final = 0.6
#: The writer is ahead of the query by at most this fraction of all lines, so the query has a dozen batches or more.
_BACKLOG: Final = 0.08
_TICK_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 120.0
#: Letters, digits and underscores of ASCII, as in Spark's expression.
_WORD: Final = re.compile(rb"\w+")


def run_on_spark(corpus: Corpus, folder: Path, console: Console) -> SparkOutcome:
    """Write, read, compare and draw. All files are in ``folder``, which exists."""
    with busy(console, "counting in the files"):
        truth = _truth(corpus)
    if not truth:
        raise DemoFailedError("there are no lines to read", input=corpus.title)
    outcome = SparkOutcome(corpus.title, truth)
    console.print(f"{corpus.title}: {outcome.total.lines:,} lines in {len(corpus.files):,} files")
    clock = SystemClock()
    began_at = clock.monotonic()
    outcome.story = Story(lambda: clock.monotonic() - began_at, console.print)
    outcome.picture = folder / "demo-spark.png"
    address = f"sqlite:///{folder.resolve() / 'demo.db'}"
    with connect(address) as client, _session(folder, console) as spark:
        performance = _SparkDemoRun(client, spark, address, corpus, folder, outcome)
        performance.read_whole()
        performance.read_growing()
    with busy(console, "drawing"):
        draw(outcome, outcome.picture)
    return outcome


def _truth(corpus: Corpus) -> Counts:
    truth: dict[str, Count] = {}
    for name in corpus.files:
        lines, words = truth.get(module_of(name), Count())
        for line in corpus.lines(name):
            lines += 1
            words += len(_WORD.findall(line))
        if lines:
            truth[module_of(name)] = Count(lines, words)
    return truth


def module_of(name: str) -> str:
    """Return the module of a file: the first folder or file of its path."""
    return name.partition("/")[0].removesuffix(".py")


def count_words(events: DataFrame) -> DataFrame:
    """Return the lines and words of each module, from events that are lines with file names as routing keys."""
    # A line may contain any bytes: in this encoding each byte is a character.
    line = F.regexp_replace(F.decode("event", "ISO-8859-1"), r"^\d+ ", "")
    module = F.regexp_replace(F.substring_index("routing_key", "/", 1), r"\.py\z", "")
    words = F.regexp_count(line, F.lit(r"\w+"))
    return events.groupBy(module.alias("module")).agg(F.count("*").alias("lines"), F.sum(words).alias("words"))


def _counts(found: DataFrame) -> Counts:
    return {row.module: Count(row.lines, row.words) for row in found.collect()}


@contextmanager
def _session(folder: Path, console: Console) -> Iterator[SparkSession]:
    """Provide a session that logs into ``spark.log``."""
    settings = {
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.shuffle.partitions": str(SEGMENTS),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    with busy(console, "starting Spark"), stderr_in(folder / "spark.log"):
        spark = local_session("local[*]", settings)
    try:
        yield spark
    finally:
        spark.stop()


class _SparkDemoRun:
    """One run: two streams, a writer, a query and the script."""

    def __init__(
        self, client: Client, spark: SparkSession, address: str, corpus: Corpus, folder: Path, outcome: SparkOutcome
    ) -> None:
        self._client = client
        self._spark = spark
        self._address = address
        self._corpus = corpus
        self._folder = folder
        self._outcome = outcome
        self._story = outcome.story
        self._total = outcome.total.lines
        self._tick = threading.Event()  # never set: the run polls

    def read_whole(self) -> None:
        """Write a stream, then read it in one query."""
        self._client.streams.create(WHOLE, scaling=ScalingPolicy.fixed(SEGMENTS))
        with self._client.writer(WHOLE, serializer=LineSerializer()) as writer:
            for name in self._corpus.files:
                for line in enumerate(self._corpus.lines(name)):
                    writer.write(line, name)
        self._story.say(f"{self._total:,} lines are written to {SEGMENTS} segments")
        began_at = self._story.now()
        events = self._spark.read.format("readergroup").options(url=self._address, stream=WHOLE)
        cores = self._spark.sparkContext.defaultParallelism
        self._outcome.whole = _counts(count_words(events.option("minPartitions", cores).load()))
        self._outcome.whole_seconds = self._story.now() - began_at
        self._story.say(f"Spark has counted their words in {self._outcome.whole_seconds:.1f} s")

    def read_growing(self) -> None:
        """Read a stream with a streaming query while it is written, split and merged."""
        self._client.streams.create(GROWING, scaling=ScalingPolicy.fixed(SEGMENTS))
        feeder = Feeder(self._client, GROWING, self._corpus, backlog=max(100, int(self._total * _BACKLOG)))
        feeder.let(may_write=sys.maxsize)
        with ExitStack() as stack:
            query = self._start()
            stack.callback(query.stop)
            feeder.start()
            stack.callback(feeder.stop)
            self._story.say("a streaming query reads another stream while it is written")
            for _ in self._script(feeder):
                self._look(feeder, query)
                self._client.clock.wait(self._tick, _TICK_SECONDS)
            self._look(feeder, query)

    def _start(self) -> StreamingQuery:
        def hear(counts: DataFrame, batch: int) -> None:
            self._outcome.growing = _counts(counts)
            self._outcome.batches = batch + 1
            self._story.say(f"batch {batch}: {self._read:,} lines are counted")

        events = self._spark.readStream.format("readergroup").options(url=self._address, stream=GROWING)
        counts = count_words(events.option("startingOffsets", "earliest").load())
        writer = counts.writeStream.outputMode("complete").foreachBatch(hear)
        return writer.option("checkpointLocation", str(self._folder.resolve() / "checkpoint")).start()

    @property
    def _read(self) -> int:
        return sum(each.lines for each in self._outcome.growing.values())

    def _look(self, feeder: Feeder, query: StreamingQuery) -> None:
        if feeder.failure is not None:
            raise feeder.failure
        error = query.exception()
        if error is not None:
            raise DemoFailedError("the streaming query failed", error=_first_line(error))
        feeder.let(read=self._read)
        self._story.samples.append(Sample(self._story.now(), feeder.written, self._read))

    # ------------------------------------------------------------------ the script

    def _script(self, feeder: Feeder) -> Iterator[None]:
        yield from self._until(lambda: self._read >= int(self._total * _SPLIT))
        tail = self._client.streams.info(GROWING).tail.offsets
        largest = number_of(max(tail, key=lambda segment: tail[segment]))
        halves = _new(tail, self._client.streams.scale(GROWING, split=[largest]).segments)
        self._story.happened("split", f"segment {largest} is split into {halves[0]} and {halves[1]}")
        yield from self._until(lambda: self._read >= int(self._total * _MERGE))
        before = self._client.streams.info(GROWING).segments
        (merged,) = _new(before, self._client.streams.scale(GROWING, merge=halves).segments)
        self._story.happened("merge", f"segments {halves[0]} and {halves[1]} are merged into {merged}")
        yield from self._until(lambda: feeder.done and self._read >= feeder.written)

    def _until(self, condition: Callable[[], bool]) -> Iterator[None]:
        deadline = Deadline(self._client.clock, _PATIENCE_SECONDS)
        while not condition():
            if deadline.passed:
                raise DemoFailedError("the streaming query makes no progress", read=self._read, expected=self._total)
            yield


def _new(before: Iterable[SegmentId], after: Iterable[SegmentId]) -> list[int]:
    """Return the numbers of the segments that a scaling added."""
    return sorted({*map(number_of, after)} - {*map(number_of, before)})


def _first_line(error: StreamingQueryException) -> str:
    return str(error).partition("\n")[0]

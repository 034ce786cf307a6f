"""Spark on a stream as a user types it, without options: each action beside the same on Parquet files of the rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

from pyspark.sql import DataFrame, SparkSession

import readergroup as rg
import readergroup.spark

from .figure import Figure, Result, Skipped
from .measuring import folder
from .spark_session import Run, medians, read, session_in, taken, write_parquet, write_stream
from .stores import Store

STREAM: Final = "bench/events"
EVENTS: Final = 2_500_000
_SEGMENTS: Final = 4
#: The events as JSON: 100 bytes each.
_SCHEMA: Final = "id bigint, shop string, price double, paid boolean, note string"


def spark_plain(store: Store) -> Iterator[Result]:
    """Plain ``load()``, counts, groups, writes and decoded JSON, beside Parquet and ``from_json``."""
    try:
        readergroup.spark.check_java()
    except rg.UnsupportedError as error:
        yield Skipped("Spark", str(error))
        return
    with store.fresh() as url, folder() as place, rg.connect(url) as client, session_in(place) as session:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(_SEGMENTS))
        rng = random.Random(1)
        with client.writer(STREAM) as writer:
            for number in range(EVENTS):
                writer.write(_event(number, rng), routing_key=f"key-{number % 1000}")
        runs = _Runs(session, client, url, place)
        runs.write_parquet_of_rows()
        for what, target, ours, theirs, name in runs.pairs():
            yield _figure(what, target, ours, theirs, name)


def _event(number: int, rng: random.Random) -> bytes:
    event = {"id": number, "shop": f"s{number % 7}", "price": rng.randrange(10_000) / 100, "paid": number % 3 > 0}
    text = json.dumps({**event, "note": ""}, separators=(",", ":"))
    return (text[:-2] + rng.randbytes(50).hex()[: 100 - len(text)] + text[-2:]).encode()


def _figure(what: str, target: float | None, ours: Run, theirs: Run, name: str) -> Figure:
    measured, beside = taken(ours, theirs)
    ratios = [one.wall / other.wall for one, other in zip(measured, beside, strict=True)]
    mine, other = medians(measured), medians(beside)
    return Figure(
        what=what,
        value=median(ratios),
        unit="×",
        target=target,
        better="less",
        beside=f"{mine.wall:.2f} s; {name} {other.wall:.2f} s; the rounds: {min(ratios):.2f} to {max(ratios):.2f}; by "
        f"processor time {mine.processor / other.processor:.2f} ({mine.processor:.2f} s; {other.processor:.2f} s)",
    )


class _Runs:
    """What is measured, each of it once."""

    def __init__(self, session: SparkSession, client: rg.Client, url: str, place: Path) -> None:
        self._parquet_path = str(place / "events.parquet")
        self._session = session
        self._client = client
        self._url = url
        self._written = str(place / "written.parquet")
        self._numbers = count()

    def pairs(self) -> Iterator[tuple[str, float | None, Run, Run, str]]:
        """What is measured, the most that it may take, ours, what is measured beside it, and its name."""
        ours, theirs = self._load, self._parquet
        all_of = f"Spark, {EVENTS:,} events of 100 bytes"
        yield f"{all_of}: load()", 1.8, lambda: read(ours()), lambda: read(theirs()), "Parquet"
        yield (
            f"{all_of}: load(), three columns",
            None,
            lambda: read(ours(columns="event,segment_id,offset")),
            lambda: read(theirs().select("event", "segment_id", "offset")),
            "Parquet",
        )
        yield f"{all_of}: count()", 1.5, lambda: _count(ours()), lambda: _count(theirs()), "Parquet"
        yield (
            f"{all_of}: count() with columns='offset'",
            1.5,
            lambda: _count(ours(columns="offset")),
            lambda: _count(theirs()),
            "Parquet",
        )
        for column in ("segment_id", "routing_key"):
            yield (
                f"{all_of}: groupBy('{column}').count()",
                None,
                partial(_group, ours, column),
                partial(_group, theirs, column),
                "Parquet",
            )
        yield f"{all_of}: write", 2.0, self._write, self._write_parquet, "Parquet"
        yield f"{all_of}: serializer='json'", 1.0, self._decode, self._from_json, "from_json"

    def _load(self, schema: str | None = None, **options: str) -> DataFrame:
        reader = self._session.read.format("readergroup").options(url=self._url, stream=STREAM, **options)
        return reader.load() if schema is None else reader.schema(schema).load()

    def write_parquet_of_rows(self) -> None:
        self._load().write.option("compression", "none").parquet(self._parquet_path)

    def _parquet(self) -> DataFrame:
        return self._session.read.parquet(self._parquet_path)

    def _write(self) -> Callable[[], object]:
        name = f"bench/written-{next(self._numbers)}"
        return write_stream(self._events(), self._client, self._url, name, _SEGMENTS)

    def _write_parquet(self) -> None:
        write_parquet(self._events(), self._written)

    def _events(self) -> DataFrame:
        return self._parquet().select("event", "routing_key")

    def _decode(self) -> None:
        read(self._load(_SCHEMA, serializer="json"))

    def _from_json(self) -> None:
        events = self._load(columns="event")
        read(events.selectExpr(f"from_json(CAST(event AS STRING), '{_SCHEMA}') AS fields").select("fields.*"))


def _count(frame: DataFrame) -> None:
    assert frame.count() == EVENTS


def _group(load: Callable[[], DataFrame], column: str) -> None:
    assert load().groupBy(column).count().collect()

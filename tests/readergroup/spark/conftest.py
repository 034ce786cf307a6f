"""One session of Spark for all tests of a run; where there is no Java, each of them is left out and says why.

With ``-n`` these tests do not run: each worker would start a Spark of its own, and take the processors from the others.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import readergroup as rg
from readergroup.spark import check_java, local_session
from tests.readergroup.spark.streams import SETTINGS, STREAM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first one waits for the session, and an answer of Java that is not awaited confuses all those after it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a session needs of its surroundings, also one in another process."""
    try:
        check_java()
    except rg.UnsupportedError as error:
        pytest.skip(f"the tests of Spark did not run: {error}")
    # Spark has its workers import PySpark from an archive, which has to be compiled each time: that takes most of a
    # second for each query. Without its path they find the package that is installed.
    python = tmp_path_factory.mktemp("python") / "python"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYSPARK_PYTHON", str(python))
        environment.delenv("SPARK_HOME", raising=False)
        yield


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    session = local_session(
        "local[2,3]",
        {
            **SETTINGS,
            "spark.local.dir": str(folder),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
        },
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


@pytest.fixture
def client(url: str) -> Iterator[rg.Client]:
    with rg.connect(url) as client:
        yield client


@pytest.fixture
def load(spark: SparkSession, url: str) -> Callable[..., DataFrame]:
    """A batch read of the stream with these options; ``schema`` is the user's."""

    def load(*, schema: str | None = None, **options: Any) -> DataFrame:
        reader = spark.read.format("readergroup").options(url=url, stream=STREAM).options(**options)
        return (reader.schema(schema) if schema else reader).load()

    return load

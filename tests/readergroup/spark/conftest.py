"""One session of Spark for all tests of a run; where there is no Java, each of them is left out and says why.

With ``-n`` these tests do not run: each worker would start a Spark of its own, and take the processors from the others.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession

import readergroup as rg
from readergroup.spark import check_java
from tests.readergroup.spark import prepared_workers
from tests.readergroup.spark.session import session
from tests.readergroup.spark.streams import STREAM

#: Java compiles less, and so starts earlier; it says nothing of an archive of classes that it cannot use; and it starts
#: the small programs by which Hadoop sets and reads the modes and links of files without a helper for each.
JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -Djdk.lang.Process.launchMechanism=VFORK"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first one waits for the session, and an answer of Java that is not awaited confuses all those after it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def java(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a session needs of its surroundings, also one in another process."""
    try:
        version = check_java()
    except rg.UnsupportedError as error:
        pytest.skip(f"the tests of Spark did not run: {error}")
    # Spark has its workers import PySpark from an archive, which has to be compiled each time: that takes most of a
    # second for each query. Without its path they find the package that is installed; from their daemon they have it.
    python = tmp_path_factory.mktemp("python") / "python"
    python.write_text(
        f"""#!/bin/sh
unset PYTHONPATH
[ "$2" = pyspark.daemon ] && shift 2 && set -- {shlex.quote(prepared_workers.__file__)} "$@"
exec {shlex.quote(sys.executable)} "$@"
"""
    )
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYSPARK_PYTHON", str(python))
        environment.delenv("SPARK_HOME", raising=False)
        assert (cache := request.config.cache) is not None
        classes = cache.mkdir("java-classes") / f"spark-{pyspark.__version__}-java-{version}.jsa"
        environment.setenv("JAVA_TOOL_OPTIONS", f"{JAVA_OPTIONS} -XX:SharedArchiveFile={classes}")
        with ThreadPoolExecutor(1) as pool:
            archived = None if classes.exists() else pool.submit(archive_classes, classes, tmp_path_factory.mktemp("c"))
            yield
        if archived is not None:
            archived.result()


def archive_classes(path: Path, folder: Path) -> None:
    """Java then starts with the classes that Spark takes, instead of reading each: a driver is there in half the time.

    An archive that is not there yet, or of another Java or another place, is of no use, and Java goes on without it.
    """
    archive = folder / path.name
    driver = [sys.executable, "-m", "tests.readergroup.spark.session", str(folder), str(archive)]
    environment = {**os.environ, "JAVA_TOOL_OPTIONS": JAVA_OPTIONS}
    done = subprocess.run(
        driver, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, env=environment
    )
    assert archive.exists(), done.stdout  # Java has ended: the output has
    whole = path.with_suffix(".whole")
    shutil.move(archive, whole)
    whole.rename(path)  # at once: others are being started


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    folders = {"spark.local.dir": str(folder), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    with session("local[2,3]", folders) as spark:
        yield spark


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

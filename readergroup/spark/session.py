"""Starts a session of Spark on this machine, with settings that suit a source in Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from pyspark.sql import SparkSession

from ..java import check_java
from .source import register
from .tasks import cores


def local_session(master: str = "local[*]", config: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session with the format ``readergroup``; stop it when done.

    An existing session is returned, after applying those settings that can change at run time. A shuffle makes as many
    partitions as the session has cores, unless ``spark.sql.shuffle.partitions`` is set.

    Args:
        master: The master of the session. Default: all cores of this machine.
        config: Further settings of Spark. Default: none.

    Raises:
        UnsupportedError: There is no Java that runs Spark.
    """
    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master)
    for name, value in {**_SETTINGS, **(config or {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if spark.conf.get(_SHUFFLE_PARTITIONS) == _SPARKS_DEFAULT and _SHUFFLE_PARTITIONS not in (config or {}):
        spark.conf.set(_SHUFFLE_PARTITIONS, str(cores(spark)))
    register(spark)
    return spark


_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    # Reduces the cost of a task, and of a poll of an idle query.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.pollingDelay": "100ms",
    # On a busy machine a Python worker takes longer to start than the 15 s after which Spark fails the query.
    "spark.python.authenticate.socketTimeout": "120s",
    # A query that is killed while it records its first batch leaves a part of a file, and Spark refuses to go on.
    "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
}
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
#: For a cluster. With a state store in each partition, a small streaming batch would take seconds.
_SPARKS_DEFAULT: Final = "200"

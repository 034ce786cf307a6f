"""Runs a function in tasks of a session, also through Spark Connect, which has no RDDs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.functions import spark_partition_id, udf

#: More than any session has cores.
_MANY: Final = 1 << 20


def cores(spark: SparkSession) -> int:
    """Return how many tasks the session runs at a time, by default."""
    if (context := getattr(spark, "_sc", None)) is not None:
        return int(context.defaultParallelism)
    # Only the server of Spark Connect knows, and makes as many partitions of a range.
    return spark.range(_MANY).select(spark_partition_id()).distinct().count()


def results_of_tasks(spark: SparkSession, function: Callable[[int], Any], tasks: int, returns: str) -> list[Any]:
    """Call the function with each number below ``tasks``, in a task each, and return the results in any order.

    ``returns`` is the Spark type of a result, which may be null.
    """
    called = udf(function, returns, useArrow=False).asNondeterministic()
    rows = spark.range(0, tasks, 1, tasks).select(called("id").alias("result")).collect()
    return [row.result for row in rows]

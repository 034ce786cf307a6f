"""What a record of notifications says about its groups: `readergroup.record.analyses`, each group in a task of Spark.

The frames that they take have the columns of the format ``readergroup-notifications``, of any number of groups; they
may be read from the record, or from tables that were made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import ArrayType

from ..record import analyses
from ..record.analyses import HOUR_SECONDS
from ..record.arrow import SCHEMA


def scaling_frequency(notifications: DataFrame, *, window_seconds: int = HOUR_SECONDS) -> DataFrame:
    """How often each group scaled, per window in which it did anything: by default per hour, of UTC."""
    analysis = partial(analyses.scaling_frequency, window_seconds=window_seconds)
    return _of_each_group(notifications, analysis, analyses.SCALING_FREQUENCY)


def reaction_times(notifications: DataFrame) -> DataFrame:
    """For each change of the number of segments, how long it took until the number of readers followed."""
    return _of_each_group(notifications, analyses.reaction_times, analyses.REACTION_TIMES)


def backlog_trend(notifications: DataFrame, *, window_seconds: int = HOUR_SECONDS) -> DataFrame:
    """How large the backlog of each group was and how fast it grew, per window with samples of it."""
    analysis = partial(analyses.backlog_trend, window_seconds=window_seconds)
    return _of_each_group(notifications, analysis, analyses.BACKLOG_TREND)


def _of_each_group(
    notifications: DataFrame, analysis: Callable[[pyarrow.Table], pyarrow.Table], result: pyarrow.Schema
) -> DataFrame:
    rows = pyarrow.list_(pyarrow.struct(list(result)))

    def analyse(of_group: pyarrow.Array) -> pyarrow.Scalar:
        table = pyarrow.Table.from_struct_array(of_group).select(SCHEMA.names)
        return pyarrow.scalar(analysis(table.cast(SCHEMA)).to_pylist(), rows)  # times may come in another zone

    # Not applyInArrow, which wants pandas. PySpark's types do not know this kind of function yet.
    analysed = arrow_udf(analyse, ArrayType(from_arrow_schema(result)))  # type: ignore[call-overload]
    return notifications.groupBy("group").agg(analysed(F.struct("*")).alias("rows")).select(F.inline("rows"))

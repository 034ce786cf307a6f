"""The analyses of `readergroup.record.analyses` on Spark, each group in a task.

They take frames with the columns of the format ``readergroup-notifications``, of any number of groups, read from the
record or from tables made of it.
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
    """Return how often each group scaled, per window in which anything changed: by default per hour, in UTC."""
    analysis = partial(analyses.scaling_frequency, window_seconds=window_seconds)
    return _of_each_group(notifications, analysis, analyses.SCALING_FREQUENCY)


def reaction_times(notifications: DataFrame) -> DataFrame:
    """Return how long the number of readers took to follow each change of the number of segments."""
    return _of_each_group(notifications, analyses.reaction_times, analyses.REACTION_TIMES)


def backlog_trend(notifications: DataFrame, *, window_seconds: int = HOUR_SECONDS) -> DataFrame:
    """Return the backlog of each group and its growth, per window with samples: by default per hour, in UTC."""
    analysis = partial(analyses.backlog_trend, window_seconds=window_seconds)
    return _of_each_group(notifications, analysis, analyses.BACKLOG_TREND)


def _of_each_group(
    notifications: DataFrame, analysis: Callable[[pyarrow.Table], pyarrow.Table], result: pyarrow.Schema
) -> DataFrame:
    rows = pyarrow.list_(pyarrow.struct(list(result)))

    def analyse(of_group: pyarrow.Array) -> pyarrow.Scalar:
        table = pyarrow.Table.from_struct_array(of_group).select(SCHEMA.names)
        return pyarrow.scalar(analysis(table.cast(SCHEMA)).to_pylist(), rows)  # times may have another zone

    # Not applyInArrow, which needs pandas. PySpark's types do not know this kind of function yet.
    analysed = arrow_udf(analyse, ArrayType(from_arrow_schema(result)))  # type: ignore[call-overload]
    return notifications.groupBy("group").agg(analysed(F.struct("*")).alias("rows")).select(F.inline("rows"))

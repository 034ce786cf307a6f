"""Checks that the packages are there that the rest of this folder imports."""

from __future__ import annotations

from synchronizer import UnsupportedError
from synchronizer.extras import install_hint

try:
    import msgspec  # noqa: F401
    import pyarrow  # noqa: F401
    import pyspark.sql.streaming.datasource  # noqa: F401  # since 4.2
except ImportError as error:
    raise UnsupportedError(
        f"PySpark 4.2 or newer, PyArrow or msgspec is not installed; {install_hint('spark')}",
        extra="spark",
    ) from error

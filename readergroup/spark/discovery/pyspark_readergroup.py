"""Makes Spark find the format ``readergroup``: it looks for ``DefaultSource`` in top-level modules ``pyspark_*``."""

from contextlib import suppress

from synchronizer import UnsupportedError

# An error here would hide the sources of other packages too.
with suppress(UnsupportedError):
    from readergroup.spark.source import ReaderGroupSource as DefaultSource  # noqa: F401

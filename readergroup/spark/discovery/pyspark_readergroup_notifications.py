"""Makes Spark find the format ``readergroup-notifications``, as its neighbour does for ``readergroup``."""

from contextlib import suppress

from synchronizer import UnsupportedError

# An error here would hide the sources of other packages too.
with suppress(UnsupportedError):
    from readergroup.spark.notifications import NotificationSource as DefaultSource  # noqa: F401

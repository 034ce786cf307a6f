"""Streams as a source and a sink of Spark: ``register(spark)``, then ``spark.read.format("readergroup")``."""

from . import requirements as requirements  # first: it reports missing packages

# isort: split
from ..java import check_java
from . import analyses
from .copying import copy
from .ending import stop_at_end
from .listener import ProgressListener, QueryProgress
from .session import local_session
from .source import register

__all__ = [
    "ProgressListener",
    "QueryProgress",
    "analyses",
    "check_java",
    "copy",
    "local_session",
    "register",
    "stop_at_end",
]


def __dir__() -> list[str]:
    """The public names, without the modules that hold them, for completion in an interpreter."""
    return __all__

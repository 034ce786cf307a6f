"""Sinks that store the effect of each event once."""

from .sql_sink import SqlSink

__all__ = ["SqlSink"]


def __dir__() -> list[str]:
    """The public names, without the modules that hold them, for completion in an interpreter."""
    return __all__

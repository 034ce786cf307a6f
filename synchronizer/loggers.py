"""The loggers of this distribution: an error of the program's logging never reaches the code that logs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

#: Reports errors as handlers do: on stderr, unless the program has turned `logging.raiseExceptions` off.
_report: Final = logging.Handler().handleError


def get_logger(name: str) -> logging.Logger:
    """Return the logger of this name, whose calls never raise an `Exception`.

    The filters and handlers of the program may raise, and our loops must not end by it.
    """
    logger = logging.getLogger(name)
    if "handle" not in vars(logger):
        # In the object, because the program's configuration may have made it, of any class.
        setattr(logger, "handle", partial(_handle, logger.handle))  # noqa: B010  mypy refuses the assignment
    return logger


def _handle(handle: Callable[[logging.LogRecord], None], record: logging.LogRecord) -> None:
    try:
        handle(record)
    except Exception:
        _report(record)

"""Calls the listeners of a membership or an election, none of which may end a thread of theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from synchronizer.callables import check_returned
from synchronizer.threads.background import raise_interrupt


def call_listener(logger: logging.Logger, listener: Callable[..., object], *arguments: object) -> None:
    """Call the listener, and log what it raises."""
    try:
        check_returned(listener(*arguments), "a listener")
    except BaseException as error:
        raise_interrupt(error, of_listener=True)
        logger.error("a listener raised: %r", listener, exc_info=error)

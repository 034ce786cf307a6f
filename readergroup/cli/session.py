"""What all commands share: the address they were given, how they fail, and how they end."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import typer
from typer.core import TyperGroup

from synchronizer import ReaderGroupError, open_store

from ..client import Client

USAGE_ERROR: Final = 2
_INTERRUPTED: Final = 130


class Failed(Exception):
    """Ends the command with one line on stderr and this exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WrongUsage(Failed):
    """The command line itself cannot be right."""

    def __init__(self, message: str) -> None:
        super().__init__(message, USAGE_ERROR)


@dataclass(frozen=True)
class Session:
    """What stands before the command's name."""

    url: str | None

    @contextmanager
    def connect(self, *, may_create: bool = False) -> Iterator[Client]:
        """The client of the store that was named. A store that ends with this command is refused.

        A file that does not exist is not made unless ``may_create``: a path that is misspelt leaves nothing behind.
        """
        if not self.url:
            raise WrongUsage("name the store: readergroup --url sqlite:///shop.db ..., or set READERGROUP_URL")
        with open_store(self.url, must_exist=not may_create) as store:
            if not store.guarantees.many_processes:
                raise WrongUsage(
                    "a store in memory ends with the command; name one that lasts, such as sqlite:///shop.db"
                )
            with Client(store) as client:
                yield client


def session(context: typer.Context) -> Session:
    found = context.find_object(Session)
    assert found is not None
    return found


class Commands(TyperGroup):
    """Commands that fail with one line on stderr: exit code 2 for a wrong command line, 1 for everything else."""

    def main(self, *args: Any, **options: Any) -> Any:
        options["standalone_mode"] = False
        try:
            exit_code = super().main(*args, **options)
            sys.stdout.flush()
        except BrokenPipeError:
            _forget_stdout()
            exit_code = 1
        except KeyboardInterrupt:
            exit_code = _INTERRUPTED
        except (ReaderGroupError, Failed, OSError) as error:
            exit_code = _fail(_one_line(error), getattr(error, "exit_code", 1))
        except typer.Abort:
            exit_code = _fail("nothing was done", 1)
        except Exception as error:
            # The classes of wrong command lines are click's, which typer has taken in at some release.
            if not hasattr(error, "format_message"):
                raise
            exit_code = _fail(error.format_message(), getattr(error, "exit_code", USAGE_ERROR))
        sys.exit(exit_code or 0)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ReaderGroupError):
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _fail(message: str, exit_code: int) -> int:
    if not message:  # the help that was asked for by saying nothing is printed already
        return exit_code
    try:
        print(f"readergroup: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
    return exit_code


def _forget_stdout() -> None:
    """Nobody reads stdout any more: what is still buffered goes nowhere, and silently."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_not_negative(value: int | None) -> int | None:
    if value is not None and value < 0:
        raise typer.BadParameter("cannot be negative")
    return value


class Interruption:
    """Whether the command was asked to end."""

    came = False


@contextmanager
def ended_by_signal(stop: Callable[[], object] = lambda: None) -> Iterator[Interruption]:
    """Inside, the first SIGINT or SIGTERM calls ``stop``, so that the command ends in order; the next one ends it."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        restore()
        interruption.came = True
        stop()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield interruption
    finally:
        restore()

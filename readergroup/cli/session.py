"""The common part of all commands: the address of the store, errors, and signals."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, Generic, TypeVar

import typer
from typer.core import TyperGroup

import readergroup as rg
from synchronizer import InvalidArgumentError, NotFoundError, ReaderGroupError, SegmentStore, open_store
from synchronizer.threads.background import BackgroundThread

from .escaping import printable
from .exit_codes import INTERRUPTED, USAGE_ERROR
from .screen import warn

T = TypeVar("T")

_SHOW_CURSOR: Final = b"\x1b[?25h"
#: How long an interrupted command ends silently before it reports that it is still ending.
_PATIENCE_SECONDS: Final = 2.0
#: What errors of the library recommend, and the commands that do it.
_COMMANDS: Final[Mapping[str, str]] = {
    "create it with streams.create": "create it with 'readergroup stream create'",
    "the stream has no retention policy; change it with streams.configure": (
        "the stream has no retention policy; set one with 'readergroup stream configure'"
    ),
    "split or merge them with streams.scale, then call streams.configure with this policy": (
        "split or merge them with 'readergroup stream scale', then run 'readergroup stream configure --no-scaling'"
    ),
    "change it with streams.configure": "change it with 'readergroup stream scale' or 'readergroup stream configure'",
    "complete it with streams.copy": "complete it with 'readergroup stream copy'",
    "discard it with streams.delete": "discard it with 'readergroup stream delete'",
    "create it with groups.create": (
        "'readergroup group list' prints the names; create it with 'readergroup group create'"
    ),
    "change it with group.configure, or delete it first": (
        "change it with 'readergroup group configure', or delete it with 'readergroup group delete'"
    ),
    ", then open another reader": "",
    "use by='events'": "use --by events",
    'they need consumed_by="subscribers"': "they need --retention-consumed-by subscribers",
}


class Failed(Exception):
    """Ends the command with one line on stderr and this exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WrongUsage(Failed):
    """The command line itself is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, USAGE_ERROR)


@dataclass(frozen=True)
class Session:
    """The options before the command's name."""

    url: str | None

    @contextmanager
    def connect(self, *, may_create: bool = False) -> Iterator[rg.Client]:
        """Provide a client of the given store. Refuse a store that would end with this command.

        Create no store unless ``may_create``, so that a misspelt address leaves nothing behind.
        """
        if not self.url:
            raise WrongUsage("no store is given; use readergroup --url sqlite:///shop.db ..., or set READERGROUP_URL")
        with self._open(self.url, may_create) as store:
            if not store.guarantees.many_processes:
                raise WrongUsage(
                    "a store in memory ends with the command; use a durable store, such as sqlite:///shop.db"
                )
            with rg.Client(store) as client:
                yield client

    def _open(self, url: str, may_create: bool) -> SegmentStore:
        try:
            return open_store(url, must_exist=not may_create)
        except NotFoundError as error:
            if may_create:
                raise
            raise Failed(
                f"{error} (to create a store, use 'readergroup stream create' or 'readergroup config put')"
            ) from error


def session(context: typer.Context) -> Session:
    found = context.find_object(Session)
    assert found is not None
    return found


@contextmanager
def expected_to_exist(kind: str) -> Iterator[None]:
    """In an error, name the command that lists what exists. Errors of the library say how to create what is missing."""
    try:
        yield
    except NotFoundError as error:
        found, _, _ = error.message.partition(";")
        raise NotFoundError(f"{found}; 'readergroup {kind} list' prints the names", **error.facts) from error


class Commands(TyperGroup):
    """Commands that fail with one line on stderr: exit code 2 for a wrong option or value, 1 for everything else."""

    def resolve_command(self, context: typer.Context, arguments: list[str]) -> Any:  # type: ignore[override]
        name = arguments[0]
        if name not in self.commands and not name.startswith("-") and not get_close_matches(name, self.commands):
            raise WrongUsage(f"there is no command {name!r}; {self._what_there_is(name, context.command_path)}")
        return super().resolve_command(context, arguments)

    def _what_there_is(self, name: str, path: str) -> str:
        groups = [group for group, each in self.commands.items() if name in getattr(each, "commands", ())]
        found = [f"'{path} {group} {name}'" for group in groups]
        if found:
            return f"there is {', '.join(found)}"
        shown = [name for name, each in self.commands.items() if not each.hidden]
        return f"'{path} --help' lists those that there are: {', '.join(shown)}"

    def main(self, *args: Any, **options: Any) -> Any:
        options["standalone_mode"] = False
        try:
            exit_code = super().main(*args, **options)
            sys.stdout.flush()
        except BrokenPipeError:
            exit_code = 1
        except KeyboardInterrupt:
            exit_code = INTERRUPTED
        except (ReaderGroupError, Failed, OSError) as error:
            exit_code = _fail(_what_failed(error), _exit_code_of(error))
        except typer.Abort:
            exit_code = _fail("cancelled, nothing was done", 1)
        except Exception as error:
            # The errors of wrong command lines are click's; some releases of typer have their own copies.
            if not hasattr(error, "format_message"):
                raise
            exit_code = _fail(_with_place(error), getattr(error, "exit_code", USAGE_ERROR))
        _forget_what_cannot_be_printed()
        sys.exit(exit_code or 0)


def _exit_code_of(error: BaseException) -> int:
    return USAGE_ERROR if isinstance(error, InvalidArgumentError) else getattr(error, "exit_code", 1)


def _with_place(error: Any) -> str:
    said: str = error.format_message()
    misplaced = said.startswith("No such option") and error.option_name == "--url"
    return f"{said}; --url belongs before the command: readergroup --url sqlite:///shop.db ..." if misplaced else said


def _what_failed(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ReaderGroupError):
        if error.errno == errno.EBADF:
            return "standard input or output is closed; give the command a file, or /dev/null"
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return one_line(str(error))


def one_line(text: str) -> str:
    """Return the text of an error on one line, with commands in place of the calls that it recommends."""
    text = " ".join(text.split())
    for call, command in _COMMANDS.items():
        text = text.replace(call, command)
    return text


def _fail(message: str, exit_code: int) -> int:
    if not message:  # a command line without arguments has printed the help already
        return exit_code
    try:
        print(f"readergroup: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
    return exit_code


def _forget_what_cannot_be_printed() -> None:
    """Discard the output that is left after an error of stdout. Python would try again at its exit, and tell of it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_not_negative(value: int | None) -> int | None:
    if value is not None and value < 0:
        raise typer.BadParameter("must not be negative")
    return value


class _Interrupted(BaseException):
    """A signal has ended a wait for the next item. No ``except Exception`` on its way may stop it."""


class UntilInterrupted(Generic[T]):
    """Iterates over items until `stop` is called, for signals of the block of `ended_by_signal`.

    A signal ends a wait for the next item, and nothing else: what the loop does with an item is done as a whole.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._is_stopped = self._is_waiting = False

    def stop(self) -> None:
        self._is_stopped = True
        if self._is_waiting:
            self._is_waiting = False
            raise _Interrupted

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            self._is_waiting = True
            if self._is_stopped:
                raise StopIteration
            item = next(self._items)
            self._is_waiting = False
        except _Interrupted:
            raise StopIteration from None
        except BaseException:
            self._is_waiting = False
            raise
        return item


class Interruption:
    """Tells whether a signal has interrupted the command."""

    came = False


@contextmanager
def ended_by_signal(stop: Callable[[], object] = lambda: None) -> Iterator[Interruption]:
    """Let the first SIGINT or SIGTERM in the block call ``stop``, to end in order; the next one ends at once."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    asked: SimpleQueue[bool] = SimpleQueue()  # safe in signal handlers
    BackgroundThread(partial(_say_if_it_takes_long, asked), name="interruption").start()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, _end_at_once)
        interruption.came = True
        asked.put(True)
        stop()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield interruption
    finally:
        asked.put(False)
        restore()


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process without closing anything, since that would wait for a store that does not answer."""
    if os.isatty(sys.stderr.fileno()):
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)  # a progress bar may have hidden it
    os._exit(INTERRUPTED)


def _say_if_it_takes_long(asked: SimpleQueue[bool]) -> None:
    """Wait until the command is interrupted or has ended; warn if it then takes long to end."""
    if not asked.get():
        return
    try:
        asked.get(timeout=_PATIENCE_SECONDS)
    except Empty:
        warn("the command waits for the store or its timeout; a second Ctrl-C or SIGTERM ends it now")

"""A worker of a pool in a process of its own: the parent's handle, and the code of the child.

Parent and child talk through a pipe: "stop", "end" and `Deaths` go to the child, `Ready`, `Done` and `Failure` come
back. A broken pipe means that the other side is gone, so a child never outlives its parent for long. Shared memory
shows the parent which events the child is handling.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import pickletools
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from synchronizer import InvalidArgumentError, StoreUnavailableError
from synchronizer.loggers import get_logger
from synchronizer.recipes.queue.retries import text_of
from synchronizer.stores.forking import forks_wait, own
from synchronizer.threads.background import BackgroundThread
from synchronizer.threads.flag import Flag

from ..errors import WorkerError
from ..group.model.positions import Positions
from .handlers import end_process
from .in_hand import InHand, SharedHand
from .starting_worker import new_worker
from .worker import Task, Worker

_logger = get_logger(__name__)

#: How long a worker whose parent died may take to finish the events in hand.
ORPHAN_SECONDS: Final = 10.0
#: How long an aborted worker may take to leave its group before it is killed.
LEAVE_SECONDS: Final = 1.0
#: How long a worker waits for a message that its parent has sent.
_MESSAGE_SECONDS: Final = 10.0

_OF_LIMITS: Final = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)

# Spawn: a fork would copy the locks of other threads and of open stores in the state that they are in.
_spawn = multiprocessing.get_context("spawn")


def pickled(task: Task[Any]) -> bytes:
    """Return the task as bytes for a worker process; `InvalidArgumentError` names the part that does not pickle."""
    if multiprocessing.current_process().daemon:
        raise InvalidArgumentError(
            "a daemonic process, such as one of multiprocessing.Pool or a worker process of a pool, cannot start "
            "others; start this one with daemon=False, or use workers='thread'",
            process=multiprocessing.current_process().name,
        )
    for name in ("handle", "handle_batch", "serializer", "sink"):
        value = getattr(task, name)
        try:
            data = pickle.dumps(value)
        except Exception as error:
            raise InvalidArgumentError(
                "worker processes need values that can be pickled, such as a function at the top of a module; "
                "or use workers='thread'",
                **{name: repr(value)},
            ) from error
        if not _main_can_be_loaded() and any(argument == "__main__" for _, argument, _ in pickletools.genops(data)):
            raise InvalidArgumentError(
                "worker processes cannot load what a notebook, 'python -c' or 'python -m' of a package defines; put it "
                "into a module and import it, or use workers='thread'",
                **{name: repr(value)},
            )
    return pickle.dumps(task)


def _main_can_be_loaded() -> bool:
    """Return whether a new process can load the main module, as `multiprocessing` decides."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name).rpartition(".")[2] != "__main__"
    return file is not None and os.path.exists(file)


class Deaths(NamedTuple):
    """How many workers have died over these events."""

    what: InHand
    number: int


@dataclass(frozen=True)
class Ready:
    """The worker has joined the group."""


@dataclass(frozen=True)
class Done:
    """The worker has ended without an error."""


@dataclass(frozen=True)
class Failure:
    """An error for another process, with its cause and traceback, which pickling alone would lose."""

    error: PickledError
    cause: PickledError | None
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        cause, trace = error.__cause__, "".join(traceback.format_exception(error))
        return cls(PickledError.of(error), None if cause is None else PickledError.of(cause), trace)

    def rebuilt(self) -> BaseException:
        error = self.error.loaded()
        error.__cause__ = None if self.cause is None else self.cause.loaded()
        error.add_note(f"In the worker process:\n{self.trace}")
        return error


@dataclass(frozen=True)
class PickledError:
    """An error as bytes, which the other process may be unable to load, and as a text."""

    data: bytes
    text: str

    @classmethod
    def of(cls, error: BaseException) -> PickledError:
        try:
            data = pickle.dumps(error)
        except Exception:
            data = b""
        return cls(data, text_of(error))

    def loaded(self) -> BaseException:
        with contextlib.suppress(Exception):
            error = pickle.loads(self.data)
            if isinstance(error, BaseException):
                return error
        return RuntimeError(self.text)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Raise `StoreUnavailableError` if the system refuses what a process needs."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_LIMITS:
            advice = "end other processes, or raise the limits of this user on processes and open files"
        else:
            advice = "see whether the directory of the program, its Python and /dev/shm are there and can be used"
        raise StoreUnavailableError(f"the system cannot start another process; {advice}", error=str(error)) from error


@contextlib.contextmanager
def _holding_interrupts_back() -> Iterator[None]:
    """Let a process that is started here get no SIGINT before `work_in_process` lets it through.

    A Ctrl-C goes to all processes of a terminal. It would end the new one while it loads its modules.
    """
    resource_tracker.ensure_running()  # else it starts with the process, and lets the signal through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessWorker:
    """A worker process. Reading `alive` also receives the messages of the process."""

    def __init__(self, task: bytes, reader_id: str, deaths: Sequence[Deaths], slots: int = 1) -> None:
        self.reader_id = reader_id
        with _starting():
            self._hand = SharedHand(slots)
            with forks_wait:
                self._pipe, self._theirs = _spawn.Pipe()
                own(self._pipe)  # else a child that the program forks would keep it open, and the worker running
        self.stopping = False
        self._failure: BaseException | None = None
        self._ready = self._is_done = False
        # Daemonic, so that a program that ends without stopping its pool does not wait for its children.
        self._process = _spawn.Process(
            target=work_in_process,
            args=(task, reader_id, self._theirs, self._hand, deaths),
            name=f"worker {reader_id}",
            daemon=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def alive(self) -> bool:
        alive = self._process.is_alive() and self._exists()
        self._receive()
        return alive

    def _exists(self) -> bool:
        """Return whether the system knows the process: `multiprocessing` cannot tell once others took its exit code.

        A program that ignores SIGCHLD, or that waits for all of its children, takes them.
        """
        try:
            with contextlib.suppress(PermissionError):  # it has another user now
                os.kill(self.pid, 0)
        except ProcessLookupError:
            # At exit, multiprocessing would send SIGTERM to a child that it takes for running: to a stranger by then.
            multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
            return False
        return True

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the worker; None after the end of the data or a stop."""
        if self._failure is not None:
            return self._failure
        code = self._process.exitcode
        if code is None and not self._is_done and not self._exists():
            return ChildProcessError(f"the process {self.pid} ended, and the program has taken its exit code")
        if not code:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        if self._ready or code < 0:
            return ChildProcessError(f"the process {self.pid} {how}")
        return WorkerError(
            "a worker process could not start; see its output. The program that runs the pool must do so under "
            "if __name__ == '__main__'",
            exit_code=code,
        )

    @property
    def left_in_hand(self) -> Sequence[InHand]:
        return self._hand.found

    @property
    def reached(self) -> Positions:
        return self._hand.reached

    def start(self) -> None:
        try:
            with _starting(), _holding_interrupts_back():
                self._process.start()
        except StoreUnavailableError:
            self._pipe.close()
            raise
        finally:
            self._theirs.close()

    def tell(self, deaths: Deaths) -> None:
        """Send the worker these deaths. It begins no batch that it reads later before it knows of them."""
        self._hand.deaths_sent.value += 1
        self._send(deaths)

    def stop(self) -> None:
        """Ask the worker to end after the event in hand."""
        self.stopping = True
        self._send("stop")

    def end(self) -> None:
        """End the worker now: abort its handler, and kill the process if that does not help."""
        if not self.pid:
            return  # it was not started
        try:
            self._send("end")
            self._process.join(LEAVE_SECONDS)
        finally:  # even if the wait is interrupted
            if self.alive:
                self._process.kill()
            self._process.join()
            self._receive()

    def _send(self, message: str | Deaths) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._pipe.send(message)

    def _receive(self) -> None:
        try:
            while self._pipe.poll():
                message = self._pipe.recv()
                if isinstance(message, Failure):
                    self._failure = message.rebuilt()
                elif isinstance(message, Done):
                    self._is_done = True
                else:
                    self._ready = True
        except (EOFError, OSError):
            self._pipe.close()  # it has ended

    def __repr__(self) -> str:
        return f"ProcessWorker({self.reader_id!r}, pid {self.pid})"


# ---------------------------------------------------------------------- in the child


def work_in_process(task: bytes, reader_id: str, pipe: Connection, hand: SharedHand, deaths: Sequence[Deaths]) -> None:
    """Run a worker process from start to end."""
    parent = _Parent(pipe, hand)
    process_id, about = os.getpid(), {"reader": reader_id}
    signal.signal(signal.SIGINT, lambda number, frame: None)  # a Ctrl-C goes to all; the parent says what to do
    signal.signal(signal.SIGTERM, parent.on_terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    BackgroundThread(parent.listen, name="parent").start()
    try:
        unpickled: Task[Any] = pickle.loads(task)
        about["group"] = unpickled.group.name
        with unpickled.client:
            worker = new_worker(unpickled, reader_id, hand)
            worker.receive_deaths = parent.receive_deaths
            for each in deaths:
                worker.note_deaths(*each)
            parent.work_for(worker)
            worker.run(lambda: parent.tell(Ready()))
        if os.getpid() == process_id:  # else it is a child of a handler
            parent.tell(Done())
    except BaseException as error:
        if os.getpid() == process_id:
            parent.tell(Failure.of(error))
    finally:
        parent.done.set()
    with contextlib.suppress(StoreUnavailableError):  # there is no thread
        BackgroundThread(partial(_end_without_threads, about), name="end").start()


def _end_without_threads(about: Mapping[str, str]) -> None:
    """End the process although threads that handlers have started still run: the interpreter would wait for them."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join(ORPHAN_SECONDS)
            if thread.is_alive():
                _logger.warning(
                    "the process of worker %s ends without the thread %s, which a handler has left",
                    *(about["reader"], thread.name),
                    extra=about,
                )
                end_process(0)


class _Parent:
    """The parent process as its worker sees it."""

    def __init__(self, pipe: Connection, hand: SharedHand) -> None:
        self.done = Flag()
        self._pipe = pipe
        self._hand = hand
        self._ending = False
        self._stopped = False
        self._worker: Worker[Any] | None = None
        self._deaths: list[Deaths] = []  # all so far; some may arrive before there is a worker
        self._deaths_noted = 0
        self._noted = Flag()  # set at each death noted

    def work_for(self, worker: Worker[Any]) -> None:
        """Pass the parent's messages on to the worker, earlier ones too."""
        self._worker = worker
        for each in self._deaths:
            worker.note_deaths(*each)
        if self._stopped:
            worker.stop()

    def tell(self, message: Ready | Done | Failure) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            self._pipe.send(message)

    def receive_deaths(self) -> None:
        """Wait until the worker knows of every death that the parent has sent so far.

        The parent sends a death before it releases the segments of the dead worker.
        """
        sent = self._hand.deaths_sent.value
        while self._deaths_noted < sent:
            self._noted.clear()
            if self._deaths_noted < sent and not self._noted.wait(_MESSAGE_SECONDS):
                return  # the parent died before it could send it

    def listen(self) -> None:
        """Obey the parent until it is gone, then end this process. Runs in a thread."""
        try:
            while True:
                message = self._pipe.recv()
                if isinstance(message, Deaths):
                    self._note(message)
                elif message == "stop":
                    self._request_stop()
                else:
                    self._break_off()
        except (EOFError, OSError):
            self._request_stop()
        if not self.done.wait(ORPHAN_SECONDS):
            self._break_off()
        if not self.done.wait(LEAVE_SECONDS):
            os._exit(1)

    def on_terminate(self, number: int, frame: object) -> None:
        if self._ending:
            raise SystemExit("the worker did not end in time")
        # In a thread: the interrupted main thread may hold the locks that stopping needs.
        BackgroundThread(self._request_stop, name="stop").start()

    def _note(self, deaths: Deaths) -> None:
        self._deaths.append(deaths)  # first, because `work_for` may be running
        if self._worker is not None:
            self._worker.note_deaths(*deaths)
        self._deaths_noted += 1
        self._noted.set()

    def _request_stop(self) -> None:
        self._stopped = True
        if self._worker is not None:
            self._worker.stop()

    def _break_off(self) -> None:
        """Raise SystemExit in the main thread, so that it leaves the group without finishing the events in hand."""
        self._ending = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)

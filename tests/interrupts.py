"""A signal at every place where CPython lets one through, one place in each run.

Python runs signal handlers in the main thread only, and there only where the interpreter looks for them: when a Python
function begins or goes on after a yield, after a call of what is written in C, and when a loop goes back. So the call
that takes a lock and the instruction that notes this have a gap between them, while ``with lock:`` of a lock in C has
none: entering the block is one instruction, and leaving it begins with the call that lets go.

A tracer that raises could also raise where no signal ever does. Here the tracer sends a real signal instead, before an
instruction at which the interpreter looks. It does so by an index expression, after which the interpreter does not
look: the signal is let through by the instruction itself, in the function that is traced.
"""

from __future__ import annotations

import _thread
import dis
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

import pytest

#: For a test with more places than every run has time for: it divides their number by ``sparsely``.
FEW_OR_MORE: Final = pytest.mark.parametrize(
    "sparsely",
    [12, *(pytest.param(sparsely, marks=pytest.mark.broad) for sparsely in (4, 1))],
    ids=["few places", "more places", "everywhere"],
)
_LOOKS: Final = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")  # so begin their names
#: What is raised there leaves out the `with` and `finally` blocks around the loop (cpython#130279), so nothing can be
#: in order after it: `docs/operations.md` says so.
_JUMPS_LEAVE_OUT_CLEANUP: Final = sys.version_info >= (3, 13)
#: From Python 3.13 on, a run traces only the functions that a run before it has gone through to their end.
_RUNS_IN_VAIN: Final = 2 if sys.version_info >= (3, 13) else 1
_Place = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class Interrupted:
    """One run. ``error`` holds the frames of the run, as a notebook keeps them after an interrupt."""

    place: str
    error: BaseException | None


class _Sending:
    __getitem__ = _thread.interrupt_main


def interrupts(
    call: Callable[[], object],
    *,
    one_in: int = 1,
    seed: object = 0,
    before: Callable[[], object] = lambda: None,
    handler: Callable[[], object] | None = None,
) -> Iterator[Interrupted]:
    """Run ``call`` again and again, in the main thread, interrupted at another place each time.

    The caller looks after each run whether all is in order. It ends when a run meets no new place. A place is
    told apart by where the functions that lead to it were called. ``one_in`` leaves out all but every so many of them,
    from one on that ``seed`` chooses, so that several calls of a test leave out different ones.

    ``before`` is called before each run, also before those that go on behind a place where no signal comes through, of
    which the caller hears nothing. ``handler`` is what a signal does, instead of raising KeyboardInterrupt.
    """
    assert threading.current_thread() is threading.main_thread()
    met: set[_Place] = set()
    first = random.Random(str(seed)).randrange(one_in)
    in_vain = 0
    while in_vain < _RUNS_IN_VAIN:
        before()
        run = _Run(met, one_in, first, handler)
        run.begin(call)
        in_vain = in_vain + 1 if run.place is None else 0
        if run.place is None:
            assert run.error is None, f"it failed without an interrupt: {run.error!r}"
        elif run.came:
            yield Interrupted(_shown(run.place), run.take_error())


class _Run:
    def __init__(self, met: set[_Place], one_in: int, first: int, handler: Callable[[], object] | None = None) -> None:
        self._one_in = one_in
        self._handler = handler
        self._first = first
        self.place: _Place | None = None
        self.came = False
        self.error: BaseException | None = None
        self._met = met
        self._sending: Any = _Sending()
        self._base: FrameType | None = None

    def take_error(self) -> BaseException | None:
        """What was raised, which nobody else refers to from then on."""
        error, self.error = self.error, None
        return error

    def begin(self, call: Callable[[], object]) -> None:
        before = signal.signal(signal.SIGINT, self._on_signal)
        self._base = sys._getframe()
        self._base.f_trace_opcodes = True  # without it, Python 3.12 traces none
        collects = gc.isenabled()
        gc.disable()  # what is called when it collects drops what is raised there
        try:
            sys.settrace(self._trace_call)
            call()
        except BaseException as error:
            sys.settrace(None)
            self.error = error
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGINT, before)
            if collects:
                gc.enable()

    def _trace_call(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.place is not None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and self.place is None and frame.f_lasti in _looks(frame.f_code):
            place = self._place_of(frame)
            if place not in self._met:
                self._met.add(place)
                if (len(self._met) + self._first) % self._one_in == 0:
                    self.place = place
                    self._sending[signal.SIGINT]
        return self._trace

    def _place_of(self, frame: FrameType | None) -> _Place:
        place = []
        while frame is not None and frame is not self._base:
            place.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return tuple(place)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        # A RESUME of a `yield from` does not look: the signal came through in the tracer, where it is none.
        if frame is not None and frame.f_code is not _Run._trace.__code__:
            self.came = True
            if self._handler is None:
                raise KeyboardInterrupt
            self._handler()


_known: dict[CodeType, frozenset[int]] = {}


def _looks(code: CodeType) -> frozenset[int]:
    found = _known.get(code)
    if found is None and _drops(code):
        found = _known[code] = frozenset()
    if found is None:
        read = dis.Bytecode(code)
        found = _known[code] = frozenset(
            each.offset
            for each in read
            if each.opname.startswith(_LOOKS) and not (_JUMPS_LEAVE_OUT_CLEANUP and _jumps_without_cleanup(each, read))
        )
    return found


def _jumps_without_cleanup(instruction: dis.Instruction, read: dis.Bytecode) -> bool:
    """Whether a loop goes back there, and another block than that of the loop handles what is raised, or none does."""
    is_jump = instruction.opname == "JUMP_BACKWARD"
    return is_jump and handler_of(read, instruction.offset) != handler_of(read, instruction.argval)


def handler_of(read: dis.Bytecode, offset: int) -> int | None:
    """Where Python goes on with what is raised at this instruction; None: in the caller."""
    return next((each.target for each in read.exception_entries if each.start <= offset < each.end), None)


def _drops(code: CodeType) -> bool:
    """Whether Python drops what is raised in it, also an interrupt: a callback of a weak reference, or a finalizer."""
    return code.co_name == "__del__" or code.co_filename.endswith(("weakrefset.py", "weakref.py"))


def _shown(place: _Place) -> str:
    return " < ".join(f"{code.co_qualname}:{_line(code, offset)}@{offset}" for code, offset in place)


def _line(code: CodeType, offset: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= offset < end), None)

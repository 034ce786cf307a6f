"""Waits and wake-ups on a word of memory that several processes share (Linux futexes)."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any, Final

_WAIT: Final = 0
_WAKE: Final = 1
#: The number of the system call. The C library has no function for it.
_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_NUMBER: Final = _NUMBERS.get(platform.machine(), 0)


def is_available() -> bool:
    return sys.platform == "linux" and sys.maxsize > 2**32 and _NUMBER > 0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> Any:
    call = ctypes.CDLL(None).syscall
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Timespec),
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    call.restype = ctypes.c_long
    return call


_call: Final[Any] = _system_call() if is_available() else None


def wait(address: int, value: int, seconds: float) -> None:
    """Return at a wake-up or after the time. Return at once if the word at ``address`` is no longer ``value``.

    It may also return without a reason.
    """
    whole = int(seconds)
    _call(_NUMBER, address, _WAIT, value, _Timespec(whole, int((seconds - whole) * 1e9)), None, 0)


def wake(address: int) -> None:
    """Wake one thread that waits at ``address``, of any process. All writes of this thread are visible before."""
    _call(_NUMBER, address, _WAKE, 1, None, None, 0)

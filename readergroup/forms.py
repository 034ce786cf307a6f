"""Blocks and loops in the wrong form: ``async with`` over an object that blocks, ``for`` over one for asyncio.

Python's own error says only what the object does not support. Type checkers do not see the methods that are added here,
and still refuse the wrong form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, TypeVar

K = TypeVar("K", bound=type)

#: The special methods of each form, in the same order.
_PLAIN: Final[Mapping[str, Sequence[str]]] = {"with": ("__enter__", "__exit__"), "for": ("__iter__",)}
_ASYNC: Final[Mapping[str, Sequence[str]]] = {"async with": ("__aenter__", "__aexit__"), "async for": ("__aiter__",)}


def refuses_async(kind: K) -> K:
    """Make ``async with`` and ``async for`` over an object of this class raise an error that names the plain form."""
    return _refuses(kind, _PLAIN, _ASYNC, "blocks; readergroup.aio has the classes for asyncio")


def refuses_plain(kind: K) -> K:
    """Make ``with`` and ``for`` over an object of this class raise an error that names the asynchronous form."""
    return _refuses(kind, _ASYNC, _PLAIN, "is for asyncio")


def _refuses(kind: K, right: Mapping[str, Sequence[str]], wrong: Mapping[str, Sequence[str]], why: str) -> K:
    for (form, methods), (other, others) in zip(right.items(), wrong.items(), strict=True):
        if hasattr(kind, methods[0]):
            for name in others:
                setattr(kind, name, _refusal(f"use {form!r}, not {other!r}", why))
    return kind


def _refusal(advice: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: object) -> NoReturn:
        raise TypeError(f"{advice}: this {type(self).__name__} {why}")

    return refuse

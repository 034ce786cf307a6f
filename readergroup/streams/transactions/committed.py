"""The transactions in a stream's metadata: what was committed under each key, and which one is being merged. Pure.

A transaction has a *key*, which names a committer that commits one after the other, and a *number*, which grows. Its
events are staged in *parts*. A part counts for one *generation* of its key, which ends with each commit and each abort
of the key. So a part is committed once or never, and parts of an earlier generation can be deleted at any time.
"""

from __future__ import annotations

import re
from typing import Final

from synchronizer import InvalidArgumentError, Map, NotFoundError

from ..config import FrozenModel

#: How many hexadecimal digits of a part's name hold the second, since 1970, in which it was begun.
_TIME_DIGITS: Final = 8


class CommittedPart(FrozenModel):
    """One part of a transaction."""

    name: str
    #: The segments of the stream that it has events for, each once per staged segment.
    segments: tuple[int, ...]


class CommittedTransaction(FrozenModel):
    """A transaction that is committed and not merged yet."""

    #: Counts the transactions of the stream that had events.
    sequence: int
    key: str
    number: int
    generation: int
    parts: tuple[CommittedPart, ...]
    #: The bytes of all parts.
    size: int


class Committer(FrozenModel):
    """The last use of a key."""

    #: The number of its last committed transaction; -1 before the first.
    number: int = -1
    #: Counts its commits and aborts.
    generation: int = 0
    #: When it was last used, in seconds since 1970.
    at: float = 0.0
    #: The digest that was given with its last transaction.
    digest: str | None = None


class StreamTransactions(FrozenModel):
    """The transactions of a stream, as far as a client needs them."""

    sequence: int = 0
    committers: Map[str, Committer] = Map()
    open: CommittedTransaction | None = None
    #: Parts begun before this second can no longer be committed, and may be deleted.
    expired_before: int = 0

    def committer(self, key: str) -> Committer:
        known: Committer = self.committers.get(key, Committer())
        return known

    def check_parts(self, key: str, generation: int, parts: tuple[CommittedPart, ...]) -> None:
        """Refuse parts that may be deleted by now, and a part that is given twice."""
        names = [part.name for part in parts]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InvalidArgumentError("a part can be committed only once; name each part once", key=key, parts=twice)
        if parts and generation != self.committer(key).generation:
            raise NotFoundError(
                "the parts were discarded when a transaction of their key was committed or aborted; stage them again",
                key=key,
                generation=generation,
                present_generation=self.committer(key).generation,
            )
        expired = [name for name in names if begun_at(name) < self.expired_before]
        if expired:
            raise NotFoundError(
                "the parts were staged so long ago that they may be deleted; stage them again", key=key, parts=expired
            )


def part_name(at: float, chance: str) -> str:
    """Return the name of a part that is begun now. Names sort by time."""
    return f"{int(at):0{_TIME_DIGITS}x}{chance}"


def is_part_name(name: object) -> bool:
    """Return whether `part_name` may have returned this name."""
    return isinstance(name, str) and re.fullmatch(f"[0-9a-f]{{{_TIME_DIGITS},}}", name) is not None


def begun_at(name: str) -> int:
    """Return when the part was begun, in seconds since 1970."""
    return int(name[:_TIME_DIGITS], 16)

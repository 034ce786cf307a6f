"""What a stream's metadata knows of transactions: who committed what, and which one is being merged. Pure.

A transaction is known by its *key*, the name of who commits one after the other, and its *number*, which grows. Its
events are staged in *parts*; a part counts for one *generation* of its key, which ends with each commit and each abort
of the key. So a part is committed once or never, and what is left of an earlier generation can be deleted at any time.
"""

from __future__ import annotations

from typing import Final

from synchronizer import InvalidArgumentError, Map, NotFoundError

from ..config import Record

#: How many digits of the name of a part are the second, since 1970, in which it was begun, in hexadecimal.
_TIME_DIGITS: Final = 8


class CommittedPart(Record):
    """One part of a transaction."""

    name: str
    #: The segments of the stream for which it has events, each as often as there are staged segments for it.
    segments: tuple[int, ...]


class CommittedTransaction(Record):
    """A transaction that is committed and not merged yet."""

    #: Counts the transactions of the stream that had events.
    sequence: int
    key: str
    number: int
    generation: int
    parts: tuple[CommittedPart, ...]
    #: The bytes of all parts.
    size: int


class Committer(Record):
    """What is remembered of a key."""

    #: Of its last committed transaction; -1 before the first.
    number: int = -1
    #: Counts its commits and aborts.
    generation: int = 0
    #: When it was last used, in seconds since 1970.
    at: float = 0.0


class StreamTransactions(Record):
    """The transactions of a stream, as far as anybody has to know of them."""

    sequence: int = 0
    committers: Map[str, Committer] = Map()
    open: CommittedTransaction | None = None
    #: Parts that were begun before this second are not committed any more: they may be deleted.
    expired_before: int = 0

    def committer(self, key: str) -> Committer:
        known: Committer = self.committers.get(key, Committer())
        return known

    def check_parts(self, key: str, generation: int, parts: tuple[CommittedPart, ...]) -> None:
        """Refuse parts that may be deleted by now, and one that is given twice."""
        names = [part.name for part in parts]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InvalidArgumentError("a part is committed once; name each part once", key=key, parts=twice)
        if parts and generation != self.committer(key).generation:
            raise NotFoundError(
                "the parts were given up when a transaction of their key was committed or aborted; stage them again",
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
    """The name of a part that is begun now. Names are in the order of their times."""
    return f"{int(at):0{_TIME_DIGITS}x}{chance}"


def begun_at(name: str) -> int:
    """When the part was begun, in seconds since 1970."""
    return int(name[:_TIME_DIGITS], 16)

"""Writes the events of dead letters back to one stream, each once, however often and in however many processes.

The events are written as an outbox writes its rows (`readergroup.outbox.publishing`): the append of an event also
records its letter in an attribute of the segment, under the fencing token of the lock that this process holds. So
whatever dies after an append, the next holder of the lock finds the letter there; and from its beginning on, every
append of an earlier holder fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from synchronizer import UnsupportedError
from synchronizer.backoff import Backoff

from ..outbox.publishing import Publisher
from ..outbox.table import Row
from ..streams.config import number_of
from ..streams.event import EventPointer
from ..streams.manager import StreamManager

#: A letter as a number: that of its segment, and its offset in as many bits.
_OFFSET_BITS: Final = 43
_SEGMENT_BITS: Final = 20


class Replay:
    """Writes letters of one stream of dead letters back to one stream. For one thread.

    Args:
        streams: The streams.
        letters: The stream of dead letters and its incarnation.
        origin: The stream that the events came from.
        token: The fencing token of the lock of the dead letters.
        replayed: Called with letters that are in the stream, and marks them durably as replayed.
        timeout: Seconds to wait for the store in each step. Default: the client's.
    """

    def __init__(
        self,
        streams: StreamManager,
        letters: tuple[str, str],
        origin: str,
        token: int,
        replayed: Callable[[Collection[int]], object],
        timeout: float | None = None,
    ) -> None:
        replay_id = hashlib.sha256("\n".join(letters).encode()).digest()[:16]
        self._publisher = Publisher(streams, origin, replay_id, token, timeout)
        self._metadata = streams.metadata
        self._timeout = timeout
        self._replayed = replayed

    def settle(self) -> Collection[int]:
        """Mark what an earlier replay has written; from now on it can write nothing. Return the letters it wrote."""
        return self._backoff().retry(self._settle)

    def _backoff(self) -> Backoff:
        return self._metadata.backoff(self._metadata.deadline(self._timeout))

    def _settle(self) -> Collection[int]:
        found = self._publisher.begin()
        if found:
            self._replayed(found.keys())
        self._publisher.deleted()
        return found.keys()

    def run(self, rows: Mapping[int, Row]) -> None:
        """Write the rows that are not in the stream, in their order, and mark all of them."""
        left = dict(rows)
        while left:
            self._backoff().retry(partial(self._write, left))

    def _write(self, left: dict[int, Row]) -> None:
        """Write some of the rows that are left, and remove them from ``left``.

        May be repeated after an error: then the publisher begins again, and finds what is in the stream.
        """
        if not self._publisher.has_begun:
            for each in self._settle():
                left.pop(each, None)
        stored = self._publisher.publish(left.values())
        if stored:
            self._replayed(stored)
        if self._publisher.has_begun:
            self._publisher.deleted()
        for each in stored:
            del left[each]


def letter_id(pointer: EventPointer) -> int:
    """Return the number of the letter at ``pointer``, for rows."""
    segment = number_of(pointer.segment)
    if segment >> _SEGMENT_BITS or pointer.offset >> _OFFSET_BITS:
        raise UnsupportedError("the stream of dead letters is too long to replay from", pointer=str(pointer))
    return segment << _OFFSET_BITS | pointer.offset


def place_of(letter: int) -> tuple[int, int]:
    """Return the number of the segment and the offset of a letter."""
    return letter >> _OFFSET_BITS, letter & (1 << _OFFSET_BITS) - 1

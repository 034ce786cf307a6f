"""Compaction: writes the state as one snapshot, from which reloads start, and truncates the log before."""

from __future__ import annotations

import random
import secrets
from typing import Final, Generic

from ..clock import Deadline
from ..errors import AlreadyExistsError, NotFoundError, ReaderGroupError, UnknownUpdateError
from ..loggers import get_logger
from ..state import S
from .entries import Mark
from .follower import LogFollower

_logger = get_logger(__name__)

#: An automatic compaction is due when the log since the mark has this many bytes, or this many times the bytes of the
#: last snapshot if that is more.
COMPACTION_BYTES: Final = 512 * 1024
COMPACTION_FACTOR: Final = 2


class Compactor(Generic[S]):
    """Compacts the log that ``follower`` follows, on request or when it is due."""

    def __init__(self, follower: LogFollower[S], compaction_bytes: int | None, rng: random.Random) -> None:
        self._follower = follower
        self._log = follower.log
        self._compaction_bytes = compaction_bytes
        # All processes apply the same log, so each has a threshold of its own: then only one of them compacts.
        self._stagger = 1 + rng.random() / 2
        self._size = 0  # of the last snapshot that this process made
        self._compacting = False
        self._due = 0  # the log length from which on a compaction is due
        self._schedule()

    def compact(self, deadline: Deadline, *, keep_last: bool = True) -> bool:
        """Compact the log; return whether this call moved the mark. Without ``keep_last``, truncate all of the log."""
        replica = self._follower.fetch(deadline)
        old = self._follower.mark = self._follower.retry(deadline, self._log.mark)
        if replica.next_offset == self._follower.begins_at or (old is not None and old.revision >= replica.revision):
            return False
        state_format = self._follower.codec.state_type.state_format
        if old is not None and old.state_format > state_format:
            raise UnknownUpdateError(
                "a newer release compacted this state; deploy that release here", segment=self._log.segment
            )
        body = self._follower.codec.encode_snapshot(replica.state, replica.checksum)
        self._size = len(body)
        name = secrets.token_hex(8)
        try:
            snapshot = self._follower.retry(deadline, lambda: self._log.write_snapshot(replica.revision, name, body))
        except (NotFoundError, AlreadyExistsError):
            return False  # another process has moved the mark, and deleted this snapshot
        new = Mark(replica.revision, replica.next_offset, snapshot, state_format)
        if not self._follower.retry(deadline, lambda: self._log.move_mark(old, new)):
            self._follower.retry(deadline, lambda: self._log.store.forget(snapshot))
            return False
        self._follower.mark = new
        # The log since the old mark stays, so a process that is less than one compaction behind need not reload.
        start = (old.next_offset if old else 0) if keep_last else new.next_offset
        self._follower.retry(deadline, lambda: self._log.truncate(start))
        self._follower.retry(deadline, lambda: self._log.delete_snapshots(new))
        return True

    def compact_if_due(self, deadline: Deadline) -> None:
        if self._compaction_bytes is None or self._follower.replica.next_offset < self._due:
            return
        begun = False
        try:
            with self._follower.lock:
                if self._compacting:
                    return
                self._compacting = begun = True
            self._follower.mark = self._follower.retry(deadline, self._log.mark)
            self._schedule()  # another process may have compacted
            if self._follower.replica.next_offset >= self._due:
                self.compact_or_warn(deadline)
                self._schedule(tried=True)
        except ReaderGroupError as error:
            _logger.warning("compaction of %s failed: %s", self._log.segment, error)
        finally:
            if begun:
                self._compacting = False

    def compact_or_warn(self, deadline: Deadline, *, keep_last: bool = True) -> None:
        """Compact, and log a failure instead of raising it: the caller's update is stored already."""
        try:
            self.compact(deadline, keep_last=keep_last)
        except ReaderGroupError as error:
            _logger.warning("compaction of %s failed: %s", self._log.segment, error)
        except Exception as error:  # of the user's code that writes, reads or compares a part of the state
            _logger.warning("compaction of %s failed: %r", self._log.segment, error, exc_info=error)

    def _schedule(self, *, tried: bool = False) -> None:
        if self._compaction_bytes is None:
            return
        step = max(self._compaction_bytes, COMPACTION_FACTOR * self._size) * self._stagger
        self._due = int(self._follower.compacted_upto + step)
        if tried:  # the attempt may have failed: do not repeat it at every update
            self._due = max(self._due, self._follower.replica.next_offset + self._compaction_bytes // 4)

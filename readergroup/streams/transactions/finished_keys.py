"""Keys of transactions that nobody will ask for again. The metadata of a stream forgets them with the next commit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from synchronizer import ReaderGroupError

from ..metadata import StreamMetadata
from ..state import ForgetTransactions, StreamState


class FinishedKeys:
    """The keys of one client, for each stream. Threads may share it.

    If the process dies before a key is forgotten, the stream forgets it when it is old.
    """

    def __init__(self, metadata: StreamMetadata) -> None:
        self._metadata = metadata
        self._keys: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def add(self, state: StreamState, key: str) -> None:
        """Let the next commit of this client forget the key. ``state`` has seen the end of its transaction."""
        if key in state.known_transactions.committers:
            with self._lock:
                self._keys.setdefault(state.name, set()).add(key)

    def updates(self, state: StreamState) -> Sequence[ForgetTransactions]:
        """The update, if any, that lets the stream forget its keys. Call `are_forgotten` when it is stored."""
        with self._lock:
            finished = sorted(self._keys.get(state.name, ()))
        keys = tuple(key for key in finished if key in state.known_transactions.committers)
        return [ForgetTransactions(keys=keys)] if keys else []

    def are_forgotten(self, stream: str, updates: Iterable[ForgetTransactions]) -> None:
        """These updates, from `updates`, are stored."""
        with self._lock:
            for update in updates:
                self._keys[stream].difference_update(update.keys)

    def forget_now(self, stream: str) -> None:
        """Let the stream forget its keys now. If that fails, it forgets them when they are old."""
        with self._lock:
            if not self._keys.get(stream):
                return
        deadline = self._metadata.deadline()
        try:
            forgotten = self._metadata.existing(stream, deadline).update_state_returning(
                lambda state: (updates := self.updates(state), updates), timeout=deadline.remaining()
            )
        except ReaderGroupError:
            return
        self.are_forgotten(stream, forgotten)

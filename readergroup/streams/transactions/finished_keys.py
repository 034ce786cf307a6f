"""Keys of finished transactions that no client will ask for. The next commit removes them from a stream's metadata."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from synchronizer import ReaderGroupError

from ..metadata import StreamMetadata
from ..state import ForgetTransactions, StreamState


class FinishedKeys:
    """The finished keys of one client, by stream. Threads may share it.

    If the process dies before a key is forgotten, the stream forgets it when it is old.
    """

    def __init__(self, metadata: StreamMetadata) -> None:
        self._metadata = metadata
        self._keys: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def add(self, state: StreamState, key: str) -> None:
        """Let the next commit of this client forget the key. ``state`` shows that its transaction is over."""
        if key in state.transactions.committers:
            with self._lock:
                self._keys.setdefault(state.name, set()).add(key)

    def updates(self, state: StreamState) -> Sequence[ForgetTransactions]:
        """Return the update, if any, that forgets finished keys of the stream. Call `are_forgotten` when stored."""
        with self._lock:
            finished = sorted(self._keys.get(state.name, ()))
        keys = tuple(key for key in finished if key in state.transactions.committers)
        return [ForgetTransactions(keys=keys)] if keys else []

    def are_forgotten(self, stream: str, updates: Iterable[ForgetTransactions]) -> None:
        """Drop the keys of these updates, from `updates`, which are stored."""
        with self._lock:
            for update in updates:
                self._keys[stream].difference_update(update.keys)

    def forget_now(self, stream: str) -> None:
        """Forget the stream's finished keys now. If that fails, the stream forgets them when they are old."""
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

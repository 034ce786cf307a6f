"""Complete changes announced in a stream's metadata: a creation or scale, a seal, the merge of a transaction.

There is no controller. A change of a stream that touches the store is announced by one update of its metadata, then
carried out, then published by a second one. Every step can be repeated, so any client can complete the changes of
another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from synchronizer import (
    AlreadyExistsError,
    Deadline,
    DeadlineExceededError,
    NotFoundError,
    ReaderGroupError,
    SealedError,
    StateSynchronizer,
    TruncatedError,
    Update,
)

from ..errors import CorruptDataError
from .config import staging_prefix
from .data_segments import DataSegments
from .metadata import StreamMetadata, check_not_replaced, not_found
from .state import FinishTransaction, PublishScale, Scale, SealStream, StreamState
from .transactions.committed import CommittedTransaction
from .transactions.merging import Merge


class PendingChanges:
    """The announced and unpublished changes of streams."""

    def __init__(self, metadata: StreamMetadata, data: DataSegments) -> None:
        self._metadata = metadata
        self._data = data
        self._store = metadata.store

    def fetch_state(self, name: str, deadline: Deadline) -> StreamState:
        """Return the stream's metadata, as new as this call, with its first segments created."""
        state = self._metadata.existing(name, deadline).state
        return state if state.current else self.finish(name, deadline)

    def announce(
        self, name: str, announce: Callable[[StreamState], Iterable[Update[StreamState]]], deadline: Deadline
    ) -> StreamState:
        """Announce a change when no other is pending, complete it, and return the state after it."""

        def when_nothing_is_pending(state: StreamState) -> tuple[Iterable[Update[StreamState]], StreamState | None]:
            if not state.exists:
                raise not_found(name)
            return ([], None) if state.is_pending else (announce(state), state)

        while True:
            self._data.delete_retired(self.finish(name, deadline), deadline)  # makes room for the change
            synchronizer = self._metadata.existing(name, deadline)
            then = synchronizer.update_state_returning(when_nothing_is_pending, timeout=deadline.remaining())
            if then is not None:
                now = self.finish(name, deadline)
                check_not_replaced(now, then)
                return now
            if deadline.passed:
                raise DeadlineExceededError(
                    "other clients scaled the stream before every attempt; nothing was done, try again", stream=name
                )

    def finish(self, name: str, deadline: Deadline, *, forget: str | None = None) -> StreamState:
        """Complete a pending change, if there is one, and return the state after it.

        ``forget`` is the key of a transaction that no other client will ask for.
        """
        synchronizer = self._metadata.existing(name, deadline)
        state = synchronizer.state
        while True:
            before = state
            if state.scale is not None:
                state = self._finish_scale(synchronizer, state, state.scale, deadline)
            if state.sealing and not state.sealed:
                state = self._finish_seal(synchronizer, state, deadline)
            if (transaction := state.transactions.open) is not None:
                state = self._finish_transaction(synchronizer, state, transaction, deadline, forget)
            if not state.exists:
                raise not_found(name)
            if state.incarnation == before.incarnation:
                return state
            # Deleted and created again meanwhile: only the new stream can have a pending change.

    def _finish_scale(
        self, synchronizer: StateSynchronizer[StreamState], state: StreamState, scale: Scale, deadline: Deadline
    ) -> StreamState:
        def is_open(now: StreamState) -> bool:
            return now.exists and now.incarnation == state.incarnation and now.scale == scale

        backoff = self._metadata.backoff(deadline)
        created = [state.data_segment(each.number) for each in scale.successors]
        try:
            self._data.create(created, backoff)
            for number in scale.predecessors:
                backoff.retry(partial(self._store.seal, state.data_segment(number)))
        except (AlreadyExistsError, NotFoundError):
            # A name was deleted: this scale is long done, or the stream is deleted. The state shows which.
            now = synchronizer.fetch_updates(timeout=deadline.remaining())
            if is_open(now):
                raise
        else:
            now = synchronizer.update_state(
                lambda now: [PublishScale(epoch=now.epoch + 1)] if is_open(now) else [], timeout=deadline.remaining()
            )
        if now.incarnation != state.incarnation or not now.exists:
            self._data.delete(created, backoff)
        return now

    def _finish_seal(
        self, synchronizer: StateSynchronizer[StreamState], state: StreamState, deadline: Deadline
    ) -> StreamState:
        backoff = self._metadata.backoff(deadline)
        try:
            for number in state.current:
                backoff.retry(partial(self._store.seal, state.data_segment(number)))
        except NotFoundError:  # deleted meanwhile
            return synchronizer.fetch_updates(timeout=deadline.remaining())
        return synchronizer.update_state(
            lambda now: (
                [SealStream()] if now.incarnation == state.incarnation and now.sealing and not now.sealed else []
            ),
            timeout=deadline.remaining(),
        )

    def _finish_transaction(
        self,
        synchronizer: StateSynchronizer[StreamState],
        state: StreamState,
        transaction: CommittedTransaction,
        deadline: Deadline,
        forget: str | None,
    ) -> StreamState:
        def is_open(now: StreamState) -> bool:
            return now.incarnation == state.incarnation and now.transactions.open == transaction

        try:
            Merge(self._store, state, transaction, deadline, self._metadata.backoff(deadline)).run()
        except (NotFoundError, SealedError, TruncatedError) as error:
            # Merged meanwhile, and the stream has moved on; or the stream is deleted. The state shows which. A store
            # that deletes a large segment may truncate it first.
            now = synchronizer.fetch_updates(timeout=deadline.remaining())
            if is_open(now):
                raise CorruptDataError(
                    "the store lost data of a committed transaction; restore the store from a backup, or delete "
                    "the stream",
                    stream=state.name,
                    cause=str(error),
                ) from error
            return now
        finished = FinishTransaction(sequence=transaction.sequence, forget=forget == transaction.key)
        try:
            now = synchronizer.update_state(
                lambda now: [finished] if is_open(now) else [], timeout=deadline.remaining()
            )
        except ReaderGroupError:
            if not finished.forget:
                raise
            # All events are in the stream. A caller that repeated the call could commit a forgotten key again.
            now = synchronizer.state
        prefix = staging_prefix(state.name, state.incarnation, transaction.key, transaction.generation)
        self._data.delete_staged(prefix, lambda _: True, deadline)
        return now

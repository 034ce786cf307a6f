"""Creates, finds and deletes the reader groups of a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from synchronizer import ANY, AttributeChange, ClosedError, Deadline, NotFoundError, StateSynchronizer
from synchronizer.arguments import check_type
from synchronizer.backoff import Backoff
from synchronizer.compare_and_set import remove_attributes
from synchronizer.configuration import differences
from synchronizer.liveness.lease import read_leases
from synchronizer.log.peeking import LOGS_AT_ONCE, peek
from synchronizer.state import StateCodec
from synchronizer.store import MAX_ATTRIBUTE_CHANGES
from synchronizer.threads.flag import Flag
from synchronizer.threads.loading import loading
from synchronizer.threads.stepping import step_each

from ..closable import close_each, stop_each
from ..errors import ReaderGroupExistsError
from ..record.naming import LIFE
from ..streams.config import StreamCut, check_name
from ..streams.open_names import DeletedNames, OpenNames, first_offset
from ..streams.retention.consumed import Consumed, Subscribers
from .model.config import ReaderGroupConfig
from .model.positions import positions
from .model.state import ReaderGroupState
from .model.updates import UPDATES
from .retention import consumed_by
from .starting import initial_state
from .updater import GroupUpdater

if TYPE_CHECKING:  # a list of groups needs their states only
    from .reader_group import GroupClient, ReaderGroup

_LOG_PREFIX: Final = "group/"


class ReaderGroupManager:
    """Creates, finds and deletes the reader groups of a store. Threads may share it.

    Args:
        client: The client whose groups these are.
        on_open: Called whenever a group was opened.
    """

    def __init__(self, client: GroupClient, on_open: Callable[[], object]) -> None:
        self._client = client
        self._on_open = on_open
        self._groups: OpenNames[ReaderGroup] = OpenNames()
        self._deleted = DeletedNames(client.store)
        self._codec = StateCodec(ReaderGroupState, UPDATES)
        self._process_id = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._closing = Flag()

    def __repr__(self) -> str:
        return f"ReaderGroupManager({self._client.store.url!r})"

    def create(
        self, name: str, *, streams: Sequence[str] | None = None, config: ReaderGroupConfig | None = None, **fields: Any
    ) -> ReaderGroup:
        """Create the group and return it. If it exists with the same config, return it.

        Args:
            name: Letters, digits, ".", "-" and "_".
            streams: The streams to read, each "scope/name".
            config: The whole config, instead of ``streams`` and ``fields``.
            **fields: Other fields of `ReaderGroupConfig`.

        Raises:
            ReaderGroupExistsError: A group of this name exists with another config.
            NotFoundError: One of the streams does not exist.
        """
        check_type(config, ReaderGroupConfig, "config", or_none=True)
        if config is None:
            config = ReaderGroupConfig(**{"streams": streams or (), **fields})
        try:
            group = self.get(name)
        except NotFoundError:
            initial = initial_state(config, self._client.streams)
            self._clear_waiting(name)  # a process may have died that deleted a group of this name
            group = self._open(name, initial)
        if group.config != config:
            raise ReaderGroupExistsError(
                "a group of this name exists with another config; change it with group.configure, or delete it first",
                name=name,
                exists_with=differences(group.config, config),
                asked_for=differences(config, group.config),
            )
        return group

    def get(self, name: str) -> ReaderGroup:
        """Return the group. Raise `NotFoundError` if there is none of this name."""
        group = self._get(name)
        self._on_open()
        return group

    def _get(self, name: str) -> ReaderGroup:
        group = self._open(name, None)
        try:
            group.synchronizer.fetch_updates()
        except NotFoundError as error:
            with self._lock:
                self._groups.let_go(name)
            raise _not_found(name) from error
        return self._keep(name, group)

    def list(self) -> Iterator[str]:
        """Iterate over the names of all groups."""
        return (name for name, _ in self.states())

    def states(self) -> Iterator[tuple[str, ReaderGroupState]]:
        """Iterate over the names of all groups and their states. Many are read at once.

        The client's timeout is for each of many steps.
        """
        return self._states(None)

    def _states(self, deadline: Deadline | None) -> Iterator[tuple[str, ReaderGroupState]]:
        """Iterate as `states` does, with one ``deadline`` for all steps if it is given."""
        store, backoff = self._client.store, partial(self._backoff, deadline)
        logs = backoff().retry(lambda: self._deleted.others(list(store.list(_LOG_PREFIX))))
        for first in range(0, len(logs), LOGS_AT_ONCE):
            part = logs[first : first + LOGS_AT_ONCE]
            for log, replica in backoff().retry(partial(peek, store, part, self._codec)):
                state = self._read_alone(log, backoff()) if replica is None else replica.state
                if state is not None:
                    yield log.removeprefix(_LOG_PREFIX), state
                elif replica is not None:
                    self._note_deleted(log, replica.next_offset)

    # ------------------------------------------------------------------ for retention

    def subscribers(self, deadline: Deadline) -> Subscribers:
        """Return how far each subscribed group has consumed its streams: by stream, then by group."""
        found: dict[str, dict[str, Consumed]] = {}
        backoff = self._backoff(deadline)
        for name, state in self._states(deadline):
            if state.config.retention == "NONE":
                continue
            with suppress(NotFoundError):  # deleted meanwhile
                readers = state.readers.values()
                leases = backoff.retry(partial(read_leases, self._client.store, _LOG_PREFIX + name, readers))
                for stream, consumed in consumed_by(state, positions(state, leases)).items():
                    found.setdefault(stream, {})[name] = consumed
        return found

    def note_skipped(self, group: str, head: StreamCut) -> None:
        """Let the group know that events before ``head`` are deleted which it has not consumed."""
        with suppress(NotFoundError):
            GroupUpdater(self.get(group).synchronizer, self._client.streams).note_skipped(head)

    def _read_alone(self, log: str, backoff: Backoff) -> ReaderGroupState | None:
        try:
            length = backoff.retry(partial(self._deleted.length, log))
        except NotFoundError:
            return None  # the name was forgotten meanwhile
        try:
            return self._get(log.removeprefix(_LOG_PREFIX)).state
        except NotFoundError:
            self._note_deleted(log, length)
            return None

    def _note_deleted(self, log: str, length: int) -> None:
        self._deleted.add(log, length)
        with self._lock:
            self._groups.let_go(log.removeprefix(_LOG_PREFIX))

    def delete(self, name: str) -> None:
        """Delete the group, its positions, and its events that wait for a retry.

        Its readers raise `NotFoundError` at their next call.
        """
        try:
            group = self.get(name)
        except NotFoundError as error:
            raise NotFoundError("there is no reader group of this name", name=name) from error
        with loading():
            from ..record.deletion import delete_record
            from ..scaling.autoscale import ROLE, forget_history

        store, segment = self._client.store, group.synchronizer.segment

        def with_them() -> Mapping[str, AttributeChange]:
            """Remove the leases as well: a reader without a lease cannot commit, even if it missed the deletion."""
            names = list(GroupUpdater(group.synchronizer, self._client.streams).leases())
            # Leases beyond the limit of one append go first. A reader that still finds the group joins it anew.
            while len(names) > MAX_ATTRIBUTE_CHANGES - 2:  # two are for the role and the record's name
                first, names = names[:MAX_ATTRIBUTE_CHANGES], names[MAX_ATTRIBUTE_CHANGES:]
                remove_attributes(store, segment, dict.fromkeys(first, ANY))
            found = dict(store.attributes(segment, names=[ROLE, LIFE]))
            changes = dict.fromkeys(names, AttributeChange(ANY, None))
            if (life := found.pop(LIFE, None)) is not None:
                delete_record(store, name, life)
                changes[LIFE] = AttributeChange(life, None)
            kept = {each: AttributeChange(value, forget_history(value)) for each, value in found.items()}
            return {**changes, **kept}

        synchronizer = group.synchronizer
        if synchronizer.delete(attributes=with_them):
            self._client.streams.note_deleted_group(synchronizer.segment, synchronizer.applied_length)
        with self._lock:
            self._groups.let_go(name)
        self._clear_waiting(name)

    def _clear_waiting(self, name: str) -> None:
        """Drop the events that wait for a retry in a deleted group."""
        with loading():
            from ..retries.waiting import clear_waiting

        self._backoff().retry(partial(clear_waiting, self._client.store, name, partial(self.get, name)))

    def _backoff(self, deadline: Deadline | None = None) -> Backoff:
        """Return a backoff like that of `StreamMetadata`. A list of groups does not load streams for it."""
        clock = self._client.clock
        return Backoff(clock, deadline or Deadline(clock, self._client.timeout), self._closing)

    def _open(self, name: str, initial: ReaderGroupState | None) -> ReaderGroup:
        log = _LOG_PREFIX + check_name(name, "reader group")
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed; open another", group=name)
            group = self._groups.get(name)
        if group is not None:
            if initial is None:
                return group
            try:
                group.synchronizer.initialize(initial)
                return self._keep(name, group)
            except NotFoundError:  # the log was forgotten since this client opened it
                with self._lock:
                    self._groups.drop(name, group)
                group.close()
        with loading():
            from .reader_group import ReaderGroup

        try:
            synchronizer = StateSynchronizer(
                self._client.store,
                log,
                updates=UPDATES,
                initial=initial,
                state_type=ReaderGroupState,
                clock=self._client.clock,
                timeout=self._client.timeout,
                state_limit_bytes=self._client.state_limit_bytes,
                first_offset=first_offset(self._client.clock),
            )
        except NotFoundError as error:
            raise _not_found(name) from error
        return self._keep(name, ReaderGroup(self._client, name, synchronizer))

    def step(self) -> float:
        """Call `ReaderGroup.step` of each group opened here, and return when, on the clock, the next round is due."""
        with self._lock:
            groups = self._groups.values()
        return step_each(group.step for group in groups)

    def _keep(self, name: str, opened: ReaderGroup) -> ReaderGroup:
        with self._lock:
            group = self._groups.keep(name, opened)
            unused = self._closed or group is not opened
        if unused:
            opened.close()
        return group

    def stop(self) -> None:
        """Stop the pools and autoscalers of all groups."""
        with self._lock:
            groups = self._groups.values()
        stop_each(groups)

    def close(self) -> None:
        """Close all groups that were opened here. Closing twice is no error."""
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        with self._lock:
            self._closed = True
            groups = self._groups.values()
        # In this order: the readers that close may still wait for the store.
        close_each([partial(_close_groups, groups), self._closing.set])


def _close_groups(groups: Sequence[ReaderGroup]) -> None:
    if groups:  # so it is loaded
        with loading():
            from .reader_group import close_groups

        close_groups(groups)


def _not_found(name: str) -> NotFoundError:
    return NotFoundError("there is no reader group of this name; create it with groups.create", name=name)

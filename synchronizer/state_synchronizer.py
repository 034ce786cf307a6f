"""The state synchronizer: one state, the same in every process, changed only by updates that its log accepts.

Every process applies the same entries in the same order, so there is nothing to coordinate but the order, and that is
decided by the store: an entry goes in only at the end of what its writer has applied. What follows from that:

- ``apply_to`` has run on exactly the state that an entry lands on, before it is written. What raises is not written.
- Each call is in the log once. Its entry carries the number of the process and of the call; after a conflict or a lost
  answer the process looks for it among the entries that it has not applied yet. Only a further append at the same
  offset rules out that a lost one lands later, so that is how a lost answer is retried.
- "Nothing to do", and errors raised by the caller's generator, stand when the state they were decided on was read
  after the call began. One fetch is enough for that, so no call waits for a moment of rest.
- In a process, calls that come while an append is on its way run one after the other, each on the result of the one
  before and in its own thread, and go out together as the next append. If that loses, they all decide again.
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

from .clock import Clock, Deadline, SystemClock
from .errors import (
    ClosedError,
    CorruptStateError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    StateTooLargeError,
    StoreUnavailableError,
    TruncatedError,
    UnknownUpdateError,
)
from .replica import Replica, Transition, TransitionFeed
from .revisioned import Entry, Mark, Revision, RevisionedStream, decode_entries, encode_entry
from .state import S, StateCodec, Update
from .store import Appended, AppendResult, AttributeChange, Conflict, SegmentStore, UnknownOutcome

R = TypeVar("R")

_logger = logging.getLogger(__name__)

NAME_PATTERN: Final = r"[A-Za-z0-9._/-]{1,600}"
DEFAULT_STATE_LIMIT_BYTES: Final = 1024 * 1024
#: An automatic compaction is due when the log since the mark has this many bytes, or this many times the state's own.
COMPACTION_BYTES: Final = 512 * 1024
COMPACTION_FACTOR: Final = 2
#: Lost races in a row after which a process queues for the store's fair lock, and for how many calls it stays polite.
POLITE_AFTER_CONFLICTS: Final = 3
POLITE_CALLS: Final = 32
FAIR_LOCK_SECONDS: Final = 1.0
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
_FIRST_PAUSE_SECONDS: Final = 0.005
_MAX_PAUSE_SECONDS: Final = 0.5
#: How often a reload is tried when each snapshot is replaced by a newer one while it is read.
_MAX_RELOADS: Final = 20


@dataclass(frozen=True)
class Proposal(Generic[S, R]):
    """What a generator of `update_state_with_attributes` answers: the updates, changes of the log segment's attributes
    that go in with them or not at all, and what the caller gets back."""

    updates: Sequence[Update[S]]
    value: R
    attributes: Mapping[str, AttributeChange] = field(default_factory=dict)


@dataclass(frozen=True)
class _Decision(Generic[R]):
    """What a call makes of a state: the body of its entry, or None for nothing to do."""

    value: R
    body: bytes | None = None
    attributes: Mapping[str, AttributeChange] = field(default_factory=dict)


class _Status(Enum):
    UNDECIDED = "undecided"
    STORED = "stored"
    AGAIN = "again"  # the batch, or one that it was built on, was not stored: decide anew
    FAILED = "failed"


class _Batch(Generic[S]):
    """The entries of several calls, one after the other, for one append at the end of ``base``."""

    def __init__(self, base: Replica[S]) -> None:
        self.base = base
        self.tail = base  # after all entries of the batch
        self.entries: list[bytes] = []
        self.calls: list[int] = []
        self.transitions: list[Transition[S]] = []
        self.attributes: dict[str, AttributeChange] = {}
        self.status = _Status.UNDECIDED
        self.error: ReaderGroupError | None = None
        self.landed = False  # its entries were seen in the log

    @property
    def size(self) -> int:
        return self.tail.next_offset - self.base.next_offset

    def add(self, call: int, entry: bytes, after: Replica[S], transition: Transition[S]) -> None:
        self.entries.append(entry)
        self.calls.append(call)
        self.transitions.append(transition)
        self.tail = after

    def end(self, status: _Status, error: ReaderGroupError | None = None) -> None:
        self.status, self.error = status, error


class StateSynchronizer(Generic[S]):
    """The replicated state ``name`` on ``store``. Threads may share it; it borrows the store and never closes it.

    ``initial`` begins the state if nothing is stored; without it a state that does not exist raises `NotFoundError`
    at the first use. ``updates`` are all classes of updates that the log may hold, retired ones too until a compaction
    has passed them. ``timeout`` is the default of all calls: at their deadline they raise `DeadlineExceededError`,
    having written nothing, or `OutcomeUnknownError`.
    """

    def __init__(
        self,
        store: SegmentStore,
        name: str,
        *,
        updates: Iterable[type[Update[S]]],
        initial: S | None = None,
        state_type: type[S] | None = None,
        clock: Clock | None = None,
        timeout: float = 30.0,
        state_limit_bytes: int = DEFAULT_STATE_LIMIT_BYTES,
        compaction_bytes: int | None = COMPACTION_BYTES,
        rng: random.Random | None = None,
    ) -> None:
        if initial is None and state_type is None:
            raise InvalidArgumentError("give the initial state, or state_type to open one that exists", name=name)
        if not re.fullmatch(NAME_PATTERN, name):
            raise InvalidArgumentError("a state is named by letters, digits and . _ - /, at most 600", name=name)
        if not store.guarantees.linearizable:
            raise InvalidArgumentError("a state needs a store with linearizable appends", url=store.url, name=name)
        self.name = name
        self.store = store
        self.clock: Clock = clock or SystemClock()
        self.timeout = timeout
        self._log = RevisionedStream(store, name)
        self._codec: StateCodec[S] = StateCodec(state_type or type(initial), tuple(updates))  # type: ignore[arg-type]
        self._state_limit_bytes = state_limit_bytes
        self._compaction_bytes = compaction_bytes
        # Processes that apply the same log reach the threshold together; each has its own, so that one compacts.
        self._compaction_stagger = 1 + (rng or random.SystemRandom()).random() / 2
        self._process_id = secrets.token_bytes(8) if rng is None else rng.randbytes(8)
        self._pid = os.getpid()

        self._changed = threading.Condition()  # guards what follows
        self._replica: Replica[S] = Replica()
        self._open: _Batch[S] | None = None
        self._sending: _Batch[S] | None = None
        self._calls = 0
        self._feeds: list[TransitionFeed[S]] = []
        self._generating: int | None = None  # the thread that runs a generator now
        self._polite_calls = 0
        self._broken: ReaderGroupError | None = None
        self._closing = threading.Event()
        self._mark: Mark | None = None
        self._reloads = 0  # from snapshots past what was applied here
        self._compacting = False
        self._size = 0  # of the state when it was last measured, and where that was
        self._size_offset = 0

        deadline = Deadline(self.clock, timeout)
        if initial is not None:
            self._retry(deadline, lambda: store.create(name))
        self._reload(deadline)
        self._fetch(deadline)
        if initial is not None and self._replica.state is None:
            self.initialize(initial)

    # ------------------------------------------------------------------ what is known here

    @property
    def segment(self) -> str:
        """The name of the store's segment that holds the log."""
        return self._log.segment

    @property
    def state(self) -> S:
        """The state as far as this process has applied the log. Immutable, never blocks."""
        return self._require(self._replica)

    @property
    def revision(self) -> Revision:
        """The revision of ``state``."""
        return self._replica.revision

    @property
    def snapshot_of_state(self) -> tuple[S, Revision]:
        """``state`` and its revision, of one moment."""
        replica = self._replica
        return self._require(replica), replica.revision

    @property
    def applied_length(self) -> int:
        """The length of the log as far as it was applied here: what ``store.wait`` takes as known."""
        return self._replica.next_offset

    @property
    def bytes_since_compaction(self) -> int:
        """The bytes of log that a process which joins now has to apply, as far as this process knows."""
        return self._replica.next_offset - (self._mark.next_offset if self._mark else 0)

    def transitions(self) -> TransitionFeed[S]:
        """A feed of every transition from now on, whoever wrote it, as this process applies them."""
        with self._changed:
            feed = TransitionFeed(self._replica, self._forget)
            self._feeds.append(feed)
            return feed

    def _forget(self, feed: TransitionFeed[S]) -> None:
        with self._changed:
            if feed in self._feeds:
                self._feeds.remove(feed)

    # ------------------------------------------------------------------ reading

    def fetch_updates(self, *, timeout: float | None = None) -> S:
        """Bring the local state up to what the log held when the call began, at least, and return it."""
        self._fetch(self._deadline(timeout))
        return self.state

    def wait_for_growth(self, timeout: float) -> bool:
        """Whether the log is longer than what was applied here, waiting for it up to ``timeout`` seconds."""
        self._check_usable()
        return bool(self.store.wait({self.segment: self.applied_length}, timeout))

    def wait_for(self, predicate: Callable[[S], bool], *, timeout: float | None = None) -> S:
        """The first state seen for which ``predicate`` holds; `DeadlineExceededError` if none came in time."""
        deadline = self._deadline(timeout)
        while True:
            state = self._fetch(deadline).state
            if state is not None and predicate(state):
                return state
            if deadline.passed:
                raise DeadlineExceededError("no state fulfilled the condition in time", name=self.name)
            self._retry(deadline, lambda: self.wait_for_growth(deadline.remaining(1.0)))

    def watch(self) -> Iterator[S]:
        """The present state, then the newest whenever it has changed, until the synchronizer is closed."""
        seen: Revision | None = None
        while not self._closing.is_set():
            replica = self._fetch(self._deadline(None))
            if replica.revision != seen and replica.state is not None:
                seen = replica.revision
                yield replica.state
                continue
            try:
                self.wait_for_growth(1.0)
            except ClosedError:
                return

    # ------------------------------------------------------------------ changing

    def initialize(self, state: S, *, timeout: float | None = None) -> bool:
        """Begin the state with ``state`` if nothing is stored, or if it was deleted; whether this call did it."""

        def begin(present: S | None) -> _Decision[bool]:
            return _Decision(False) if present is not None else _Decision(True, self._codec.encode_initial(state))

        return self._submit(begin, timeout)

    def delete(self, *, timeout: float | None = None) -> bool:
        """End the state; whether this call did it. Its log stays, so that revisions of the name only grow.

        Replicas raise `NotFoundError` when they learn of it, until `initialize` begins the state again.
        """

        def end(present: S | None) -> _Decision[bool]:
            return _Decision(False) if present is None else _Decision(True, self._codec.encode_tombstone())

        deleted = self._submit(end, timeout)
        if deleted and self.compact(timeout=timeout) and self._mark is not None:
            self._log.truncate(self._mark.next_offset)
        return deleted

    def update_state(self, generator: Callable[[S], Iterable[Update[S]]], *, timeout: float | None = None) -> S:
        """Apply the updates that ``generator`` yields for the newest state, as one entry or not at all.

        The generator is asked again whenever its state turns out not to be the newest, so it must have no side
        effects, and must not call the synchronizer. No update at all means that there is nothing to do. Returns the
        new state. What the generator or ``apply_to`` raises reaches the caller, with nothing written.
        """
        self.update_state_returning(lambda state: (tuple(generator(state)), None), timeout=timeout)
        return self.state

    def update_state_returning(
        self, generator: Callable[[S], tuple[Iterable[Update[S]], R]], *, timeout: float | None = None
    ) -> R:
        """`update_state` whose generator also says what the caller gets back: that of its last, successful run."""

        def propose(state: S) -> Proposal[S, R]:
            updates, value = generator(state)
            return Proposal(tuple(updates), value)

        return self.update_state_with_attributes(propose, timeout=timeout)

    def update_state_unconditionally(self, *updates: Update[S], timeout: float | None = None) -> S:
        """Apply these updates to whatever the newest state is, as one entry, in this order."""
        return self.update_state(lambda state: updates, timeout=timeout)

    def update_state_with_attributes(
        self, generator: Callable[[S], Proposal[S, R]], *, timeout: float | None = None
    ) -> R:
        """`update_state_returning` with changes of the log segment's attributes in the same atomic step.

        A generator reads the attributes that it expects from the store at every run.
        """

        def decide(state: S | None) -> _Decision[R]:
            if state is None:
                raise self._does_not_exist()
            proposal = generator(state)
            if not proposal.updates:
                return _Decision(proposal.value)
            return _Decision(proposal.value, self._codec.encode_updates(proposal.updates), proposal.attributes)

        return self._submit(decide, timeout)

    def compact(self, *, timeout: float | None = None) -> bool:
        """Make the present state the place where reloads start, and give up the log before the last such place.

        Whether this call did it: another process may have been first. Conflicts with no update; a follower that is
        less than one compaction behind does not notice. Raises `InvalidArgumentError` for a state that does not come
        back equal when it is read.
        """
        deadline = self._deadline(timeout)
        replica = self._fetch(deadline)
        old = self._retry(deadline, self._log.mark)
        if replica.next_offset == 0 or (old is not None and old.revision >= replica.revision):
            self._mark = old
            return False
        body = self._codec.encode_snapshot(replica.state, replica.checksum)
        with self._changed:
            self._calls += 1
            name = f"{self._process_id.hex()}{self._calls}"
        snapshot = self._retry(deadline, lambda: self._log.write_snapshot(replica.revision, name, body))
        new = Mark(replica.revision, replica.next_offset, snapshot)
        if not self._retry(deadline, lambda: self._log.move_mark(old, new)):
            self.store.delete(snapshot)
            return False
        self._mark = new
        if old is not None:
            self._retry(deadline, lambda: self._log.truncate(old.next_offset))
        self._retry(deadline, lambda: self._log.delete_snapshots(new))
        return True

    def close(self) -> None:
        """Let the watchers end and refuse further calls. The store stays open. Closing twice is no error."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"StateSynchronizer({self.name!r}, {self.store.url!r}, revision={self.revision})"

    # ------------------------------------------------------------------ one call

    def _submit(self, decide: Callable[[S | None], _Decision[R]], timeout: float | None) -> R:
        """Run ``decide`` until its decision stands: its entry is stored, or it saw the newest state and has none."""
        deadline = self._deadline(timeout)
        fetched = False  # since the call began
        conflicts = 0
        with ExitStack() as lock:
            while True:
                decision, error, batch = self._decide(decide)
                if decision is None or decision.body is None:
                    # The decision stands on what was read after the call began, and on nothing that is not stored.
                    if not fetched:
                        self._fetch(deadline)
                        fetched = True
                        continue
                    if batch is None or self._await(batch, deadline) is _Status.STORED:
                        if decision is None:
                            assert error is not None
                            raise error
                        return decision.value
                else:
                    assert batch is not None
                    status = self._await(batch, deadline)
                    if status is _Status.STORED:
                        break
                    if status is _Status.FAILED:
                        assert batch.error is not None
                        raise batch.error
                if deadline.passed:
                    raise DeadlineExceededError(
                        "every attempt lost against another process; nothing was written", name=self.name
                    )
                conflicts += 1
                if conflicts == POLITE_AFTER_CONFLICTS:
                    self._polite_calls = POLITE_CALLS
                    self._queue_up(lock, deadline)
        self._after_update(deadline)
        return decision.value

    def _decide(
        self, decide: Callable[[S | None], _Decision[R]]
    ) -> tuple[_Decision[R] | None, Exception | None, _Batch[S] | None]:
        """The decision on the newest state here, or the error raised instead, and the batch that it depends on.

        An entry has joined that batch. Without an entry, the batch is the one whose result was looked at, if any.
        """
        with self._changed:
            while True:
                self._check_usable()
                under = self._open or self._sending
                base = self._replica if under is None else under.tail
                self._generating = threading.get_ident()
                try:
                    decision = decide(base.state)
                    if decision.body is None:
                        return decision, None, under
                    batch = self._join(decision.body, decision.attributes, base)
                except Exception as error:
                    return None, error, under
                finally:
                    self._generating = None
                if batch is not None:
                    return decision, None, batch
                # No room in the open batch: wait until it was sent.
                self._changed.wait(1.0)

    def _join(
        self, body: bytes, attributes: Mapping[str, AttributeChange], base: Replica[S]
    ) -> _Batch[S] | None:
        """Apply an entry to ``base`` and put it into the open batch; None if it does not fit in there."""
        if len(body) > MAX_BATCH_BYTES:
            raise InvalidArgumentError("the updates of one call are too large", name=self.name, bytes=len(body))
        batch = self._open or _Batch(base)
        if batch.size + len(body) > MAX_BATCH_BYTES or batch.attributes.keys() & attributes.keys():
            return None
        self._calls += 1
        data, checksum = encode_entry(self._process_id, self._calls, base.checksum, body)
        entry = Entry(base.next_offset, base.next_offset + len(data), self._process_id, self._calls, checksum, body)
        # What is applied is what was written, read back: here as in every other process.
        decoded = self._codec.decode_body(body)
        after = base.apply(entry, decoded)
        self._check_size(base, after)
        updates = tuple(decoded) if isinstance(decoded, list) else ()
        batch.add(self._calls, data, after, Transition(base.state, after.state, after.revision, updates))
        batch.attributes.update(attributes)
        self._open = batch
        return batch

    def _check_size(self, before: Replica[S], after: Replica[S]) -> None:
        """Refuse what makes a state that is over the limit larger.

        Measuring costs as much as the state is large, so it is done when the log has grown by an eighth of what is
        left: seldom in a small state, at every update close to the limit.
        """
        limit = self._state_limit_bytes
        if after.state is None or after.next_offset - self._size_offset <= (limit - self._size) // 8:
            return
        size = self._codec.size(after.state)
        if size > limit and (before.state is None or size > self._codec.size(before.state)):
            raise StateTooLargeError(
                "the state would be over its limit; remove something first, or open it with a higher "
                "state_limit_bytes",
                name=self.name,
                bytes=size,
                limit=limit,
            )
        self._size, self._size_offset = size, after.next_offset

    def _await(self, batch: _Batch[S], deadline: Deadline) -> _Status:
        """Wait until the batch is decided, sending it if it is the next to go."""
        with self._changed:
            while batch.status is _Status.UNDECIDED:
                if self._sending is None and self._open is batch:
                    self._lead(batch, deadline)
                elif deadline.passed:
                    self._give_up(batch)
                else:
                    self._changed.wait(deadline.remaining(1.0))
            return batch.status

    def _give_up(self, batch: _Batch[S]) -> None:
        """The deadline of a caller who is not sending the batch himself."""
        if self._sending is batch:
            raise OutcomeUnknownError(
                "the deadline came while the update was on its way; it may be stored", name=self.name
            )
        # It has not been sent: the others in it decide again without this call.
        self._drop_open()
        raise DeadlineExceededError("the deadline came before the update was sent", name=self.name)

    def _lead(self, batch: _Batch[S], deadline: Deadline) -> None:
        """Send the open batch and tell everyone in it what became of it. Called, and returns, with the lock held."""
        self._open, self._sending = None, batch
        try:
            with self._unlocked():
                self._send(batch, deadline)
        finally:
            if batch.status is _Status.UNDECIDED:  # an interrupt
                batch.end(_Status.FAILED, OutcomeUnknownError("the append was interrupted", name=self.name))
            self._sending = None
            if batch.status is not _Status.STORED:
                self._drop_open()  # it was built on what is not there
            self._changed.notify_all()

    def _drop_open(self) -> None:
        if self._open is not None:
            self._open.end(_Status.AGAIN)
            self._open = None
            self._changed.notify_all()

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _send(self, batch: _Batch[S], deadline: Deadline) -> None:
        """Append the batch at the end of its base, and decide it."""
        data = b"".join(batch.entries)
        reloads = self._reloads
        lost: BaseException | None = None
        pause = _FIRST_PAUSE_SECONDS
        while True:
            answer = self._append(data, batch)
            if isinstance(answer, Appended):
                with self._changed:
                    self._advance(batch)
                return batch.end(_Status.STORED)
            if isinstance(answer, Conflict):
                return self._settle_conflict(batch, answer, deadline, lost is not None, reloads)
            if isinstance(answer, UnknownOutcome):
                lost = answer.cause
            elif not isinstance(answer, StoreUnavailableError | DeadlineExceededError):
                return batch.end(_Status.FAILED, answer)
            if deadline.passed or self._closing.is_set():
                return batch.end(_Status.FAILED, self._deadline_error(answer, lost))
            self.clock.wait(self._closing, deadline.remaining(pause))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _append(self, data: bytes, batch: _Batch[S]) -> AppendResult | ReaderGroupError:
        try:
            return self._log.append(data, batch.base.next_offset, batch.attributes)
        except ReaderGroupError as error:
            return error

    def _deadline_error(self, answer: UnknownOutcome | ReaderGroupError, lost: BaseException | None) -> ReaderGroupError:
        error: ReaderGroupError
        if lost is not None:
            error = OutcomeUnknownError("the answer to the append was lost; it may be stored", name=self.name)
            error.__cause__ = lost
        else:
            error = DeadlineExceededError("the store did not take the update in time", name=self.name)
            error.__cause__ = answer if isinstance(answer, ReaderGroupError) else None
        return error

    def _settle_conflict(
        self, batch: _Batch[S], conflict: Conflict, deadline: Deadline, lost: bool, reloads: int
    ) -> None:
        """Apply what the batch lost to. After a lost answer that may be the batch itself."""
        try:
            base = batch.base
            entries = decode_entries(self.segment, conflict.delta, base.next_offset, base.checksum)
            with self._changed:
                self._apply(entries)
            if self._replica.next_offset < conflict.length:
                self._fetch(deadline)
        except ReaderGroupError as error:
            if not batch.landed:
                if lost:
                    error = OutcomeUnknownError("the answer was lost, and then the log's end", name=self.name)
                return batch.end(_Status.FAILED, error)
        if batch.landed:
            batch.end(_Status.STORED)
        elif lost and self._reloads != reloads:
            batch.end(
                _Status.FAILED,
                OutcomeUnknownError(
                    "the answer was lost, and the log was compacted before it could be looked up", name=self.name
                ),
            )
        else:
            batch.end(_Status.AGAIN)

    def _queue_up(self, lock: ExitStack, deadline: Deadline) -> None:
        """After several lost races: wait in line, so that those who sleep or are slow get their turn."""
        if self.store.guarantees.fair_lock:
            lock.enter_context(self.store.fair_lock(self.segment, deadline.remaining(FAIR_LOCK_SECONDS)))
            self._fetch(deadline)

    def _after_update(self, deadline: Deadline) -> None:
        if self._compaction_bytes is None or self._compacting or self._state_is_gone:
            return
        due = max(self._compaction_bytes, COMPACTION_FACTOR * self._size) * self._compaction_stagger
        if self.bytes_since_compaction < due:
            return
        self._compacting = True
        try:
            self._mark = self._log.mark()  # another process may have been first
            if self.bytes_since_compaction >= due:
                self.compact(timeout=deadline.remaining(self.timeout))
        except ReaderGroupError as error:
            # The caller's update is stored. Whoever updates next tries again.
            _logger.warning("compaction of %s failed: %s", self.name, error)
        finally:
            self._compacting = False

    # ------------------------------------------------------------------ following the log

    def _fetch(self, deadline: Deadline) -> Replica[S]:
        """Apply the log up to where it ended when the call began, at least."""
        target: int | None = None
        while True:
            self._check_usable()
            replica = self._replica
            try:
                entries = self._retry(deadline, lambda: self._log.read(replica.next_offset, replica.checksum))
            except TruncatedError:
                self._reload(deadline)
                continue
            except (CorruptStateError, UnknownUpdateError) as error:
                self._broken = error
                raise
            if not entries:
                return self._replica
            with self._changed:
                self._apply(entries)
            if target is None:
                target = self._retry(deadline, lambda: self.store.info(self.segment)).length
            if self._replica.next_offset >= target:
                return self._replica

    def _apply(self, entries: Sequence[Entry]) -> None:
        """Apply those of ``entries`` that are next. Called with the lock held."""
        for entry in entries:
            if entry.offset != self._replica.next_offset:
                continue  # another thread has applied it, or a snapshot that is newer
            try:
                self._replica, transition = self._replica.follow(entry, self._codec, self.segment)
            except (CorruptStateError, UnknownUpdateError) as error:
                self._broken = error
                raise
            if self._sending is not None and entry.process_id == self._process_id:
                self._sending.landed |= entry.call in self._sending.calls
            self._tell(transition)

    def _advance(self, batch: _Batch[S]) -> None:
        """Take over what the batch made of its base, unless it came in through the log meanwhile."""
        if self._replica.next_offset != batch.base.next_offset:
            return
        self._replica = batch.tail
        for transition in batch.transitions:
            self._tell(transition)

    def _tell(self, transition: Transition[S]) -> None:
        for feed in self._feeds:
            feed.put(transition)

    def _reload(self, deadline: Deadline) -> None:
        """Go on from the newest snapshot, if there is one that is newer than what was applied here."""
        for _ in range(_MAX_RELOADS):
            mark = self._retry(deadline, self._log.mark)
            if mark is None:
                if self._replica.next_offset < self._retry(deadline, lambda: self.store.info(self.segment)).start_offset:
                    raise CorruptStateError("the log was truncated and has no snapshot", segment=self.segment)
                return
            try:
                body = self._retry(deadline, lambda: self._log.read_snapshot(mark))
            except NotFoundError:
                continue  # a newer mark has replaced it
            replica = Replica.from_snapshot(mark, body, self._codec)
            with self._changed:
                self._mark = mark
                if replica.next_offset > self._replica.next_offset:
                    before, self._replica = self._replica, replica
                    self._reloads += 1
                    self._tell(Transition(before.state, replica.state, replica.revision, gap=True))
            return
        raise DeadlineExceededError("each snapshot was replaced while it was read", name=self.name, tries=_MAX_RELOADS)

    # ------------------------------------------------------------------ what every call needs

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.clock, self.timeout if timeout is None else timeout)

    def _retry(self, deadline: Deadline, call: Callable[[], R]) -> R:
        """Call until the store answers. The one place that waits for a store that is away."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return call()
            except (StoreUnavailableError, DeadlineExceededError) as error:
                if deadline.passed:
                    raise DeadlineExceededError("the store did not answer in time", name=self.name) from error
            self.clock.wait(self._closing, deadline.remaining(pause))
            if self._closing.is_set():
                raise ClosedError("the synchronizer was closed", name=self.name)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _check_usable(self) -> None:
        if self._closing.is_set():
            raise ClosedError("the synchronizer is closed; open another", name=self.name)
        if os.getpid() != self._pid:
            raise ClosedError("the synchronizer belongs to the parent process; open one after the fork", name=self.name)
        if self._generating == threading.get_ident():
            raise InvalidArgumentError("a generator must not call the synchronizer; use the state it is given")
        if self._broken is not None:
            raise self._broken

    @property
    def _state_is_gone(self) -> bool:
        return self._replica.state is None

    def _require(self, replica: Replica[S]) -> S:
        if replica.state is None:
            raise self._does_not_exist()
        return replica.state

    def _does_not_exist(self) -> NotFoundError:
        return NotFoundError("the state does not exist or was deleted; initialize it", name=self.name)

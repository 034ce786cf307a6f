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

import itertools
import logging
import os
import random
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

from .clock import Clock, Deadline, SystemClock
from .errors import (
    AlreadyExistsError,
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
from .revisioned import Entry, Mark, Revision, RevisionedStream, decode_entries, encode_entry, log_is_shorter
from .state import S, StateCodec, Update
from .store import Appended, AttributeChange, Conflict, SegmentStore

R = TypeVar("R")

_logger = logging.getLogger(__name__)

NAME_PATTERN: Final = r"[A-Za-z0-9._/-]{1,600}"
DEFAULT_STATE_LIMIT_BYTES: Final = 1024 * 1024
#: An automatic compaction is due when the log since the mark has this many bytes, or this many times the state's own.
COMPACTION_BYTES: Final = 512 * 1024
COMPACTION_FACTOR: Final = 2
#: A lost race counts for so much, an append for 1 off; from ``POLITE_FROM`` on a process queues for the store's fair
#: lock. So those who win most races get into line as well, and not only those who lose: a line that the winners stay
#: out of would keep the others waiting.
CONFLICT_WEIGHT: Final = 8
POLITE_FROM: Final = 16
MAX_CONTENTION: Final = 48
FAIR_LOCK_SECONDS: Final = 1.0
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
_FIRST_PAUSE_SECONDS: Final = 0.005
_MAX_PAUSE_SECONDS: Final = 0.5
#: How often a reload is tried when each snapshot is replaced by a newer one while it is read.
_MAX_RELOADS: Final = 20


@dataclass(frozen=True)
class Proposal(Generic[S, R]):
    """What a generator of `update_state_with_attributes` answers: the updates, changes of the log segment's attributes
    that go in with them or not at all, and what the caller gets back.

    A compared attribute must not come back to a value that it had before: after a lost answer, that value would let
    the lost append land late."""

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
        self.callers = 0  # that wait for the outcome
        self.lost_answer: BaseException | None = None  # to an append of the batch
        self.landed = False  # its entries were seen in the log
        self.reloads = 0  # of the replica before the batch was first sent

    @property
    def size(self) -> int:
        return self.tail.next_offset - self.base.next_offset

    def add(self, entry: _NewEntry[S]) -> None:
        self.entries.append(entry.data)
        self.calls.append(entry.call)
        self.transitions.append(entry.transition)
        self.tail = entry.after

    def end(self, status: _Status, error: ReaderGroupError | None = None) -> None:
        self.status, self.error = status, error


@dataclass(slots=True)
class _NewEntry(Generic[S]):
    """An entry that was applied to ``base`` and is to be written behind it."""

    base: Replica[S]
    call: int
    data: bytes
    after: Replica[S]
    transition: Transition[S]


@dataclass(slots=True)
class _Attempt(Generic[S, R]):
    """What one run of a call came to. It counts when ``batch``, which it belongs to or was built on, is stored."""

    batch: _Batch[S] | None
    decision: _Decision[R] | None = None
    error: Exception | None = None  # raised instead of a decision
    state: S | None = None  # after it

    @property
    def has_entry(self) -> bool:
        return self.decision is not None and self.decision.body is not None


class StateSynchronizer(Generic[S]):
    """The replicated state ``name`` on ``store``. Threads may share it; it borrows the store and never closes it.

    ``initial`` begins the state if nothing is stored. Without it, opening a name that was never used raises
    `NotFoundError`, and so does using a state that was deleted. ``updates`` are all classes of updates that the log may
    hold, retired ones too until a compaction has passed them. ``timeout`` is the default of all calls: at their
    deadline they raise `DeadlineExceededError`, having written nothing, or `OutcomeUnknownError`. With a timeout of 0
    a call asks the store once and does not wait.

    ``compaction_bytes`` is about how much log makes an update compact; None leaves it to ``compact``. ``rng`` spreads
    that over the processes.
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
        self._process_id = secrets.token_bytes(8)
        self._pid = os.getpid()
        self._calls = itertools.count(1)
        self._closing = threading.Event()
        self._deciding = threading.Lock()  # held by the one thread that runs a generator
        self._generating: int | None = None  # the identity of that thread

        self._changed = threading.Condition()  # guards what follows
        self._replica: Replica[S] = Replica()
        self._feeds: list[TransitionFeed[S]] = []
        self._reloads = 0  # from snapshots past what was applied here
        self._broken: ReaderGroupError | None = None
        self._open: _Batch[S] | None = None
        self._sending: _Batch[S] | None = None
        self._has_leader = False  # a thread that sends it
        self._contention = 0
        self._line: tuple[int, AbstractContextManager[bool]] | None = None  # the fair lock, and the thread that took it
        self._mark: Mark | None = None
        self._compacting = False
        self._compaction_due = 0  # the length of the log that calls for one
        self._size = 0  # of the state when it was last measured, and where that was
        self._size_offset = 0

        deadline = Deadline(self.clock, timeout)
        if initial is not None:
            self._retry(deadline, lambda: store.create(name))
        self._reload(deadline)
        self._fetch(deadline)
        self._schedule_compaction()
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
        """The present state, then the newest whenever it has changed, until the synchronizer is closed.

        Ends within a second of ``close``. A store that is away longer than the timeout raises `DeadlineExceededError`.
        """
        seen: Revision | None = None
        while not self._closing.is_set():
            try:
                replica = self._next_after(seen)
            except ClosedError:
                if self._closing.is_set():
                    return
                raise
            if replica.state is not None and replica.revision != seen:
                yield replica.state
            seen = replica.revision

    def _next_after(self, seen: Revision | None) -> Replica[S]:
        """The newest replica, waiting up to a second for one of another revision than ``seen``."""
        deadline = self._deadline(None)
        replica = self._fetch(deadline)
        if replica.revision == seen and self._retry(deadline, lambda: self.wait_for_growth(1.0)):
            return self._fetch(deadline)
        return replica

    # ------------------------------------------------------------------ changing

    def initialize(self, state: S, *, timeout: float | None = None) -> bool:
        """Begin the state with ``state`` if nothing is stored, or if it was deleted; whether this call did it."""

        def begin(present: S | None) -> _Decision[bool]:
            return _Decision(False) if present is not None else _Decision(True, self._codec.encode_initial(state))

        return self._submit(begin, timeout)[0]

    def delete(self, *, timeout: float | None = None) -> bool:
        """End the state; whether this call did it. Its log stays, so that revisions of the name only grow.

        Replicas raise `NotFoundError` when they learn of it, until `initialize` begins the state again.
        """

        def end(present: S | None) -> _Decision[bool]:
            return _Decision(False) if present is None else _Decision(True, self._codec.encode_tombstone())

        deleted, _ = self._submit(end, timeout)
        if deleted:
            self._compact_or_warn(self._deadline(timeout), keep_last=False)
        return deleted

    def update_state(self, generator: Callable[[S], Iterable[Update[S]]], *, timeout: float | None = None) -> S:
        """Apply the updates that ``generator`` yields for the newest state, as one entry or not at all.

        The generator is asked again whenever its state turns out not to be the newest, so it must have no side
        effects, and must not call the synchronizer. No update at all means that there is nothing to do. Returns the
        state that the updates made. What the generator or ``apply_to`` raises reaches the caller, with nothing written.
        """
        return self._update(lambda state: Proposal(tuple(generator(state)), None), timeout)[1]

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

        return self._update(generator, timeout)[0]

    def _update(self, generator: Callable[[S], Proposal[S, R]], timeout: float | None) -> tuple[R, S]:
        def decide(state: S | None) -> _Decision[R]:
            if state is None:
                raise self._does_not_exist()
            proposal = generator(state)
            if proposal.updates:
                return _Decision(proposal.value, self._codec.encode_updates(proposal.updates), proposal.attributes)
            if proposal.attributes:
                raise InvalidArgumentError("attributes change with updates only; without one, append to the store")
            return _Decision(proposal.value)

        value, after = self._submit(decide, timeout)
        assert after is not None
        return value, after

    def compact(self, *, timeout: float | None = None) -> bool:
        """Make the present state the place where reloads start, and give up the log before the last such place.

        Whether this call did it: another process may have been first. Conflicts with no update; a follower that is
        less than one compaction behind does not notice. Raises `InvalidArgumentError` for a state that does not come
        back equal when it is read.
        """
        return self._compact(self._deadline(timeout))

    def close(self) -> None:
        """Let the watchers end and refuse further calls. The store stays open. Closing twice is no error."""
        self._closing.set()

    def __repr__(self) -> str:
        return f"StateSynchronizer({self.name!r}, {self.store.url!r}, revision={self.revision})"

    # ------------------------------------------------------------------ one call

    def _submit(self, decide: Callable[[S | None], _Decision[R]], timeout: float | None) -> tuple[R, S | None]:
        """Run ``decide`` until its decision stands: its entry is stored, or it saw the newest state and has none."""
        self._check_usable()
        deadline = self._deadline(timeout)
        try:
            attempt, decision = self._settle(decide, deadline)
        finally:
            self._leave_line()
        if attempt.has_entry:
            self._compact_if_due(deadline)
        return decision.value, attempt.state

    def _settle(
        self, decide: Callable[[S | None], _Decision[R]], deadline: Deadline
    ) -> tuple[_Attempt[S, R], _Decision[R]]:
        fetched = False  # since the call began
        while True:
            attempt = self._decide(decide, deadline)
            if not attempt.has_entry and not fetched:
                self._fetch(deadline)
                fetched = True
                continue
            status = _Status.STORED if attempt.batch is None else self._await(attempt.batch, deadline)
            if status is _Status.STORED:
                if attempt.error is not None:
                    raise attempt.error
                assert attempt.decision is not None
                return attempt, attempt.decision
            if status is _Status.FAILED and attempt.has_entry:
                assert attempt.batch is not None and attempt.batch.error is not None
                raise attempt.batch.error
            if deadline.passed:
                raise DeadlineExceededError(
                    "every attempt lost against another process; nothing was written", name=self.name
                )

    def _decide(self, decide: Callable[[S | None], _Decision[R]], deadline: Deadline) -> _Attempt[S, R]:
        """Run ``decide`` on the newest state here, that of the batch in the making if there is one, and join that."""
        self._await_turn(deadline)
        try:
            self._queue_up(deadline)
            self._generating = threading.get_ident()
            while True:
                attempt = self._try(decide, deadline)
                if attempt is not None:
                    return attempt
                if deadline.passed:
                    raise DeadlineExceededError("the state changed too often to be decided on in time", name=self.name)
        finally:
            self._generating = None
            self._deciding.release()

    def _await_turn(self, deadline: Deadline) -> None:
        """One generator runs at a time, so that each sees the result of the one before."""
        while not self._deciding.acquire(timeout=deadline.remaining(1.0)):
            self._check_usable()
            if deadline.passed:
                raise DeadlineExceededError("the generator of another call did not return in time", name=self.name)

    def _try(self, decide: Callable[[S | None], _Decision[R]], deadline: Deadline) -> _Attempt[S, R] | None:
        """One run of ``decide``; None if the state has gone on meanwhile, or there was no room for its entry."""
        self._check_usable(generating=True)
        with self._changed:
            under, base = self._tip()
        try:
            decision = decide(base.state)
            entry = None if decision.body is None else self._new_entry(decision.body, base)
        except Exception as error:
            return _Attempt(under, error=error)
        if entry is None:
            return _Attempt(under, decision, state=base.state)
        batch = self._join(entry, decision.attributes, deadline)
        return None if batch is None else _Attempt(batch, decision, state=entry.after.state)

    def _tip(self) -> tuple[_Batch[S] | None, Replica[S]]:
        """The last batch, and what the next entry is to be applied to."""
        batch = self._open or self._sending
        return batch, self._replica if batch is None else batch.tail

    def _new_entry(self, body: bytes, base: Replica[S]) -> _NewEntry[S]:
        if len(body) > MAX_BATCH_BYTES:
            raise InvalidArgumentError("the updates of one call are too large", name=self.name, bytes=len(body))
        call = next(self._calls)
        data, checksum = encode_entry(self._process_id, call, base.checksum, body)
        entry = Entry(base.next_offset, base.next_offset + len(data), self._process_id, call, checksum, body)
        # What is applied is what was written, read back: here as in every other process.
        after, transition = base.apply(entry, self._codec.read_back(body))
        self._check_size(base, after)
        return _NewEntry(base, call, data, after, transition)

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
                "the state would be over its limit; remove something first, or open it with a higher state_limit_bytes",
                name=self.name,
                bytes=size,
                limit=limit,
            )
        self._size, self._size_offset = size, after.next_offset

    def _join(
        self, entry: _NewEntry[S], attributes: Mapping[str, AttributeChange], deadline: Deadline
    ) -> _Batch[S] | None:
        """Put the entry into the open batch. None if it has to be decided anew: the state has gone on meanwhile, or
        there was no room in the batch, which has been waited for."""
        with self._changed:
            _, tip = self._tip()
            if (tip.next_offset, tip.checksum) != (entry.base.next_offset, entry.base.checksum):
                return None
            batch = self._open or _Batch(tip)
            if batch.size + len(entry.data) > MAX_BATCH_BYTES or batch.attributes.keys() & attributes.keys():
                self._changed.wait_for(lambda: self._open is not batch, deadline.remaining(1.0))
                return None
            batch.add(entry)
            batch.attributes.update(attributes)
            self._open = batch
            return batch

    # ------------------------------------------------------------------ one append for several calls

    def _await(self, batch: _Batch[S], deadline: Deadline) -> _Status:
        """Wait until the batch is decided, sending it if it is the next to go and nobody else does."""
        with self._changed:
            batch.callers += 1
            try:
                while batch.status is _Status.UNDECIDED:
                    if not self._has_leader and (self._sending or self._open) is batch:
                        self._lead(batch, deadline)
                    elif deadline.passed:
                        self._give_up(batch)
                    else:
                        self._changed.wait(deadline.remaining(1.0))
            finally:
                self._leave(batch)
            return batch.status

    def _give_up(self, batch: _Batch[S]) -> None:
        """The deadline of a caller who is not sending the batch himself."""
        if self._sending is batch:
            raise OutcomeUnknownError(
                "the deadline came while the update was on its way; it may be stored", name=self.name
            )
        raise DeadlineExceededError("the deadline came before the update was sent", name=self.name)

    def _leave(self, batch: _Batch[S]) -> None:
        """A caller has his answer, or gives up before there is one."""
        batch.callers -= 1
        if batch.status is not _Status.UNDECIDED:
            return
        if self._open is batch:
            self._drop_open()  # not sent yet: the others in it decide again without this call
        elif batch.callers == 0:
            self._end_sending(batch, _Status.AGAIN)  # nobody is left who asks what became of it

    def _lead(self, batch: _Batch[S], deadline: Deadline) -> None:
        """Send the batch and tell everyone in it what became of it. Called, and returns, with the lock held.

        What is raised is this caller's alone, mostly his deadline. The others go on: if an answer was lost, one of
        them takes over to find out, and if none was, they decide again.
        """
        if self._sending is None:
            self._open, self._sending, batch.reloads = None, batch, self._reloads
        self._has_leader = True
        try:
            with self._unlocked():
                self._send(batch, deadline)
        finally:
            self._has_leader = False
            if batch.status is not _Status.UNDECIDED:
                self._end_sending(batch, batch.status)
            elif batch.lost_answer is None:
                self._end_sending(batch, _Status.AGAIN)
            self._changed.notify_all()

    def _end_sending(self, batch: _Batch[S], status: _Status) -> None:
        self._sending = None
        batch.status = status
        if status is not _Status.STORED:
            self._drop_open()  # it was built on what is not there

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
        """Append the batch at the end of its base, and decide it. Raises at the deadline."""
        try:
            self._append(batch, deadline)
        except ReaderGroupError as error:
            if batch.landed:
                return batch.end(_Status.STORED)
            if batch.lost_answer is None:
                raise
            raise OutcomeUnknownError(
                "the answer to the append was lost, and it was not found out in time whether it is stored",
                name=self.name,
            ) from error
        change = -1 if batch.status is _Status.STORED else CONFLICT_WEIGHT
        self._contention = min(MAX_CONTENTION, max(0, self._contention + change))

    def _append(self, batch: _Batch[S], deadline: Deadline) -> None:
        data = b"".join(batch.entries)
        pause = _FIRST_PAUSE_SECONDS
        while True:
            problem: BaseException
            try:
                answer = self._log.append(data, batch.base.next_offset, batch.attributes)
            except StoreUnavailableError as error:
                problem = error
            except ReaderGroupError as error:
                if batch.lost_answer is not None:
                    raise
                return batch.end(_Status.FAILED, error)
            except BaseException as error:
                batch.lost_answer = error  # an interrupt may come after the store has the entries
                raise
            else:
                if isinstance(answer, Appended):
                    return self._advance(batch)
                if isinstance(answer, Conflict):
                    return self._settle_conflict(batch, answer, deadline)
                problem = batch.lost_answer = answer.cause
            if deadline.passed:
                raise DeadlineExceededError("the store did not take the update in time", name=self.name) from problem
            self._pause(deadline, pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _settle_conflict(self, batch: _Batch[S], conflict: Conflict, deadline: Deadline) -> None:
        """Apply what the batch lost to. After a lost answer that may be the batch itself."""
        base = batch.base
        try:
            if conflict.length < base.next_offset:
                raise log_is_shorter(self.segment, base.next_offset)
            entries = decode_entries(self.segment, conflict.delta, base.next_offset, base.checksum)
            with self._changed:
                self._apply(entries)
        except (CorruptStateError, UnknownUpdateError) as error:
            self._broken = error
            raise
        if self._replica.next_offset < conflict.length:
            self._fetch(deadline)
        if batch.landed:
            batch.end(_Status.STORED)
        elif batch.lost_answer is not None and self._reloads != batch.reloads:
            batch.end(
                _Status.FAILED,
                OutcomeUnknownError(
                    "the answer was lost, and the log was compacted before it could be looked up", name=self.name
                ),
            )
        else:
            batch.end(_Status.AGAIN)

    def _queue_up(self, deadline: Deadline) -> None:
        """Where races are lost, wait in line, so that those who are slow get their turn. One process, one place.

        What comes then is decided on the newest state, with everybody else in line behind. The place is kept until the
        call of this thread ends, also while it decides again.
        """
        if self._contention < POLITE_FROM or self._line is not None or not self.store.guarantees.fair_lock:
            return
        line = self.store.fair_lock(self.segment, deadline.remaining(FAIR_LOCK_SECONDS))
        try:
            has_turn = line.__enter__()
        except StoreUnavailableError:
            return
        self._line = threading.get_ident(), line
        if has_turn:
            self._fetch(deadline)
        else:
            # Whoever has it may be stopped. The lock is politeness; what is safe is the compare alone.
            self._leave_line()
            self._contention = 0

    def _leave_line(self) -> None:
        """Let the next process have its turn, if it was this thread that stood in line."""
        if self._line is not None and self._line[0] == threading.get_ident():
            line, self._line = self._line[1], None
            line.__exit__(None, None, None)

    def _advance(self, batch: _Batch[S]) -> None:
        """Take over what the batch made of its base, but for what came in through the log meanwhile."""
        with self._changed:
            if self._replica.next_offset < batch.tail.next_offset:
                for transition in batch.transitions:
                    if transition.revision > self._replica.revision:
                        self._tell(transition)
                self._replica = batch.tail
        batch.end(_Status.STORED)

    # ------------------------------------------------------------------ compaction

    def _compact(self, deadline: Deadline, *, keep_last: bool = True) -> bool:
        replica = self._fetch(deadline)
        old = self._mark = self._retry(deadline, self._log.mark)
        if replica.next_offset == 0 or (old is not None and old.revision >= replica.revision):
            return False
        state_format = self._codec.state_type.state_format
        if old is not None and old.state_format > state_format:
            raise UnknownUpdateError(
                "a newer release compacted this state; deploy that release here", segment=self.segment
            )
        body = self._codec.encode_snapshot(replica.state, replica.checksum)
        self._size, self._size_offset = len(body), replica.next_offset
        name = f"{self._process_id.hex()}{next(self._calls)}"
        try:
            snapshot = self._retry(deadline, lambda: self._log.write_snapshot(replica.revision, name, body))
        except (NotFoundError, AlreadyExistsError):
            return False  # a newer one has replaced it already, and deleted it
        new = Mark(replica.revision, replica.next_offset, snapshot, state_format)
        if not self._retry(deadline, lambda: self._log.move_mark(old, new)):
            self._retry(deadline, lambda: self.store.delete(snapshot))
            return False
        self._mark = new
        # Up to the place before, so that who follows closely does not notice.
        start = (old.next_offset if old else 0) if keep_last else new.next_offset
        self._retry(deadline, lambda: self._log.truncate(start))
        self._retry(deadline, lambda: self._log.delete_snapshots(new))
        return True

    def _compact_if_due(self, deadline: Deadline) -> None:
        if self._compaction_bytes is None or self._replica.next_offset < self._compaction_due:
            return
        with self._changed:
            if self._compacting:
                return
            self._compacting = True
        try:
            self._mark = self._retry(deadline, self._log.mark)
            self._schedule_compaction()  # another process may have been first
            if self._replica.next_offset >= self._compaction_due:
                self._compact_or_warn(deadline)
                self._schedule_compaction(tried=True)
        except ReaderGroupError as error:
            _logger.warning("compaction of %s failed: %s", self.name, error)
        finally:
            self._compacting = False

    def _compact_or_warn(self, deadline: Deadline, *, keep_last: bool = True) -> None:
        """Compact for a caller whose update is stored, whatever becomes of the compaction."""
        try:
            self._compact(deadline, keep_last=keep_last)
        except ReaderGroupError as error:
            _logger.warning("compaction of %s failed: %s", self.name, error)

    def _schedule_compaction(self, *, tried: bool = False) -> None:
        if self._compaction_bytes is None:
            return
        step = max(self._compaction_bytes, COMPACTION_FACTOR * self._size) * self._compaction_stagger
        start = self._mark.next_offset if self._mark else 0
        self._compaction_due = int(start + step)
        if tried:  # and perhaps in vain: not at every update again
            self._compaction_due = max(self._compaction_due, self._replica.next_offset + self._compaction_bytes // 4)

    # ------------------------------------------------------------------ following the log

    def _fetch(self, deadline: Deadline) -> Replica[S]:
        """Apply the log up to where it ended when the call began, at least."""
        reloads = 0
        while True:
            self._check_usable()
            try:
                at_end = self._read_on(self._replica, deadline)
            except TruncatedError:
                reloads += 1
                if reloads > _MAX_RELOADS:
                    raise DeadlineExceededError(
                        "the log was truncated again after each reload", name=self.name, tries=_MAX_RELOADS
                    ) from None
                continue
            except (CorruptStateError, UnknownUpdateError) as error:
                self._broken = error
                raise
            if at_end:
                return self._replica
            if deadline.passed:
                raise DeadlineExceededError("the log was not read to its end in time", name=self.name)

    def _read_on(self, replica: Replica[S], deadline: Deadline) -> bool:
        """Apply entries after ``replica``; whether these were all."""
        try:
            entries, at_end = self._retry(deadline, lambda: self._log.read(replica.next_offset, replica.checksum))
        except TruncatedError:
            if not self._reload(deadline, past=replica.next_offset):
                raise CorruptStateError(
                    "the log was truncated and no snapshot is there to go on from; restore the store from a backup",
                    segment=self.segment,
                    offset=replica.next_offset,
                ) from None
            raise
        if entries:
            with self._changed:
                self._apply(entries)
        return at_end

    def _apply(self, entries: Sequence[Entry]) -> None:
        """Apply those of ``entries`` that are next. Called with the lock held."""
        for entry in entries:
            if entry.offset != self._replica.next_offset:
                continue  # another thread has applied it, or a snapshot that is newer
            self._replica, transition = self._replica.follow(entry, self._codec, self.segment)
            if self._sending is not None and entry.process_id == self._process_id:
                self._sending.landed |= entry.call in self._sending.calls
            self._tell(transition)

    def _tell(self, transition: Transition[S]) -> None:
        for feed in self._feeds:
            feed.put(transition)

    def _reload(self, deadline: Deadline, *, past: int = 0) -> bool:
        """Go on from the newest snapshot; False if there is none that is past the offset ``past``."""
        for _ in range(_MAX_RELOADS):
            mark = self._retry(deadline, self._log.mark)
            if mark is None or mark.next_offset <= past:
                return False
            try:
                replica = self._read_snapshot(mark, deadline)
            except NotFoundError:
                continue  # a newer mark has replaced it
            with self._changed:
                self._mark = mark
                if replica.next_offset > self._replica.next_offset:
                    before, self._replica = self._replica, replica
                    self._reloads += 1
                    self._tell(Transition(before.state, replica.state, replica.revision, gap=True))
            return True
        raise DeadlineExceededError("each snapshot was replaced while it was read", name=self.name, tries=_MAX_RELOADS)

    def _read_snapshot(self, mark: Mark, deadline: Deadline) -> Replica[S]:
        body = self._retry(deadline, lambda: self._log.read_snapshot(mark))
        return Replica.from_snapshot(mark, body, self._codec)

    # ------------------------------------------------------------------ what every call needs

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.clock, self.timeout if timeout is None else timeout)

    def _retry(self, deadline: Deadline, call: Callable[[], R]) -> R:
        """Call until the store answers. The one place that waits for a store that is away."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return call()
            except StoreUnavailableError as error:
                if deadline.passed:
                    raise DeadlineExceededError("the store did not answer in time", name=self.name) from error
            self._pause(deadline, pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _pause(self, deadline: Deadline, seconds: float) -> None:
        if self.clock.wait(self._closing, deadline.remaining(seconds)):
            raise ClosedError("the synchronizer was closed", name=self.name)

    def _check_usable(self, *, generating: bool = False) -> None:
        if self._closing.is_set():
            raise ClosedError("the synchronizer is closed; open another", name=self.name)
        if os.getpid() != self._pid:
            raise ClosedError("the synchronizer belongs to the parent process; open one after the fork", name=self.name)
        if self._generating == threading.get_ident() and not generating:
            raise InvalidArgumentError("a generator must not call the synchronizer; use the state it is given")
        if self._broken is not None:
            raise self._broken.with_traceback(None)

    def _require(self, replica: Replica[S]) -> S:
        if replica.state is None:
            raise self._does_not_exist()
        return replica.state

    def _does_not_exist(self) -> NotFoundError:
        return NotFoundError("the state does not exist or was deleted; initialize it", name=self.name)

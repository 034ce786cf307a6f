"""The state synchronizer: one state, the same in every process, changed only by updates that its log accepts.

Every process applies the same entries in the same order. The store decides that order, and nothing else needs
coordination. `LogFollower` applies the log, `LogWriter` writes calls to it, `Compactor` keeps it short.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from .arguments import check_class, check_count, check_duration, check_items, check_type, type_name
from .call_limits import call_limit
from .callables import check_callable, check_returned
from .clock import Clock, Deadline, clock_or_system, is_manual
from .errors import ClosedError, DeadlineExceededError, InvalidArgumentError, NotFoundError, OutcomeUnknownError
from .limits import DEFAULT_STATE_LIMIT_BYTES
from .log.beginning import begins_in_one_step, first_entry, first_entry_of_nothing
from .log.compaction import COMPACTION_BYTES, Compactor
from .log.deciding import NO_ATTRIBUTES, Decision
from .log.entries import EntryLog, Revision, decode_entries
from .log.follower import LogFollower
from .log.listening import UpdateListening
from .log.replica import AppliedUpdate, Replica, Transition, TransitionFeed
from .log.writer import LogWriter
from .state import S, State, StateCodec, Update
from .store import MAX_START_OFFSET, AttributeChange, SegmentStore

R = TypeVar("R")

NAME_PATTERN: Final = r"[A-Za-z0-9._/-]{0,599}[A-Za-z0-9._-]"
NAME_RULE: Final = "a name must have 1 to 600 characters: letters, digits and . _ - /; the last one must not be /"


class Proposal(NamedTuple, Generic[S, R]):
    """The result of a generator of `update_state_with_attributes`: the updates, the value for the caller, and changes
    of the log segment's attributes, which are stored in the same step as the updates.

    A compared attribute must not return to an earlier value: after a lost answer, that value would let the lost append
    land late.

    Without ``flushes``, the loss of power may undo the updates until another change of the store is acknowledged. See
    `SegmentStore.append_unflushed`."""

    updates: Sequence[Update[S]]
    value: R
    attributes: Mapping[str, AttributeChange] = NO_ATTRIBUTES
    flushes: bool = True


class StateSynchronizer(Generic[S]):
    """The replicated state ``name`` on ``store``. Threads may share it; it borrows the store and never closes it.

    At its deadline a call raises `DeadlineExceededError`, having written nothing, or `OutcomeUnknownError`.

    Args:
        store: A store with linearizable appends.
        name: 1 to 600 characters: letters, digits and ``. _ - /``, the last of them no ``/``.
        updates: All classes of updates that the log may hold, retired ones too until a compaction has passed them.
        initial: Begins the state if nothing is stored. Without it, opening a name that was never used raises
            `NotFoundError`, and so does using a state that was deleted.
        state_type: The class of the state. Required without ``initial``.
        clock: The system clock by default.
        timeout: The default of all calls, 30 seconds. With 0 a call asks the store once and does not wait.
        state_limit_bytes: 1 MiB by default. An update that leaves the state larger, and over this size, raises
            `StateTooLargeError`, unless its class has ``may_exceed_limit``.
        first_offset: Where the log begins if it is created here. Its name may have been forgotten before if this is
            beyond all that the forgotten log held, as the microseconds since 1970 are.
        compaction_bytes: About how much log makes an update compact, 512 KiB by default. None leaves compaction to
            ``compact``.
        rng: Spreads compactions over the processes.
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
        first_offset: int = 0,
        compaction_bytes: int | None = COMPACTION_BYTES,
        rng: random.Random | None = None,
    ) -> None:
        check_type(store, SegmentStore, "store")
        check_type(name, str, "name")
        check_items(updates, Iterable, "updates")
        check_type(rng, random.Random, "rng", or_none=True)
        check_duration(timeout, "timeout")
        check_count(state_limit_bytes, "state_limit_bytes")
        check_count(first_offset, "first_offset", at_least=0, at_most=MAX_START_OFFSET)
        check_count(compaction_bytes, "compaction_bytes", at_least=0, or_none=True)
        if initial is None and state_type is None:
            raise InvalidArgumentError(
                "pass initial to create the state, or state_type to open an existing one", name=name
            )
        if initial is not None and not isinstance(initial, State):
            raise InvalidArgumentError(
                "initial must be an instance of a State class, such as Counter()", found=repr(initial)
            )
        if state_type is not None:
            check_class(state_type, State, "state_type")
        if not re.fullmatch(NAME_PATTERN, name):
            raise InvalidArgumentError(NAME_RULE, name=name)
        if not store.guarantees.linearizable_append:
            raise InvalidArgumentError(
                "a shared state needs a store with linearizable appends; see store.guarantees", url=store.url, name=name
            )
        self.name = name
        self.store = store
        self.clock: Clock = clock_or_system(clock)
        self.timeout = timeout
        self._codec: StateCodec[S] = StateCodec(state_type or type(initial), tuple(updates))  # type: ignore[arg-type]
        self._first_offset = first_offset
        self._follower = LogFollower(EntryLog(store, name), self._codec, self.clock)
        self._writer = LogWriter(self._follower, state_limit_bytes)
        self._listening: list[UpdateListening[S]] = []  # without threads
        deadline = Deadline(self.clock, timeout)
        try:
            self._follower.begin(deadline)
        except NotFoundError:
            if initial is None:
                raise
            self._create(first_entry(name, initial, self._codec, state_limit_bytes), deadline)
        self._compactor = Compactor(self._follower, compaction_bytes, rng or random.SystemRandom())
        if initial is not None and self._replica.state is None:
            self._initialize(initial, deadline)

    def _create(self, first: bytes, deadline: Deadline) -> None:
        """Create the log, in one step with its first entry if the store can."""
        log, at, retry = self.segment, self._first_offset, self._follower.retry
        if not begins_in_one_step(self.store, first):
            first = first_entry_of_nothing(self._codec)
        if begins_in_one_step(self.store, first):
            created = retry(deadline, lambda: self.store.create_together({log: first}, start_offsets={log: at}))
        else:
            created = False
            retry(deadline, lambda: self.store.create(log, start_offset=at))
        if created:
            self._follower.begin_at(at)
            self._follower.apply(decode_entries(log, first, at, 0))
        else:
            self._follower.begin(deadline)

    def _initialize(self, initial: S, deadline: Deadline) -> None:
        """Begin the state in a log that another process created, or that the store cannot create with it."""
        try:
            self.initialize(initial, timeout=deadline.remaining())
        except OutcomeUnknownError as error:
            if self._replica.state is None:  # else it exists, whichever process began it
                raise DeadlineExceededError(
                    "the store did not confirm in time that the state was initialized; open it again", state=self.name
                ) from error

    @property
    def segment(self) -> str:
        """The name of the segment that holds the log."""
        return self._follower.log.segment

    @property
    def state(self) -> S:
        """The state as far as this process has applied the log, immutable. Never blocks."""
        return self._require(self._replica)

    @property
    def revision(self) -> Revision:
        """The revision of ``state``."""
        return self._replica.revision

    @property
    def snapshot_of_state(self) -> tuple[S, Revision]:
        """``state`` and its revision, taken together."""
        replica = self._replica
        return self._require(replica), replica.revision

    @property
    def applied_length(self) -> int:
        """The offset up to which this process has applied the log: the known length for ``store.wait``."""
        return self._replica.next_offset

    @property
    def bytes_since_compaction(self) -> int:
        """How many bytes of log a process that joins now must apply, as far as this process knows."""
        return self._replica.next_offset - self._follower.compacted_upto

    @property
    def was_compacted(self) -> bool:
        """Whether the log has a snapshot, as far as this process knows."""
        return self._follower.mark is not None

    def transitions(self) -> TransitionFeed[S]:
        """Return a feed of every transition that this process applies from now on, of any writer."""
        return self._follower.transitions()

    def history(self, after: Revision, *, timeout: float | None = None) -> Sequence[Transition[S]]:
        """Return the transitions after ``after``, read from the store again, one for each entry of the log.

        If the log starts later, the first one has ``gap`` and leads to the state that reloads start from.
        `Transition.one_by_one` separates the updates of one entry.
        """
        check_type(after, Revision, "after")
        return self._follower.history(after, self._deadline(timeout))

    def on_update(
        self, listener: Callable[[AppliedUpdate[S]], object], *, after: Revision | None = None
    ) -> Callable[[], None]:
        """Call ``listener`` with every update from now on, of any writer. Return the function that stops it.

        The listener gets each update once, in log order, or one call with ``gap`` in place of those that a compaction
        has removed. A thread of its own follows the log, so the listener may call the synchronizer. An exception of the
        listener is logged, and it gets the next update. The thread ends soon after ``close``.

        On a clock that ``is_manual`` nothing runs in the background: `step`, or `poll_listeners`, calls the listener.

        Args:
            listener: A plain function, neither async nor a generator.
            after: A revision that was processed earlier. The listener first gets the updates since then, so an audit
                continues where it stopped.
        """
        check_callable(listener, "a listener", takes="applied", name=self.name)
        check_type(after, Revision, "after", or_none=True)
        self._follower.check_usable()
        by_hand = is_manual(self.clock)
        listening = UpdateListening(self._follower, listener, after=after, timeout=self.timeout, thread=not by_hand)
        if not by_hand:
            return listening.stop
        self._listening.append(listening)

        def stop() -> None:
            listening.stop()
            self._listening = [each for each in self._listening if each is not listening]

        return stop

    def poll_listeners(self, *, timeout: float | None = None) -> None:
        """On a clock that ``is_manual``: fetch, and call the listeners of `on_update` with the new updates."""
        self._follower.fetch(self._deadline(timeout))
        for listening in self._listening:
            listening.tell()

    def step(self) -> float:
        """Call `poll_listeners` once, without waiting. Return infinity: nothing is due at a known time."""
        self.poll_listeners(timeout=0.0)
        return math.inf

    def fetch_updates(self, *, timeout: float | None = None) -> S:
        """Apply the log at least up to its end when the call began, and return the state."""
        self._follower.fetch(self._deadline(timeout))
        return self.state

    def wait_for_growth(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until the log is longer than applied here; return whether it is."""
        check_duration(timeout, "timeout")
        self._follower.check_usable()
        return bool(self.store.wait({self.segment: self.applied_length}, timeout))

    def wait_for(self, predicate: Callable[[S], bool], *, timeout: float | None = None) -> S:
        """Return the first state seen for which ``predicate`` holds. Raise `DeadlineExceededError` if none comes."""
        check_callable(predicate, "a predicate", takes="state", name=self.name)
        deadline = self._deadline(timeout)
        while True:
            state = self._follower.fetch(deadline).state
            if state is not None:
                holds = predicate(state)
                check_returned(holds, "a predicate", name=self.name)
                if holds:
                    return state
            if deadline.passed:
                raise DeadlineExceededError("no state fulfilled the predicate in time", name=self.name)
            self._follower.retry(deadline, lambda: self.wait_for_growth(deadline.remaining(1.0)))

    def watch(self) -> Iterator[S]:
        """Yield the current state, then the newest one after each change, until the synchronizer is closed.

        It ends within a second of ``close``. Raise `DeadlineExceededError` if the store is unavailable for longer than
        the timeout.
        """
        seen: Revision | None = None
        while not self._follower.closing.is_set():
            try:
                replica = self._next_after(seen)
            except ClosedError:
                if self._follower.closing.is_set():
                    return
                raise
            if replica.state is not None and replica.revision != seen:
                yield replica.state
            seen = replica.revision

    def _next_after(self, seen: Revision | None) -> Replica[S]:
        """Return the newest replica; wait up to a second for another revision than ``seen``."""
        deadline = self._deadline(None)
        replica = self._follower.fetch(deadline)
        if replica.revision == seen and self._follower.retry(deadline, lambda: self.wait_for_growth(1.0)):
            return self._follower.fetch(deadline)
        return replica

    def initialize(self, state: S, *, timeout: float | None = None) -> bool:
        """Begin the state with ``state`` if nothing is stored, or it was deleted; return whether this call did it."""
        self._codec.check_state(state)

        def begin(present: S | None) -> Decision[bool]:
            if present is not None:
                return Decision(False)
            return Decision(True, self._codec.encode_initial(state), [state])

        return self._submit(begin, timeout)[0]

    def delete(
        self, *, timeout: float | None = None, attributes: Callable[[], Mapping[str, AttributeChange]] | None = None
    ) -> bool:
        """Delete the state; return whether this call did it. Its log stays, and revisions of the name only grow.

        Replicas raise `NotFoundError` when they learn of it, until `initialize` begins the state again.

        Args:
            timeout: In seconds; the synchronizer's by default.
            attributes: Returns changes of the log segment's attributes, which are stored in the same atomic step.
        """
        if attributes is not None:
            check_callable(attributes, "a function for attributes")

        def end(present: S | None) -> Decision[bool]:
            if present is None:
                return Decision(False)
            changes = NO_ATTRIBUTES if attributes is None else attributes()
            check_returned(changes, "a function for attributes")
            return Decision(True, self._codec.encode_tombstone(), attributes=changes)

        deleted, _ = self._submit(end, timeout)
        if deleted:
            self._compactor.compact_or_warn(self._deadline(timeout), keep_last=False)
        return deleted

    def update_state(self, generator: Callable[[S], Iterable[Update[S]]], *, timeout: float | None = None) -> S:
        """Apply the updates that ``generator`` returns for the newest state, as one entry; return the state after them.

        The generator runs again if its state was not the newest, so it must have no side effects. It must not call the
        synchronizer. Without updates nothing is written. The same holds for an exception of the generator or of
        ``apply_to``, which reaches the caller.

        Args:
            generator: Gets the state, and returns or yields updates.
            timeout: In seconds; the synchronizer's by default.

        Raises:
            NotFoundError: The state does not exist, or was deleted.
            StateTooLargeError: The updates make a state larger that is over its limit. Nothing was written.
            DeadlineExceededError: The deadline passed. Nothing was written.
            OutcomeUnknownError: It could not be found out whether the updates are stored.

        Example:
            ``counter.update_state(lambda state: [Add(by=1)] if state.value < 10 else [])``
        """
        if not callable(generator):
            raise _no_generator(generator)
        return self._update(lambda state: Proposal(_updates(generator(state)), None), timeout)[1]

    def update_state_returning(
        self, generator: Callable[[S], tuple[Iterable[Update[S]], R]], *, timeout: float | None = None
    ) -> R:
        """Like `update_state`, with a generator that returns a pair: its updates, and the value for the caller.

        Return the value of its last, successful run.
        """
        if not callable(generator):
            raise _no_generator(generator)

        def propose(state: S) -> Proposal[S, R]:
            answer = generator(state)
            _check_generated(answer)
            try:
                updates, value = answer
            except (TypeError, ValueError) as error:
                raise InvalidArgumentError(
                    "the generator must return a pair: its updates and the value for the caller",
                    found=type(answer).__name__,
                ) from error
            return Proposal(_updates(updates), value)

        return self.update_state_with_attributes(propose, timeout=timeout)

    def update_state_unconditionally(self, *updates: Update[S], timeout: float | None = None) -> S:
        """Apply these updates to the newest state, as one entry, in this order; return the state after them."""
        for update in updates:
            if isinstance(update, type) and issubclass(update, Update):
                raise InvalidArgumentError("pass an instance of the update, not its class", found=type_name(update))
            if not isinstance(update, Update):
                raise InvalidArgumentError("pass each update as an argument of its own", found=type_name(update))
        return self.update_state(lambda state: updates, timeout=timeout)

    def update_state_with_attributes(
        self, generator: Callable[[S], Proposal[S, R]], *, timeout: float | None = None
    ) -> R:
        """Like `update_state_returning`, with changes of the log segment's attributes in the same atomic step.

        The generator returns a `Proposal`. It reads the attributes that it expects from the store at every run.
        """
        if not callable(generator):
            raise _no_generator(generator)
        return self._update(generator, timeout)[0]

    def _update(self, generator: Callable[[S], Proposal[S, R]], timeout: float | None) -> tuple[R, S]:
        def decide(state: S | None) -> Decision[R]:
            if state is None:
                raise self._does_not_exist()
            proposal = generator(state)
            if not isinstance(proposal, Proposal):
                _check_generated(proposal)
                raise InvalidArgumentError("the generator must return a Proposal", found=type(proposal).__name__)
            if proposal.updates:
                body = self._codec.encode_updates(proposal.updates)
                return Decision(proposal.value, body, proposal.updates, proposal.attributes, proposal.flushes)
            if proposal.attributes:
                raise InvalidArgumentError(
                    "attributes change only together with updates; to change them alone, append to the store"
                )
            return Decision(proposal.value)

        value, after = self._submit(decide, timeout)
        assert after is not None
        return value, after

    def compact(self, *, timeout: float | None = None, keep_last: bool = True) -> bool:
        """Write the state as a snapshot, from which reloads start, and truncate the log before the previous snapshot.

        Return whether this call did it: another process may have been first. It conflicts with no update, and a process
        that is less than one compaction behind does not notice it.

        Args:
            timeout: In seconds; the synchronizer's by default.
            keep_last: Keep the log since the previous snapshot. If False, all of the log is truncated, and a process
                that is behind reloads from the snapshot.

        Raises:
            InvalidArgumentError: The state is not equal when it is read back.
            UnknownUpdateError: A newer release has compacted this state.
        """
        return self._compactor.compact(self._deadline(timeout), keep_last=keep_last)

    def close(self) -> None:
        """End the watchers and refuse further calls. The store stays open. Closing twice is no error."""
        self._follower.closing.set()

    def __repr__(self) -> str:
        return f"StateSynchronizer({self.name!r}, {self.store.url!r}, revision={self.revision})"

    def _submit(self, decide: Callable[[S | None], Decision[R]], timeout: float | None) -> tuple[R, S | None]:
        deadline, before = self._deadline(timeout), call_limit.deadline
        try:
            call_limit.deadline = deadline
            outcome = self._writer.submit(decide, deadline)
            if outcome.wrote:
                self._compactor.compact_if_due(deadline)
            return outcome.value, outcome.state
        finally:
            call_limit.deadline = before

    @property
    def _replica(self) -> Replica[S]:
        return self._follower.replica

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.clock, self.timeout if timeout is None else timeout)

    def _require(self, replica: Replica[S]) -> S:
        if replica.state is None:
            raise self._does_not_exist()
        return replica.state

    def _does_not_exist(self) -> NotFoundError:
        return NotFoundError("the state does not exist or was deleted; create it with initialize", name=self.name)


def _updates(found: Iterable[Update[S]]) -> tuple[Update[S], ...]:
    """Return the updates of a generator. Refuse a single update, whose iterator yields its fields, and None."""
    _check_generated(found, may_yield=True)
    if isinstance(found, (Update, State, type)) or not hasattr(found, "__iter__"):
        raise _no_updates(found)
    updates = tuple(found)
    for update in updates:
        if not isinstance(update, Update):
            raise _no_updates(update)
    return updates


def _check_generated(returned: object, *, may_yield: bool = False) -> None:
    advice = "it runs again after a lost race, so await before this call"
    check_returned(returned, "a generator of updates", may_yield=may_yield, advice=advice)


def _no_generator(generator: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        "a generator of updates must be a function that takes the state and returns updates",
        found=type(generator).__name__,
    )


def _no_updates(found: object) -> InvalidArgumentError:
    what = "put a single one into a list"
    if isinstance(found, State):
        what = "return updates, not a state"
    elif isinstance(found, type):
        what = "return instances of updates, not their classes"
    return InvalidArgumentError(
        f"a generator of updates must return updates in a list, or yield them; {what}", found=type_name(found)
    )

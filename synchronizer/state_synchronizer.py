"""The state synchronizer: one state, the same in every process, changed only by updates that its log accepts.

Every process applies the same entries in the same order, so there is nothing to coordinate but the order, and that is
decided by the store. `LogFollower` applies the log, `LogWriter` puts calls into it, `Compactor` keeps it short.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from .arguments import check_class, check_count, check_duration, check_type
from .callables import check_callable, check_returned
from .clock import Clock, Deadline, clock_or_system, is_manual
from .errors import ClosedError, DeadlineExceededError, InvalidArgumentError, NotFoundError, OutcomeUnknownError
from .log.compaction import COMPACTION_BYTES, Compactor
from .log.entries import Revision, RevisionedStream
from .log.follower import LogFollower
from .log.listening import UpdateListening
from .log.replica import AppliedUpdate, Replica, Transition, TransitionFeed
from .log.writer import NO_ATTRIBUTES, Decision, LogWriter
from .state import S, State, StateCodec, Update
from .store import AttributeChange, SegmentStore

R = TypeVar("R")

NAME_PATTERN: Final = r"[A-Za-z0-9._/-]{0,599}[A-Za-z0-9._-]"
NAME_RULE: Final = "a name has 1 to 600 characters, letters, digits and . _ - /, the last of them no /"
DEFAULT_STATE_LIMIT_BYTES: Final = 1024 * 1024


class Proposal(NamedTuple, Generic[S, R]):
    """What a generator of `update_state_with_attributes` answers: the updates, changes of the log segment's attributes
    that go in with them or not at all, and what the caller gets back.

    A compared attribute must not come back to a value that it had before: after a lost answer, that value would let
    the lost append land late."""

    updates: Sequence[Update[S]]
    value: R
    attributes: Mapping[str, AttributeChange] = NO_ATTRIBUTES


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
        check_type(store, SegmentStore, "store")
        check_type(name, str, "name")
        check_type(updates, Iterable, "updates")
        check_type(rng, random.Random, "rng", or_none=True)
        check_duration(timeout, "timeout")
        check_count(state_limit_bytes, "state_limit_bytes")
        check_count(compaction_bytes, "compaction_bytes", at_least=0, or_none=True)
        if initial is None and state_type is None:
            raise InvalidArgumentError("give the initial state, or state_type to open one that exists", name=name)
        if initial is not None and not isinstance(initial, State):
            raise InvalidArgumentError("initial is a state, such as Counter(), and not its class", found=repr(initial))
        if state_type is not None:
            check_class(state_type, State, "state_type")
        if not re.fullmatch(NAME_PATTERN, name):
            raise InvalidArgumentError(NAME_RULE, name=name)
        if not store.guarantees.linearizable_append:
            raise InvalidArgumentError("a state needs a store with linearizable appends", url=store.url, name=name)
        self.name = name
        self.store = store
        self.clock: Clock = clock_or_system(clock)
        self.timeout = timeout
        self._codec: StateCodec[S] = StateCodec(state_type or type(initial), tuple(updates))  # type: ignore[arg-type]
        self._follower = LogFollower(RevisionedStream(store, name), self._codec, self.clock)
        self._writer = LogWriter(self._follower, state_limit_bytes)
        self._listening: list[UpdateListening[S]] = []  # without threads
        deadline = Deadline(self.clock, timeout)
        if initial is not None:
            self._follower.retry(deadline, lambda: store.create(name))
        self._follower.begin(deadline)
        self._compactor = Compactor(self._follower, compaction_bytes, rng or random.SystemRandom())
        if initial is not None and self._replica.state is None:
            try:
                self.initialize(initial, timeout=deadline.remaining())
            except OutcomeUnknownError as error:
                if self._replica.state is None:  # else, whoever began it, it is there
                    raise DeadlineExceededError(
                        "the state was not begun in time, or its beginning not heard of; open it again", state=name
                    ) from error

    @property
    def segment(self) -> str:
        """The name of the store's segment that holds the log."""
        return self._follower.log.segment

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
        mark = self._follower.mark
        return self._replica.next_offset - (mark.next_offset if mark else 0)

    def transitions(self) -> TransitionFeed[S]:
        """A feed of every transition from now on, whoever wrote it, as this process applies them."""
        return self._follower.transitions()

    def history(self, after: Revision, *, timeout: float | None = None) -> Sequence[Transition[S]]:
        """The transitions after ``after``, one by one as far back as the log goes, read from the store again.

        Where it does not go back so far, the first one has ``gap`` and leads to the state that reloads start from.
        `Transition.one_by_one` tells them apart where one entry holds several updates.
        """
        check_type(after, Revision, "after")
        return self._follower.history(after, self._deadline(timeout))

    def on_update(
        self, listener: Callable[[AppliedUpdate[S]], object], *, after: Revision | None = None
    ) -> Callable[[], None]:
        """Call ``listener`` with every update from now on, whoever wrote it; returns the function that ends it.

        With ``after``, a revision that was heard of earlier, it first hears what came since: an audit goes on where it
        stopped. It hears each update once, in the order of the log, or one call with ``gap`` in place of those that a
        compaction has removed. A thread of its own follows the log for it, so it may call the synchronizer; if it
        raises, that is logged, and it hears the next one. The thread ends soon after ``close``.

        On a clock that ``is_manual`` nothing runs in the background: `step`, or `poll_listeners`, calls the listener.
        """
        check_callable(listener, "a listener")
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
        """On a clock that ``is_manual``: fetch, and call the listeners of `on_update` with what is new to them."""
        self._follower.fetch(self._deadline(timeout))
        for listening in self._listening:
            listening.tell()

    def step(self) -> float:
        """`poll_listeners` once, without waiting for the store. Nothing is due at a known time, so it returns inf."""
        self.poll_listeners(timeout=0.0)
        return math.inf

    def fetch_updates(self, *, timeout: float | None = None) -> S:
        """Bring the local state up to what the log held when the call began, at least, and return it."""
        self._follower.fetch(self._deadline(timeout))
        return self.state

    def wait_for_growth(self, timeout: float) -> bool:
        """Whether the log is longer than what was applied here, waiting for it up to ``timeout`` seconds."""
        check_duration(timeout, "timeout")
        self._follower.check_usable()
        return bool(self.store.wait({self.segment: self.applied_length}, timeout))

    def wait_for(self, predicate: Callable[[S], bool], *, timeout: float | None = None) -> S:
        """The first state seen for which ``predicate`` holds; `DeadlineExceededError` if none came in time."""
        check_callable(predicate, "a predicate", name=self.name)
        deadline = self._deadline(timeout)
        while True:
            state = self._follower.fetch(deadline).state
            if state is not None:
                holds = predicate(state)
                check_returned(holds, "a condition", name=self.name)
                if holds:
                    return state
            if deadline.passed:
                raise DeadlineExceededError("no state fulfilled the condition in time", name=self.name)
            self._follower.retry(deadline, lambda: self.wait_for_growth(deadline.remaining(1.0)))

    def watch(self) -> Iterator[S]:
        """The present state, then the newest whenever it has changed, until the synchronizer is closed.

        Ends within a second of ``close``. A store that is away longer than the timeout raises `DeadlineExceededError`.
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
        """The newest replica, waiting up to a second for one of another revision than ``seen``."""
        deadline = self._deadline(None)
        replica = self._follower.fetch(deadline)
        if replica.revision == seen and self._follower.retry(deadline, lambda: self.wait_for_growth(1.0)):
            return self._follower.fetch(deadline)
        return replica

    def initialize(self, state: S, *, timeout: float | None = None) -> bool:
        """Begin the state with ``state`` if nothing is stored, or if it was deleted; whether this call did it."""
        self._codec.check_state(state)

        def begin(present: S | None) -> Decision[bool]:
            return Decision(False) if present is not None else Decision(True, self._codec.encode_initial(state))

        return self._submit(begin, timeout)[0]

    def delete(
        self, *, timeout: float | None = None, attributes: Callable[[], Mapping[str, AttributeChange]] | None = None
    ) -> bool:
        """End the state; whether this call did it. Its log stays, so that revisions of the name only grow.

        Replicas raise `NotFoundError` when they learn of it, until `initialize` begins the state again. What
        ``attributes`` answers, of attributes of the log's segment, is changed in the same atomic step.
        """
        if attributes is not None:
            check_callable(attributes, "a function for attributes")

        def end(present: S | None) -> Decision[bool]:
            if present is None:
                return Decision(False)
            changes = NO_ATTRIBUTES if attributes is None else attributes()
            check_returned(changes, "a function for attributes")
            return Decision(True, self._codec.encode_tombstone(), changes)

        deleted, _ = self._submit(end, timeout)
        if deleted:
            self._compactor.compact_or_warn(self._deadline(timeout), keep_last=False)
        return deleted

    def update_state(self, generator: Callable[[S], Iterable[Update[S]]], *, timeout: float | None = None) -> S:
        """Apply the updates that ``generator`` yields for the newest state, as one entry or not at all.

        The generator is asked again whenever its state turns out not to be the newest, so it must have no side
        effects, and must not call the synchronizer. No update at all means that there is nothing to do. Returns the
        state that the updates made. What the generator or ``apply_to`` raises reaches the caller, with nothing written.
        """
        if not callable(generator):
            raise _no_generator(generator)
        return self._update(lambda state: Proposal(_updates(generator(state)), None), timeout)[1]

    def update_state_returning(
        self, generator: Callable[[S], tuple[Iterable[Update[S]], R]], *, timeout: float | None = None
    ) -> R:
        """`update_state` whose generator also says what the caller gets back: that of its last, successful run."""
        if not callable(generator):
            raise _no_generator(generator)

        def propose(state: S) -> Proposal[S, R]:
            answer = generator(state)
            check_returned(answer, "a generator of updates")
            try:
                updates, value = answer
            except (TypeError, ValueError) as error:
                raise InvalidArgumentError(
                    "the generator here returns a pair: its updates, and what the caller gets back",
                    found=type(answer).__name__,
                ) from error
            return Proposal(_updates(updates), value)

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
        if not callable(generator):
            raise _no_generator(generator)
        return self._update(generator, timeout)[0]

    def _update(self, generator: Callable[[S], Proposal[S, R]], timeout: float | None) -> tuple[R, S]:
        def decide(state: S | None) -> Decision[R]:
            if state is None:
                raise self._does_not_exist()
            proposal = generator(state)
            check_returned(proposal, "a generator of updates")
            try:
                updates = proposal.updates
            except AttributeError as error:
                raise InvalidArgumentError(
                    "the generator here returns a Proposal", found=type(proposal).__name__
                ) from error
            if updates:
                return Decision(proposal.value, self._codec.encode_updates(updates), proposal.attributes)
            if proposal.attributes:
                raise InvalidArgumentError("attributes change with updates only; without one, append to the store")
            return Decision(proposal.value)

        value, after = self._submit(decide, timeout)
        assert after is not None
        return value, after

    def compact(self, *, timeout: float | None = None) -> bool:
        """Make the present state the place where reloads start, and give up the log before the last such place.

        Whether this call did it: another process may have been first. Conflicts with no update; a follower that is
        less than one compaction behind does not notice. Raises `InvalidArgumentError` for a state that does not come
        back equal when it is read.
        """
        return self._compactor.compact(self._deadline(timeout))

    def close(self) -> None:
        """Let the watchers end and refuse further calls. The store stays open. Closing twice is no error."""
        self._follower.closing.set()

    def __repr__(self) -> str:
        return f"StateSynchronizer({self.name!r}, {self.store.url!r}, revision={self.revision})"

    def _submit(self, decide: Callable[[S | None], Decision[R]], timeout: float | None) -> tuple[R, S | None]:
        deadline = self._deadline(timeout)
        outcome = self._writer.submit(decide, deadline)
        if outcome.wrote:
            self._compactor.compact_if_due(deadline)
        return outcome.value, outcome.state

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
        return NotFoundError("the state does not exist or was deleted; initialize it", name=self.name)


def _updates(found: Iterable[Update[S]]) -> tuple[Update[S], ...]:
    """What a generator returned. By mistake it is a single update, whose iterator gives its fields, or nothing."""
    check_returned(found, "a generator of updates", may_yield=True)
    if isinstance(found, Update) or not hasattr(found, "__iter__"):
        raise _no_updates(found)
    updates = tuple(found)
    for update in updates:
        if not isinstance(update, Update):
            raise _no_updates(update)
    return updates


def _no_generator(generator: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        "a generator of updates is a function of the state that returns them", found=type(generator).__name__
    )


def _no_updates(found: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        "a generator returns updates, in a list or by yielding them", found=type(found).__name__
    )

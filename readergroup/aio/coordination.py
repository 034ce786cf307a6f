"""Locks, elections, memberships and barriers on the event loop. A task that waits keeps no thread busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import synchronizer as sync
from synchronizer import DeadlineExceededError, InvalidArgumentError, ReaderGroupError
from synchronizer.arguments import check_duration
from synchronizer.recipes.coordination.barrier import Arrival
from synchronizer.recipes.coordination.lock import LockRequest, not_obtained

from ..forms import refuses_plain
from .calls import Calls, deadline_after, remaining, timeout_at, wait_until_set
from .facade import AwaitedProperty, ClosableFacade, Facade, Plain, awaited
from .listeners import on_loop
from .state import Changes

Elected = TypeVar("Elected", bound=Callable[[int], object])
Lost = TypeVar("Lost", bound=Callable[[], object])
Told = TypeVar("Told", bound=Callable[[str], object])


@refuses_plain
class HeldLock(Facade[sync.HeldLock]):
    """A lock or a permit that a task holds. As an async context manager it is released at the end of the block."""

    def __init__(self, wrapped: sync.HeldLock, calls: Calls, on_release: Callable[[HeldLock], object]) -> None:
        super().__init__(wrapped, calls)
        self._on_release = on_release

    @property
    def fencing_token(self) -> int:
        """Greater than that of every earlier holder."""
        return self._wrapped.fencing_token

    def check(self) -> None:
        """Raise `LeaseLostError` unless the lock is certainly held. Makes no call to the store."""
        self._wrapped.check()

    async def release(self) -> None:
        """Pass the lock to the next waiting caller at once. Releasing twice is no error."""
        self._on_release(self)
        await self._calls.end(self._wrapped.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release()


class TaskLock:
    """A lock or semaphore of one client, for the tasks of one loop.

    Tasks wait in order, and the first of them waits in the queue that all processes share. A task that is cancelled
    gives up its place at once.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._opening = asyncio.Lock()  # keeps the order of the tasks while threads open the lock
        self._queue = asyncio.Lock()  # first come, first served
        self._holders: dict[HeldLock, asyncio.Task[Any] | None] = {}

    async def acquire(self, open: Callable[..., sync.Lock], timeout: float | None) -> HeldLock:
        """Wait for the lock and return it, held.

        Args:
            open: Returns the lock that all threads of the client share. It blocks, up to its ``timeout``.
            timeout: Seconds to wait. Default: the client's.
        """
        check_duration(timeout, "timeout", or_none=True)
        deadline = deadline_after(self._calls.timeout if timeout is None else timeout)
        try:
            async with timeout_at(deadline):
                await self._opening.acquire()
        except TimeoutError:
            raise DeadlineExceededError("other tasks wait for the store, to open the lock; try again") from None
        try:
            lock = await self._calls.run(partial(open, timeout=remaining(deadline)))
        finally:
            self._opening.release()
        task = asyncio.current_task()
        if task in self._holders.values():
            raise InvalidArgumentError(
                f"this task already holds the {lock.kind}; use the object that acquiring it returned", name=lock.name
            )
        try:
            async with timeout_at(deadline):
                await self._queue.acquire()
        except TimeoutError:
            raise not_obtained(lock) from None
        try:
            held = HeldLock(await self._wait(lock, deadline), self._calls, self._forget)
        finally:
            self._queue.release()
        self._holders[held] = task
        return held

    def _forget(self, held: HeldLock) -> None:
        self._holders.pop(held, None)

    async def _wait(self, lock: sync.Lock, deadline: float) -> sync.HeldLock:
        request = lock.request()
        news = self._calls.news()
        try:
            while True:
                ring = news.next_ring()
                if (held := request.take()) is not None:
                    return held
                if not request.has_joined:  # not yet, or its lease expired during a pause
                    join = partial(_join, request, news.ring, remaining(deadline))
                    await self._calls.run(join, undo=lambda _: request.leave())
                elif not remaining(deadline):
                    await self._calls.run(request.give_up, is_certain=True)
                    break
                else:
                    await wait_until_set(ring, remaining(deadline))
        except BaseException:
            self._calls.start(request.leave)
            raise
        raise not_obtained(lock)


def _join(request: LockRequest, listener: Callable[[], None], timeout: float) -> None:
    request.join(timeout=timeout)
    request.on_news(listener)


class _Round:
    """The calls that make a participant take part, from one withdrawal to the next."""

    def __init__(self) -> None:
        self.running = 0
        self.is_wanted = False  # by a call that has returned
        self.is_cancelled = False


class _Wanting:
    """Undoes what cancelled calls have begun, unless another call counts on it.

    The thread that runs the calls, the withdrawals and what is undone runs them in their order.
    """

    def __init__(self) -> None:
        self._round = _Round()
        self._withdrawals = 0

    @contextmanager
    def call(self, takes_part: bool, undo: Callable[[], object]) -> Iterator[_Round]:
        """Call ``undo`` when the last of the calls that run has ended, if one was cancelled and none succeeded.

        Args:
            takes_part: Whether this participant takes part already. Then nothing is undone.
            undo: Withdraws. Does not block.
        """
        calls = self._round
        if not calls.running:
            calls.is_wanted, calls.is_cancelled = takes_part and not self._withdrawals, False
        calls.running += 1
        try:
            yield calls
            calls.is_wanted = True
        except asyncio.CancelledError:
            calls.is_cancelled = True
            raise
        finally:
            calls.running -= 1
            is_over = calls.is_cancelled and not calls.running and not calls.is_wanted
            if is_over and calls is self._round:  # else a withdrawal came meanwhile
                undo()

    @contextmanager
    def withdrawal(self) -> Iterator[None]:
        """Withdraw in the block. Calls that run meanwhile no longer count."""
        self._round = _Round()
        self._withdrawals += 1
        try:
            yield
        finally:
            self._withdrawals -= 1


class LeaderElection(ClosableFacade[sync.LeaderElection]):
    """One candidate of an election. Tasks may share it."""

    def __init__(self, wrapped: sync.LeaderElection, calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._news = calls.news()
        self._changes = Changes(wrapped.synchronizer, calls)
        self._thread = calls.single(f"election {wrapped.name}")  # one after the other
        self._wanting = _Wanting()

    name = Plain(lambda election: str(election.name))
    candidate_id = Plain(lambda election: str(election.candidate_id))
    member_timeout_seconds = Plain(lambda election: float(election.member_timeout_seconds))
    is_candidate = Plain(lambda election: bool(election.is_candidate))
    is_leader = Plain(lambda election: bool(election.is_leader))
    fencing_token = Plain(lambda election: int(election.fencing_token))
    leader = awaited(sync.LeaderElection.leader)

    def check(self) -> None:
        """Raise `LeaseLostError` unless this candidate certainly leads. Makes no call to the store."""
        self._wrapped.check()

    async def campaign(self, *, wait: bool = True, timeout: float | None = None) -> bool:
        """Become a candidate and wait for the election; return whether this candidate is the leader now.

        A cancelled campaign withdraws, unless this candidate took part before or another task campaigns.

        Args:
            wait: False to return as a candidate; `on_elected` reports the election.
            timeout: Seconds to wait. None waits until the election, or until another task calls `resign`.

        Raises:
            DeadlineExceededError: Another candidate still leads at the deadline. This one has withdrawn, unless another
                task campaigns.
        """
        check_duration(timeout, "timeout", or_none=True)
        election, deadline = self._wrapped, deadline_after(timeout)

        def begin() -> None:
            election.campaign(wait=False, timeout=timeout)
            election.on_news(self._news.ring)

        with self._wanting.call(election.is_candidate, lambda: self._thread.run(election.resign)) as calls:
            await self._thread.call(begin)
            while wait:
                ring = self._news.next_ring()
                self._calls.check_open()
                election.check_open()
                if election.is_leader or not election.is_candidate:
                    break
                if not remaining(deadline):
                    if calls.running == 1:
                        with suppress(ReaderGroupError):
                            await self._thread.call(election.resign, is_certain=True)
                    raise DeadlineExceededError(
                        "another candidate is the leader; campaign again, or use a longer timeout",
                        election=self.name,
                        candidate=self.candidate_id,
                        timeout=timeout,
                    )
                await wait_until_set(ring, remaining(deadline))
        return election.is_leader

    async def resign(self, *, timeout: float | None = None) -> None:
        """Withdraw. If this candidate leads, the next one becomes the leader at once."""
        with self._wanting.withdrawal():
            await self._thread.call(partial(self._wrapped.resign, timeout=timeout), is_certain=True)

    async def observe(self) -> AsyncIterator[str | None]:
        """Yield the leader's candidate id, or None, then that of each new term, until the election is closed."""
        seen: int | None = -1
        synchronizer = self._wrapped.synchronizer
        async for state in self._changes.watch(lambda: synchronizer.state):
            term = state.first.incarnation if state.first else None
            if term != seen:
                seen = term
                yield None if state.first is None else state.first.member

    async def on_elected(self, listener: Elected) -> Elected:
        """Call ``listener(fencing_token)``, also an ``async def``, when this candidate becomes the leader."""
        await self._calls.run(partial(self._wrapped.on_elected, on_loop(listener)))
        return listener

    async def on_lost(self, listener: Lost) -> Lost:
        """Call ``listener()``, also an ``async def``, when this candidate no longer certainly leads."""
        await self._calls.run(partial(self._wrapped.on_lost, on_loop(listener)))
        return listener

    async def close(self) -> None:
        """Resign and end the threads. Closing twice is no error. If the store is unavailable, the lease expires."""
        self._changes.end()
        await super().close()


class Membership(ClosableFacade[sync.Membership]):
    """One member, from `join` to `leave`. As an async context manager it joins, and closes at the end of the block."""

    def __init__(self, wrapped: sync.Membership, calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._thread = calls.single(f"membership {wrapped.name}")  # one after the other
        self._wanting = _Wanting()

    name = Plain(lambda membership: str(membership.name))
    member_id = Plain(lambda membership: str(membership.member_id))
    is_member = Plain(lambda membership: bool(membership.is_member))
    member_timeout_seconds = Plain(lambda membership: float(membership.member_timeout_seconds))
    members = awaited(sync.Membership.members)

    async def join(self, *, timeout: float | None = None) -> None:
        """Become a member and replace another one with the same id.

        A cancelled call leaves, unless it was a member before or another task joins.
        """
        membership = self._wrapped
        with self._wanting.call(membership.is_member, lambda: self._thread.run(membership.leave)):
            await self._thread.call(partial(membership.join, timeout=timeout))

    async def leave(self, *, timeout: float | None = None) -> None:
        """Leave. If the store does not answer in time, raise its error; the lease then expires."""
        with self._wanting.withdrawal():
            await self._thread.call(partial(self._wrapped.leave, timeout=timeout), is_certain=True)

    async def on_joined(self, listener: Told) -> Told:
        """Call ``listener(member_id)``, also an ``async def``, for each member that joins from now on."""
        await self._calls.run(partial(self._wrapped.on_joined, on_loop(listener)))
        return listener

    async def on_left(self, listener: Told) -> Told:
        """Call ``listener(member_id)``, also an ``async def``, for each member that leaves or is replaced."""
        await self._calls.run(partial(self._wrapped.on_left, on_loop(listener)))
        return listener

    async def on_dead(self, listener: Told) -> Told:
        """Call ``listener(member_id)``, also an ``async def``, for each member whose lease expired."""
        await self._calls.run(partial(self._wrapped.on_dead, on_loop(listener)))
        return listener

    async def __aenter__(self) -> Self:
        try:
            await self.join()
        except BaseException:
            self._calls.start(self._wrapped.close)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Barrier(ClosableFacade[sync.Barrier]):
    """A reusable barrier for a fixed number of parties. Tasks may share it."""

    name = Plain(lambda barrier: str(barrier.name))
    parties = Plain(lambda barrier: int(barrier.parties))
    n_waiting = AwaitedProperty(lambda barrier: int(barrier.n_waiting))
    reset = awaited(sync.Barrier.reset)

    @property
    def party(self) -> str | None:
        """The stable id of this party."""
        return self._wrapped.party

    async def wait(self, *, timeout: float | None = None) -> int:
        """Wait for all parties; return this party's arrival index in the round, from 0 on.

        A cancelled wait leaves, and so breaks the round. Raises as `Barrier.wait`.

        Args:
            timeout: Seconds to wait. Default: the client's.
        """
        check_duration(timeout, "timeout", or_none=True)
        deadline = deadline_after(self._wrapped.synchronizer.timeout if timeout is None else timeout)
        news = self._calls.news()
        arrival = self._wrapped.arrival()
        try:
            await self._calls.run(
                partial(_arrive, arrival, news.ring, remaining(deadline)), undo=lambda _: arrival.leave()
            )
            while True:
                ring = news.next_ring()
                in_time = arrival.is_over or self._calls.closed
                if in_time or not await wait_until_set(ring, remaining(deadline)):
                    break
            index = await self._calls.run(partial(arrival.index, in_time=in_time))
        except BaseException:
            self._calls.start(arrival.leave)
            raise
        await self._calls.run(arrival.leave, is_certain=True)
        return index


def _arrive(arrival: Arrival, listener: Callable[[], None], timeout: float) -> None:
    arrival.join(timeout=timeout)
    arrival.on_news(listener)

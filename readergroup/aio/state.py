"""Shared state on the event loop: the synchronizer and the collections. Reads of the local copy are plain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel

import synchronizer as sync
from synchronizer import (
    AppliedUpdate,
    ClosedError,
    DeadlineExceededError,
    NotFoundError,
    Revision,
    State,
    Update,
)
from synchronizer.arguments import check_duration
from synchronizer.callables import check_callable, check_returned
from synchronizer.recipes.collections.shared import Shared

from .calls import Calls, News, deadline_after, remaining, wait_until_set
from .facade import ClosableFacade, Plain, awaited
from .listeners import on_loop

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")
S = TypeVar("S", bound=State)
T = TypeVar("T")
V = TypeVar("V")
W = TypeVar("W", bound=Shared[Any])


#: A watcher of a client without patience looks no more often than this.
_LEAST_LOOK_SECONDS: Final = 1.0


class Changes:
    """Rings when a state has changed. One thread follows the state while tasks wait, however many they are."""

    def __init__(self, synchronizer: sync.StateSynchronizer[Any], calls: Calls) -> None:
        self._synchronizer = synchronizer
        self._calls = calls
        self._news: News | None = None
        self._users = 0
        self._stop: Callable[[], None] | None = None
        self._starting = asyncio.Lock()
        self._ended = False

    def end(self) -> None:
        """End all waits: the synchronizer is being closed."""
        self._ended = True
        if self._news is not None:
            self._news.ring()

    def check_open(self) -> None:
        self._calls.check_open()
        if self._ended:
            raise ClosedError("the state is closed; open it again", name=self._synchronizer.name)

    async def follow(self) -> News:
        """Follow the state until `unfollow`. The local state is up to date at the return."""
        self._users += 1
        try:
            async with self._starting:
                if self._news is None:
                    self._news = self._calls.news()
                if self._stop is None:
                    self._stop = await self._calls.run(
                        partial(self._synchronizer.on_update, self._hear), undo=lambda stop: stop()
                    )
            return self._news
        except BaseException:
            self.unfollow()
            raise

    def unfollow(self) -> None:
        self._users -= 1
        if not self._users and self._stop is not None:
            stop, self._stop = self._stop, None
            stop()

    def _hear(self, applied: AppliedUpdate[Any]) -> None:
        if self._news is not None:
            self._news.ring()

    async def fetch(self, timeout: float | None = None) -> None:
        """Bring the local state up to date. A state that was deleted is no error."""
        with suppress(NotFoundError):
            await self._calls.run(partial(self._synchronizer.fetch_updates, timeout=timeout))

    async def watch(self, look: Callable[[], T]) -> AsyncIterator[T]:
        """Yield ``look()``, then again after each change, until the synchronizer or the client is closed."""
        seen: Revision | None = None
        news = await self.follow()
        try:
            with suppress(ClosedError):
                await self.fetch()
                while True:
                    ring = news.next_ring()
                    self.check_open()
                    revision = self._synchronizer.revision
                    if revision != seen:
                        seen = revision
                        try:
                            found = look()
                        except NotFoundError:  # it was deleted
                            continue
                        yield found
                    elif not await wait_until_set(ring, max(_LEAST_LOOK_SECONDS, self._synchronizer.timeout)):
                        await self.fetch()  # raises if the state cannot be followed any more
        finally:
            self.unfollow()


class StateSynchronizer(ClosableFacade[sync.StateSynchronizer[S]], Generic[S]):
    """A shared state. ``state`` and the other properties are local and never block."""

    def __init__(self, wrapped: sync.StateSynchronizer[S], calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._changes = Changes(wrapped, calls)

    name = Plain(lambda synchronizer: str(synchronizer.name))
    revision = Plain(lambda synchronizer: Revision(*synchronizer.revision))
    applied_length = Plain(lambda synchronizer: int(synchronizer.applied_length))
    bytes_since_compaction = Plain(lambda synchronizer: int(synchronizer.bytes_since_compaction))
    was_compacted = Plain(lambda synchronizer: bool(synchronizer.was_compacted))
    history = awaited(sync.StateSynchronizer.history)
    compact = awaited(sync.StateSynchronizer.compact)
    delete = awaited(sync.StateSynchronizer.delete)

    @property
    def state(self) -> S:
        """The state as far as this process has applied the log, immutable."""
        return self._wrapped.state

    @property
    def snapshot_of_state(self) -> tuple[S, Revision]:
        """``state`` and its revision, taken together."""
        return self._wrapped.snapshot_of_state

    async def initialize(self, state: S, *, timeout: float | None = None) -> bool:
        """Begin the state with ``state`` if nothing is stored; return whether this call did it."""
        return await self._calls.run(partial(self._wrapped.initialize, state, timeout=timeout))

    async def fetch_updates(self, *, timeout: float | None = None) -> S:
        """Apply the log at least up to its end when the call began, and return the state."""
        return await self._calls.run(partial(self._wrapped.fetch_updates, timeout=timeout))

    async def update_state(self, generator: Callable[[S], Iterable[Update[S]]], *, timeout: float | None = None) -> S:
        """As `StateSynchronizer.update_state`. The generator is a plain function, and runs in a thread."""
        return await self._calls.run(partial(self._wrapped.update_state, generator, timeout=timeout))

    async def update_state_returning(
        self, generator: Callable[[S], tuple[Iterable[Update[S]], R]], *, timeout: float | None = None
    ) -> R:
        """As `StateSynchronizer.update_state_returning`. The generator is a plain function, and runs in a thread."""
        return await self._calls.run(partial(self._wrapped.update_state_returning, generator, timeout=timeout))

    async def update_state_unconditionally(self, *updates: Update[S], timeout: float | None = None) -> S:
        """Apply these updates to the newest state, as one entry, in this order; return the state after them."""
        return await self._calls.run(partial(self._wrapped.update_state_unconditionally, *updates, timeout=timeout))

    async def on_update(
        self, listener: Callable[[AppliedUpdate[S]], object], *, after: Revision | None = None
    ) -> Callable[[], Awaitable[None]]:
        """Call ``listener`` with every update from now on; return a function that stops it.

        An ``async def`` runs on this event loop, any other function in a thread of the SDK.
        """
        stop = await self._calls.run(
            partial(self._wrapped.on_update, on_loop(listener), after=after), undo=lambda stop: stop()
        )
        return partial(self._calls.end, stop)

    async def wait_for(self, predicate: Callable[[S], bool], *, timeout: float | None = None) -> S:
        """Return the first state seen for which ``predicate`` holds. Keeps no thread busy.

        Args:
            predicate: A plain function, called on the event loop.
            timeout: Seconds to wait. Default: the synchronizer's.

        Raises:
            DeadlineExceededError: No state fulfilled the predicate in time.
        """
        check_callable(predicate, "a predicate", takes="state", name=self._wrapped.name)
        check_duration(timeout, "timeout", or_none=True)
        deadline = deadline_after(self._wrapped.timeout if timeout is None else timeout)
        news = await self._changes.follow()
        try:
            await self._changes.fetch(remaining(deadline))
            while True:
                ring = news.next_ring()
                self._changes.check_open()
                with suppress(NotFoundError):
                    state = self._wrapped.state
                    holds = predicate(state)
                    check_returned(holds, "a predicate", name=self._wrapped.name)
                    if holds:
                        return state
                left = remaining(deadline)
                if not left:
                    raise DeadlineExceededError("no state fulfilled the predicate in time", name=self._wrapped.name)
                if not await wait_until_set(ring, min(left, self._wrapped.timeout or left)):
                    await self._changes.fetch(remaining(deadline))
        finally:
            self._changes.unfollow()

    def watch(self) -> AsyncIterator[S]:
        """Yield the current state, then the newest one after each change, until the synchronizer is closed.

        Raise `DeadlineExceededError` if the store is unavailable for longer than the timeout.
        """
        return self._changes.watch(lambda: self._wrapped.state)

    async def close(self) -> None:
        """End listeners and watchers, and refuse further changes. Closing twice is no error."""
        self._changes.end()
        await super().close()


class _SharedFacade(ClosableFacade[W], Generic[W]):
    """What the shared collections have in common."""

    def __init__(self, wrapped: W, calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._changes = Changes(wrapped.synchronizer, calls)

    name = Plain(lambda shared: str(shared.name))
    refresh = awaited(Shared.refresh)

    async def _register(self, listener: Callable[[Any], object], **options: Any) -> Callable[[], Awaitable[None]]:
        register = self._wrapped.register_listener  # type: ignore[attr-defined]
        stop: Callable[[], None] = await self._calls.run(
            partial(register, on_loop(listener), **options), undo=lambda stop: stop()
        )
        return partial(self._calls.end, stop)

    async def close(self) -> None:
        """End listeners and watchers and refuse changes. Reads still work. Closing twice is no error."""
        self._changes.end()
        await super().close()


class SharedMap(_SharedFacade[sync.SharedMap[V]], Mapping[str, V], Generic[V]):
    """A shared mapping. Reads use the copy in this process and are plain; changes are awaited."""

    async def put(self, key: str, value: V, *, timeout: float | None = None) -> None:
        """Set the value of ``key``, whatever it is now."""
        await self._calls.run(partial(self._wrapped.put, key, value, timeout=timeout))

    async def put_if_absent(self, key: str, value: V, *, timeout: float | None = None) -> bool:
        """Set the value of ``key`` if it has none; return whether this call set it."""
        return await self._calls.run(partial(self._wrapped.put_if_absent, key, value, timeout=timeout))

    async def setdefault(self, key: str, default: V) -> V:
        """Return the value of ``key``; if it has none, set it to ``default`` and return that."""
        return await self._calls.run(partial(self._wrapped.setdefault, key, default))

    async def popitem(self) -> tuple[str, V]:
        """Remove the first entry and return it; `KeyError` if the map is empty."""
        return await self._calls.run(self._wrapped.popitem)

    replace = awaited(sync.SharedMap.replace)
    remove = awaited(sync.SharedMap.remove)
    clear = awaited(sync.SharedMap.clear)
    update = awaited(sync.SharedMap.update)

    async def pop(self, key: str, /, *default: Any) -> Any:
        """Remove ``key`` and return its value, or ``default`` if it has none; `KeyError` without a default."""
        return await self._calls.run(partial(self._wrapped.pop, key, *default))

    def __getitem__(self, key: str) -> V:
        return self._wrapped[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wrapped)

    def __len__(self) -> int:
        return len(self._wrapped)

    def __contains__(self, key: object) -> bool:
        return key in self._wrapped

    def copy(self) -> dict[str, V]:
        """Return all entries at one revision."""
        return self._wrapped.copy()

    def watch(self) -> AsyncIterator[dict[str, V]]:
        """Yield all entries now, then the newest ones after each change, until the map is closed."""
        return self._changes.watch(self._wrapped.copy)

    async def register_listener(
        self, listener: Callable[[sync.EntryChange[V]], object], *, key: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        """Call ``listener``, also an ``async def``, with every change, or those of ``key``; return what ends it."""
        return await self._register(listener, key=key)


class SharedSet(_SharedFacade[sync.SharedSet[T]], Set[T], Generic[T]):
    """A shared set. Reads use the copy in this process and are plain; changes are awaited."""

    async def add(self, item: T, *, timeout: float | None = None) -> bool:
        """Add ``item``; return whether this call added it."""
        return await self._calls.run(partial(self._wrapped.add, item, timeout=timeout))

    async def discard(self, item: T, *, timeout: float | None = None) -> bool:
        """Remove ``item``; return whether this call removed it."""
        return await self._calls.run(partial(self._wrapped.discard, item, timeout=timeout))

    async def pop(self) -> T:
        """Remove an item and return it; `KeyError` if the set is empty."""
        return await self._calls.run(self._wrapped.pop)

    remove = awaited(sync.SharedSet.remove)
    clear = awaited(sync.SharedSet.clear)
    update = awaited(sync.SharedSet.update)

    def __contains__(self, item: object) -> bool:
        return item in self._wrapped

    def __iter__(self) -> Iterator[T]:
        return iter(self._wrapped)

    def __len__(self) -> int:
        return len(self._wrapped)

    @classmethod
    def _from_iterable(cls, items: Iterable[Any]) -> Any:
        return frozenset(items)

    def copy(self) -> frozenset[T]:
        """Return all items at one revision."""
        return self._wrapped.copy()

    def watch(self) -> AsyncIterator[frozenset[T]]:
        """Yield all items now, then the newest ones after each change, until the set is closed."""
        return self._changes.watch(self._wrapped.copy)

    async def register_listener(self, listener: Callable[[sync.SetChange[T]], object]) -> Callable[[], Awaitable[None]]:
        """Call ``listener``, also an ``async def``, with every change; return what ends it."""
        return await self._register(listener)


class SharedConfig(_SharedFacade[sync.SharedConfig[M]], Generic[M]):
    """A shared configuration. ``value`` is local and plain; changes are awaited."""

    put = awaited(sync.SharedConfig.put)
    update = awaited(sync.SharedConfig.update)
    put_if_absent = awaited(sync.SharedConfig.put_if_absent)
    replace = awaited(sync.SharedConfig.replace)
    remove = awaited(sync.SharedConfig.remove)
    clear = awaited(sync.SharedConfig.clear)

    @property
    def value(self) -> M:
        """The configuration as far as this process knows."""
        return self._wrapped.value

    def watch(self) -> AsyncIterator[M]:
        """Yield the configuration now, then the newest one after each change, until it is closed."""
        return self._changes.watch(lambda: self._wrapped.value)

    async def register_listener(self, listener: Callable[..., object], **options: Any) -> Callable[[], Awaitable[None]]:
        """Call ``listener``, also an ``async def``, as `SharedConfig.register_listener` does; return what ends it."""
        return await self._register(listener, **options)


class SharedCounter(_SharedFacade[sync.SharedCounter]):
    """A shared counter. ``value`` is local and plain; changes are awaited."""

    add = awaited(sync.SharedCounter.add)
    put = awaited(sync.SharedCounter.put)
    replace = awaited(sync.SharedCounter.replace)

    @property
    def value(self) -> int:
        """The value as far as this process knows."""
        return self._wrapped.value

    def watch(self) -> AsyncIterator[int]:
        """Yield the value now, then the newest one after each change, until the counter is closed."""
        return self._changes.watch(lambda: self._wrapped.value)

    async def register_listener(
        self, listener: Callable[[sync.ValueChange[int]], object]
    ) -> Callable[[], Awaitable[None]]:
        """Call ``listener``, also an ``async def``, with every change; return what ends it."""
        return await self._register(listener)

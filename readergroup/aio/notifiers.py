"""Notifications on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar

from notifications import Notification, PollingNotifier
from notifications.mailbox import Mailbox
from synchronizer import ClosedError, DeadlineExceededError
from synchronizer.arguments import check_duration

from .calls import Calls, deadline_after, remaining, wait_until_set
from .facade import Facade, Plain, awaited
from .listeners import awaited_on_loop

N = TypeVar("N", bound=Notification)

#: How many notifications wait for a slow task. Then the newest one stands for those that it misses.
QUEUE_SIZE: Final = 1000


class _Inbox(Generic[N]):
    """The notifications for one task, from the notifier's threads."""

    def __init__(self, calls: Calls) -> None:
        self._mailbox: Mailbox[N] = Mailbox(QUEUE_SIZE)
        self._calls = calls
        self._news = calls.news()

    def __call__(self, notification: N) -> None:
        self._mailbox.put(notification)
        self._news.ring()

    def close(self) -> None:
        self._mailbox.close()
        self._news.ring()

    async def take(self, timeout: float | None) -> N | None:
        """Return the oldest notification, or None if none came in time.

        Raises:
            ClosedError: The inbox or the client is closed.
        """
        deadline = deadline_after(timeout)
        while True:
            ring = self._news.next_ring()
            notification = self._mailbox.take()
            if notification is not None:
                return notification
            if self._mailbox.closed or self._calls.closed:
                raise ClosedError("the listeners were unregistered, or the client was closed")
            if not await wait_until_set(ring, remaining(deadline)):
                return self._mailbox.take()


class Notifier(Facade[PollingNotifier[Any, N]], Generic[N]):
    """A notifier. ``async for`` gives the present value, then each change once, until the notifier is closed.

    Each iteration hears on its own. It may be 1000 notifications behind; then the newest one stands for those that it
    misses, with ``gap=True``.
    """

    def __init__(self, wrapped: PollingNotifier[Any, N], calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._inboxes: set[_Inbox[N]] = set()
        self._waited: _Inbox[N] | None = None
        self._starting = asyncio.Lock()

    source = Plain(lambda notifier: str(notifier.source))
    listener_failures = Plain(lambda notifier: int(notifier.listener_failures))
    poll = awaited(PollingNotifier.poll)
    forget_listener = awaited(PollingNotifier.forget_listener)

    async def register_listener(
        self, listener: Callable[[N], object], *, durable: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        """Tell ``listener`` the present value and every change from now on; return a function that unregisters it.

        An ``async def`` runs on this event loop, any other function in a thread of the SDK, one call at a time. If
        such a function returns a coroutine, as a lambda may, that runs on this event loop.

        Args:
            listener: Takes a notification.
            durable: As of `PollingNotifier.register_listener`.
        """
        told = awaited_on_loop(listener)
        wrapped = self._wrapped
        unregister = await self._calls.run(
            partial(wrapped.register_listener, told, durable=durable), undo=lambda unregister: unregister()
        )
        return partial(self._calls.end, unregister)

    async def unregister_listener(self, listener: Callable[[N], object]) -> None:
        """Unregister ``listener``. No error if it is not registered.

        Raise `InvalidArgumentError` for what cannot be a listener, such as the function that `register_listener`
        returned: call and await that one instead.
        """
        await self._calls.end(partial(self._wrapped.unregister_listener, awaited_on_loop(listener)))

    async def unregister_all_listeners(self) -> None:
        """Unregister all listeners. Iterations end, and a `wait` in another task raises `ClosedError`."""
        self._waited = None
        for inbox in list(self._inboxes):
            inbox.close()
        await self._calls.end(self._wrapped.unregister_all_listeners)

    async def wait(self, *, timeout: float | None = None) -> N:
        """Wait for the next notification: the present value first, then each change once.

        Each notification goes to one of the calls; a cancelled call loses none. The notifier keeps listening between
        them, until `unregister_all_listeners` or the end of the client.

        Args:
            timeout: Seconds to wait. Default: the client's.

        Raises:
            DeadlineExceededError: There was no notification in time.
            ClosedError: The client is closed, or another task unregistered all listeners.
        """
        check_duration(timeout, "timeout", or_none=True)
        async with self._starting:
            inbox = self._waited
            if inbox is None:
                inbox = await self._listen()
                self._waited = inbox
        found = await inbox.take(self._wrapped.synchronizer.timeout if timeout is None else timeout)
        if found is None:
            raise DeadlineExceededError("no notification came in time", source=self._wrapped.source)
        return found

    async def __aiter__(self) -> AsyncIterator[N]:
        inbox = await self._listen()
        try:
            with suppress(ClosedError):
                while (notification := await inbox.take(None)) is not None:
                    yield notification
        finally:
            self._inboxes.discard(inbox)
            self._calls.start(partial(self._wrapped.unregister_listener, inbox))

    async def _listen(self) -> _Inbox[N]:
        inbox: _Inbox[N] = _Inbox(self._calls)
        await self._calls.run(partial(self._wrapped.register_listener, inbox), undo=lambda unregister: unregister())
        self._inboxes.add(inbox)
        return inbox

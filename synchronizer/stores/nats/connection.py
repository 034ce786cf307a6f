"""A connection to NATS that threads can use. nats-py runs in one hidden thread for all stores of the process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import ssl
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import urlsplit

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from synchronizer.clock import Deadline, SystemClock
from synchronizer.errors import (
    ClosedError,
    ReaderGroupError,
    StorePermissionError,
    StoreUnavailableError,
    UnsupportedError,
)
from synchronizer.loggers import get_logger
from synchronizer.threads.background import survive
from synchronizer.threads.flag import Flag

from . import loop as nats_loop
from .address import NatsAddress
from .client import NoTlsError, PublicClient, Sendable, new_client
from .frames import Answer, Headers, Outgoing, framed
from .rights import right_for, rights_of

_logger = get_logger(__name__)

#: Older servers silently store the messages of an atomic batch one by one.
OLDEST_VERSION: Final = (2, 12)
_RECONNECT_PAUSE_SECONDS: Final = 0.1
#: The interval of pings. The client gives up a server that misses two of them.
_PING_SECONDS: Final = 3
_CONNECT_SECONDS: Final = 2
_PROBE_SECONDS: Final = 1.0
_CANCELLATIONS: Final = 5
_CANCELLATION_SECONDS: Final = 0.2
#: How long closing waits for answers that are heard, and how often it looks for them.
_LAST_ANSWERS_SECONDS: Final = 0.2
_LAST_ANSWERS_LOOK_SECONDS: Final = 0.001
#: A client that receives nothing for this time, while answers are due, is replaced.
_DEAF_SECONDS: Final = 15.0
#: The assumed minimum throughput of network and disk; large messages get more time accordingly.
_SLOWEST_BYTES_PER_SECOND: Final = 1_000_000
#: nats-py converts the messages of servers to lower case.
_VIOLATION: Final = re.compile(r'permissions violation for (publish|subscription)[^"]*"([^"]*)"')

_clock: Final = SystemClock()


class NotSentError(Exception):
    """The message did not leave this process."""


class NotPermittedError(NotSentError):
    """The server refused the message: its user lacks a right."""


class AnswerLostError(Exception):
    """The message was sent, and no answer came."""


class PerhapsNotPermittedError(AnswerLostError):
    """The server refused a message, because its user lacks a right: this one, or another one on the same subject."""


class _Exchange:
    """The messages that a thread sends, and the answers that it waits for."""

    __slots__ = ("answers", "expected", "failure", "messages", "missing", "heard", "timer", "_done", "_permission")

    def __init__(self) -> None:
        self.messages: list[Sendable] = []
        self.answers: list[list[Answer]] = []
        self.expected: list[tuple[bytes, list[Answer], bool]] = []  # token, answers, whether there are many
        self.missing = 0
        self.failure: Exception | None = None
        self.heard: Callable[[list[list[Answer]]], None] | None = None
        self.timer: asyncio.TimerHandle | None = None  # gives up an exchange that no thread waits for
        self._permission = [True]
        self._done = threading.Lock()
        self._done.acquire()

    @property
    def is_sent(self) -> bool:
        """Whether the exchange was sent, or was given up unsent: then it must not be sent any more."""
        return not self._permission

    def take_permission(self) -> bool:
        """Return True once: to the loop, which then sends the messages, or to the thread that gives them up unsent."""
        try:
            return self._permission.pop()
        except IndexError:
            return False

    def end(self, failure: Exception | None = None) -> None:
        """Wake the thread. The loop may call it more than once; the first call counts."""
        if self._done.locked():
            self.failure = failure
            self._done.release()

    def wait(self, timeout: float) -> bool:
        return self._done.acquire(timeout=timeout)


class NatsConnection:
    """One connection, shared by threads. It reconnects by itself when the connection or the server is lost."""

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self._rights = rights_of(address.stream, address.inbox_prefix)
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._refusal: ReaderGroupError | None = None
        self._last_error: Exception | None = None
        self._is_login_refused = False
        self._tls_failure: Exception | None = None
        self._inbox = f"{address.inbox_prefix}.{uuid.uuid4().hex}.".encode()
        self._numbers = itertools.count()
        self._listeners: dict[str, Callable[[Headers], None]] = {}
        self._reconnected_callbacks: list[Callable[[], None]] = []
        self._warnings: set[str] = set()
        self._is_without_jetstream = False
        self._refusal_of_inbox: StorePermissionError | None = None
        self.max_payload = 0
        self._loop: nats_loop.HiddenLoop | None = None
        self._was_opened = Flag()
        self._why_not_opened: Exception | None = None
        self._begin_anew()

    def open(self) -> Self:
        """Connect. Not part of the constructor: after an interrupt the caller needs an object that it can close."""
        try:
            self._loop = nats_loop.acquire(self)
            with contextlib.suppress(nats_loop.LoopEndedError):
                self._loop.call(self._begin_opening)
                seconds = self._address.timeout_seconds + nats_loop.PATIENCE_SECONDS
                if self._was_opened.wait(seconds):
                    if self._why_not_opened is not None:
                        raise self._why_not_opened
                    return self
                self._loop.retire()
            raise self.unavailable("the thread of the event loop does not respond; try again")
        except BaseException:
            self.close()
            raise

    def _begin_anew(self) -> None:
        """Reset the state that belongs to one loop. Called by the loop's thread."""
        self._home: asyncio.AbstractEventLoop | None = None
        self._expecting: dict[bytes, tuple[_Exchange, list[Answer], bool]] = {}
        self._pending: dict[_Exchange, None] = {}  # in order of arrival
        self._subscriptions: dict[str, Subscription] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: PublicClient | None = None
        self._is_connected = False
        self._is_connecting = False
        self._is_heard = True
        self._silent_since = 0.0

    # What threads call

    @property
    def has_jetstream(self) -> bool:
        """False if all servers that could be reached report no JetStream."""
        return not self._is_without_jetstream

    def exchange(
        self,
        messages: Sequence[Outgoing],
        timeout_seconds: float | None = None,
        *,
        heard: Callable[[list[list[Answer]]], None] | None = None,
    ) -> list[list[Answer]]:
        """Send the messages in this order; return the answers to each message that has answers.

        Without any, return when the messages were handed to the operating system.

        Args:
            messages: The messages to send.
            timeout_seconds: How long to wait for the answers (default: as in the address), plus 1 s per MB of data.
            heard: Called with the answers in the hidden thread, also if they come after an interrupt of this call.

        Raises:
            NotSentError: The messages did not leave this process, or the server refused them.
            AnswerLostError: The messages were sent, and no answer came.
        """
        self._check_open()
        if self._refusal is not None:
            raise self._refusal
        size, max_payload = 0, self.max_payload
        exchange = _Exchange()
        exchange.heard = heard
        for message in messages:
            size += len(message.data)
            if len(message.data) > max_payload:
                raise NotSentError("a message is larger than the server's limit")
            exchange.messages.append(self._sendable(message, exchange))
        if timeout_seconds is None:
            timeout_seconds = self._address.timeout_seconds
        try:
            self._call_in_loop(self._start, exchange)
            if self._is_closed and self._hidden.has_ended and exchange.take_permission():
                raise self._closed()  # a signal handler closed it, and the loop ended before it sent this
            if not exchange.wait(timeout_seconds + size / _SLOWEST_BYTES_PER_SECOND):
                self._give_up(exchange)
        except BaseException as error:  # also an interrupt: unsent messages must not be sent later
            is_sent = not exchange.take_permission()
            if heard is None or not is_sent or isinstance(error, Exception):
                with contextlib.suppress(nats_loop.LoopEndedError):  # then its state is gone as well
                    self._hidden.call(self._abandon, exchange)
            raise
        if exchange.failure is not None:
            raise exchange.failure
        return exchange.answers

    def ask_later(self, messages: Sequence[Outgoing], heard: Callable[[list[list[Answer]]], None]) -> None:
        """Send requests whose answers nobody waits for: the hidden thread calls ``heard`` with them, if they come."""
        exchange = _Exchange()
        exchange.heard = heard
        exchange.messages += [self._sendable(message, exchange) for message in messages]
        self._call_in_loop(self._start_without_thread, exchange)

    def _sendable(self, message: Outgoing, exchange: _Exchange) -> Sendable:
        if not message.has_answer:
            return Sendable(message, b"", framed(message, b""))
        token = b"%d" % next(self._numbers)
        answers: list[Answer] = []
        exchange.answers.append(answers)
        exchange.expected.append((token, answers, message.has_many_answers))
        reply = self._inbox + token
        return Sendable(message, reply, framed(message, reply))

    def _give_up(self, exchange: _Exchange) -> None:
        """Stop waiting, even if the loop is stuck. Messages not sent yet are never sent."""
        is_unsent = exchange.take_permission()
        if exchange.wait(0):
            return
        if is_unsent:
            raise NotSentError("the connection is down")
        raise AnswerLostError("no answer in time")

    def ask(self, subject: str, data: bytes) -> Answer:
        """Return the answer to a request that is safe to repeat."""
        return self.ask_all([Outgoing(subject, data)])[0][0]

    def ask_all(self, messages: Sequence[Outgoing]) -> list[list[Answer]]:
        try:
            answers = self.exchange(messages)
        except (NotSentError, AnswerLostError) as error:
            raise self.failed(error) from error
        if any(answer and answer[0].is_from_nobody for answer in answers):
            raise self.unavailable(
                "no server accepts requests for the stream, as during the election of a leader; try again"
            )
        return answers

    def send(self, message: Outgoing) -> None:
        """Send a message that has no answer, if there is a connection, also while it closes. Finalizers may call it."""
        self._check_process()
        with contextlib.suppress(nats_loop.LoopEndedError):  # and the connection with it
            self._hidden.call(self._send_unheard, Sendable(message, b"", framed(message, b"")))

    def listen(self, subject: str, hear: Callable[[Headers], None]) -> None:
        """Call ``hear``, in the hidden thread, with the headers of each message on the subject."""
        self._call_in_loop(self._add_listener, subject, hear)

    def unlisten(self, subject: str) -> None:
        with contextlib.suppress(ClosedError):
            self._call_in_loop(self._remove_listener, subject)

    def when_reconnected(self, callback: Callable[[], None]) -> None:
        self._reconnected_callbacks.append(callback)

    @property
    def _hidden(self) -> nats_loop.HiddenLoop:
        assert self._loop is not None
        return self._loop

    def _call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        self._check_open()
        try:
            self._hidden.call(call, *arguments)
        except nats_loop.LoopEndedError:
            self._revive()
            self._hidden.call(call, *arguments)

    def _revive(self) -> None:
        """Move to another loop, after the thread of the last one ended unexpectedly."""
        with self._lock:
            self._check_open()
            if self._hidden.has_ended:  # else another thread was faster
                loop = nats_loop.acquire(self)
                loop.call(self._move)
                self._loop = loop

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed()
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise self._closed()
        if sys.is_finalizing():  # the hidden thread has stopped, and would never answer
            raise ClosedError(
                "the program is ending, and the connection with it; close the client before", url=self._address.url
            )

    def _closed(self) -> ClosedError:
        return ClosedError("the store is closed; open another", url=self._address.url)

    def unavailable(self, reason: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the NATS servers do not answer: {reason}", url=self._address.url, last_error=_text(self._last_error)
        )

    def failed(self, error: NotSentError | AnswerLostError) -> ReaderGroupError:
        """Return the error to raise for a request that is safe to repeat, sent or not."""
        if self._is_closed:
            return self._closed()
        if isinstance(error, (NotPermittedError, PerhapsNotPermittedError)):
            return StorePermissionError(str(error), url=self._address.url)
        return self.unavailable(str(error))

    def close(self) -> None:
        """Close the connection. It may be called again after an interrupt, and by several threads at once."""
        self._release(waits=True)

    def abandon(self) -> None:
        """Have the hidden thread close the connection, without waiting for it."""
        self._release(waits=False)

    def _release(self, *, waits: bool) -> None:
        if os.getpid() == self._process_id:
            self._is_closed = True
            nats_loop.release(self, waits=waits)

    # What runs in the hidden thread

    def loop_ended(self) -> None:
        for exchange in list(self._pending):
            self._finish_without_answer(exchange, "the thread of the event loop ended")
        if not self._was_opened.is_set():
            self._why_not_opened = self.unavailable("the thread of the event loop ended; try again")
            self._was_opened.set()

    def _begin_opening(self) -> None:
        self._home = asyncio.get_running_loop()
        self._spawn(self._open_and_tell())

    async def _open_and_tell(self) -> None:
        try:
            await self._open()
        except Exception as error:
            self._why_not_opened = error
        except BaseException:
            self._why_not_opened = self._closed()
            raise
        finally:
            self._was_opened.set()

    def _move(self) -> None:
        """Start over in this loop. A second call changes nothing: the thread that asked may have been interrupted."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            nats_loop.release(self, waits=False)
        elif self._home is not loop:
            self._begin_anew()
            self._home = loop
            self._replace_client()

    async def _open(self) -> None:
        self._is_connecting = True
        connecting = self._spawn(self._connect())
        # `asyncio.wait_for` would wait for the end of a task that has missed its cancellation.
        if not (await asyncio.wait({connecting}, timeout=self._address.timeout_seconds))[0]:
            await _cancel(connecting)
            raise self._why_not_connected()
        connecting.result()
        await self._look_at_servers()
        if self._refusal is not None:
            raise self._refusal

    def _why_not_connected(self) -> ReaderGroupError:
        if self._is_login_refused:
            return StoreUnavailableError(
                "the NATS servers refuse the credentials of the address; correct user:password@, token@, 'credentials'"
                " or 'nkey'",
                url=self._address.url,
            )
        if self._tls_failure is not None:
            return StoreUnavailableError(
                "the TLS handshake with the NATS servers failed; check tls_ca and tls_hostname of the address",
                url=self._address.url,
                last_error=_text(self._tls_failure),
            )
        return self.unavailable("no connection; check the hosts and ports of the address")

    async def _connect(self) -> None:
        """Connect a new client. Retries for ever; raises only errors that no retry would fix."""

        def on_deaf() -> None:
            if client is self._client:
                self._replace_client()

        demands_tls = self._address.tls is not None
        client = new_client(self._on_answer, self._on_damage, on_deaf, demands_tls=demands_tls)
        self._client, self._subscriptions, self._refusal_of_inbox = client, {}, None
        try:
            await self._connect_client(client)
            if self._is_closed:  # nats-py missed the cancellation
                raise self._closed()
            await client.hear_answers(self._inbox.decode() + "*")
            for _ in range(2):  # nats-py lets the first ping overtake the subscription
                await client.flush(_CONNECT_SECONDS)
            # By now the server has reported whether it permits the subscription.
            if self._refusal_of_inbox is not None:
                raise self._refusal_of_inbox
            await self._subscribe_to_all()
        except BaseException as error:
            self._discard(client)
            if isinstance(error, ReaderGroupError) or not isinstance(error, Exception):
                raise
            raise StoreUnavailableError(
                "the connection cannot be established", url=self._address.url, error=_text(error)
            ) from error
        self._is_connecting = False
        self._begin_sending()

    async def _connect_client(self, client: PublicClient) -> None:
        address = self._address
        login: dict[str, Any] = {}
        if address.token is not None:
            login["token"] = address.token
        if address.password is not None:
            login |= {"user": address.user, "password": address.password}

        async def on_disconnected() -> None:
            if client is self._client:
                self._lose_connection()

        async def on_reconnected() -> None:
            if client is self._client:
                await self._subscribe_to_all()
                self._begin_sending()
                self._tell_reconnected()

        async def on_closed() -> None:
            """Replace a client that has given up, as after an error for which the server closed the connection."""
            if client is self._client:
                self._replace_client()

        try:
            await client.connect(
                list(address.servers),
                name="readergroup",
                error_cb=self._on_error,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
                closed_cb=on_closed,
                connect_timeout=_CONNECT_SECONDS,
                reconnect_time_wait=_RECONNECT_PAUSE_SECONDS,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                ping_interval=_PING_SECONDS,
                pending_size=0,  # buffer nothing: publishing without a connection is an error
                tls=address.tls,
                tls_hostname=address.tls_hostname,
                user_credentials=address.credentials_file,
                nkeys_seed=address.nkey_file,
                inbox_prefix=address.inbox_prefix,
                **login,
            )
        except ImportError as error:
            raise UnsupportedError("NKeys and credentials need a package; pip install 'nats-py[nkeys]'") from error

    def _replace_client(self) -> None:
        """Connect another client, however long it takes."""
        if not self._is_closed and not self._is_connecting:
            self._is_connecting = True
            self._lose_connection()
            self._spawn(self._connect_anew())

    async def _connect_anew(self) -> None:
        if self._client is not None:
            self._discard(self._client)
        while not self._is_closed:
            try:
                await self._connect()
            except Exception as error:
                self._last_error = error
                await asyncio.sleep(_RECONNECT_PAUSE_SECONDS)
            else:
                self._tell_reconnected()
                return

    def _discard(self, client: PublicClient) -> None:
        if client is self._client:
            self._client = None  # from here on its callbacks are ignored
        self._spawn(_shut_client(client))

    async def _look_at_servers(self) -> None:
        """Refuse servers that are too old, including those that the client could switch to later."""
        servers = {*self._address.servers}
        if self._client is not None:
            servers |= {server.geturl() for server in self._client.servers}
        found = [info for info in await asyncio.gather(*map(_server_info_of, sorted(servers))) if info]
        self._is_without_jetstream = bool(found) and not any(info.get("jetstream") for info in found)
        for info in found:
            self._refusal = self._refusal or _refusal_of(info, self._address.url)

    async def _on_error(self, error: Exception) -> None:
        self._is_heard = True
        self._last_error = error
        # Some attempts report only the end of the connection, which comes right after the refusal: remember it.
        self._is_login_refused |= "authorization" in str(error).lower()
        if isinstance(error, (ssl.SSLError, NoTlsError)):
            self._tls_failure = error
        _logger.debug("NATS: %r", error)
        if violation := _VIOLATION.search(str(error).lower()):
            self._on_violation(violation[1], violation[2])

    def _on_violation(self, action: str, subject: str) -> None:
        """Fail the refused exchanges at once: the server reports a violation, and sends no answer."""
        if action == "subscription":
            missing = right_for(subject, self._rights.subscribe)
            if subject.startswith(self._inbox.decode().lower()):
                self._refusal_of_inbox = StorePermissionError(
                    _missing_right("subscribe to", missing), url=self._address.url
                )
            self._warn_once(_missing_right("subscribe to", missing))
            return
        failure = _missing_right("publish to", right_for(subject, self._rights.publish))
        self._warn_once(failure)
        refused = {
            exchange: message.subject
            for exchange in self._pending
            for message, *_ in exchange.messages
            if exchange.is_sent and message.subject.lower() == subject
        }
        kind: type[Exception] = NotPermittedError
        if len(set(refused.values())) > 1:
            # The subject is in lower case: of two subjects that differ only in case, one may be permitted.
            kind = AnswerLostError
        elif len(refused) > 1:
            # The right may have been revoked or granted between two of them: one may have been stored.
            kind = PerhapsNotPermittedError
        for exchange in refused:
            self._finish(exchange, kind(failure))

    def _on_damage(self, error: Exception) -> None:
        """Survive a message that cannot be read, or on which a listener failed."""
        survive(error, "the NATS connection, which drops a damaged message,")

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            _logger.warning("%s (url=%s)", text, self._address.url)

    def _lose_connection(self) -> None:
        self._is_connected = False
        for exchange in [exchange for exchange in self._pending if exchange.is_sent]:
            self._finish(exchange, AnswerLostError("the connection was lost before the answer came"))

    def _tell_reconnected(self) -> None:
        for callback in self._reconnected_callbacks:
            try:
                callback()
            except Exception as error:
                survive(error, "the NATS connection, after reconnecting,")

    def _start(self, exchange: _Exchange) -> None:
        if self._is_closed:
            self._finish(exchange, self._closed())
            return
        for token, answers, are_many in exchange.expected:
            self._expecting[token] = exchange, answers, are_many
        exchange.missing = len(exchange.expected)
        self._pending[exchange] = None
        self._send(exchange)

    def _start_without_thread(self, exchange: _Exchange) -> None:
        loop = asyncio.get_running_loop()
        exchange.timer = loop.call_later(self._address.timeout_seconds, self._abandon, exchange)
        self._start(exchange)

    def _begin_sending(self) -> None:
        client = self._client
        if client is None or not client.is_connected:
            return
        self._refusal = _refusal_of_version(client, self._address.url)
        self.max_payload = client.max_payload
        self._is_connected = True
        for exchange in [exchange for exchange in self._pending if not exchange.is_sent]:
            self._send(exchange)

    def _send(self, exchange: _Exchange) -> None:
        """Send all messages. Without a connection the exchange waits for `_begin_sending`."""
        if self._has_connection() and exchange.take_permission():
            try:
                self._write(exchange.messages)
                if not exchange.missing:
                    self._finish(exchange)
            except Exception as error:
                self._last_error = error
                self._finish(exchange, AnswerLostError(f"the message was not sent completely: {error!r}"))

    def _send_unheard(self, message: Sendable) -> None:
        if self._has_connection():
            try:
                self._write([message])
            except Exception as error:
                self._last_error = error

    def _has_connection(self) -> bool:
        return self._is_connected and self._client is not None and self._client.is_connected

    def _write(self, messages: Sequence[Sendable]) -> None:
        assert self._client is not None
        writing = self._client.send(messages)
        if writing is not None:
            self._spawn(writing)

    def _on_answer(self, subject: bytes, answer: Answer) -> None:
        self._is_heard = True
        token = subject[len(self._inbox) :]
        expected = self._expecting.get(token)
        if expected is None:
            return  # the answer came too late
        exchange, answers, are_many = expected
        answers.append(answer)
        if are_many and answer.status is None:
            return
        del self._expecting[token]
        exchange.missing -= 1
        if not exchange.missing:
            self._finish(exchange)

    def _abandon(self, exchange: _Exchange) -> None:
        """Forget an exchange whose thread no longer waits."""
        if exchange in self._pending:
            self._finish_without_answer(exchange, "no answer in time")
            self._suspect()

    def _suspect(self) -> None:
        """Replace a client that delivers no answers any more, for instance because its tasks have ended."""
        now = _clock.monotonic()
        if self._is_heard:
            self._is_heard, self._silent_since = False, now
        elif now > self._silent_since + _DEAF_SECONDS:
            self._silent_since = now
            self._replace_client()

    def _finish_without_answer(self, exchange: _Exchange, reason: str) -> None:
        is_unsent = exchange.take_permission()
        self._finish(exchange, NotSentError(reason) if is_unsent else AnswerLostError(reason))

    def _finish(self, exchange: _Exchange, failure: Exception | None = None) -> None:
        self._pending.pop(exchange, None)
        if exchange.timer is not None:
            exchange.timer.cancel()  # else it keeps the exchange in memory until it is due
        if failure is not None:
            for token, *_ in exchange.expected:
                self._expecting.pop(token, None)
        elif exchange.heard is not None:
            try:
                exchange.heard(exchange.answers)
            except Exception as error:
                self._on_damage(error)
        exchange.end(failure)

    def _add_listener(self, subject: str, hear: Callable[[Headers], None]) -> None:
        self._listeners[subject] = hear
        if self._is_connected:
            self._spawn(self._subscribe(subject))

    async def _subscribe_to_all(self) -> None:
        """Subscribe the listeners that were added without a connection: the client does not know them."""
        for subject in self._listeners.keys() - self._subscriptions.keys():
            await self._subscribe(subject)

    async def _subscribe(self, subject: str) -> None:
        hear, client = self._listeners.get(subject), self._client
        if hear is None or client is None:
            return

        async def on_message(message: Msg) -> None:
            try:
                hear(message.headers or {})
            except Exception as error:
                self._on_damage(error)

        with contextlib.suppress(nats.errors.Error):  # retried after the next reconnect
            subscription = await client.subscribe(subject, cb=on_message)
            if self._listeners.get(subject) is hear and client is self._client:
                self._subscriptions[subject] = subscription
            else:
                await subscription.unsubscribe()

    def _remove_listener(self, subject: str) -> None:
        self._listeners.pop(subject, None)
        subscription = self._subscriptions.pop(subject, None)
        if subscription is not None:
            self._spawn(self._unsubscribe(subscription))

    async def _unsubscribe(self, subscription: Subscription) -> None:
        with contextlib.suppress(nats.errors.Error):
            await subscription.unsubscribe()

    async def shut(self) -> None:
        if self._home is not asyncio.get_running_loop():
            return  # the connection has not started in this loop
        await self._hear_last_answers()
        for exchange in list(self._pending):
            if exchange.take_permission():
                self._finish(exchange, ClosedError("the store was closed during the call", url=self._address.url))
            else:
                self._finish(exchange, AnswerLostError("the store was closed before the answer came"))
        await asyncio.gather(*map(_cancel, self._tasks))
        self._is_connected = False
        if self._client is not None:
            self._spawn(_shut_client(self._client))
        if self._tasks:  # one of them may close a client whose connect was cancelled above
            await asyncio.wait(self._tasks, timeout=_PING_SECONDS + _CANCELLATION_SECONDS)

    async def _hear_last_answers(self) -> None:
        """Wait for what was sent and is heard: the fair lock takes back a ticket that it has drawn meanwhile."""
        deadline = Deadline(_clock, _LAST_ANSWERS_SECONDS)
        while not deadline.passed and any(each.heard is not None and each.is_sent for each in self._pending):
            await asyncio.sleep(_LAST_ANSWERS_LOOK_SECONDS)
        await asyncio.sleep(0)  # what the last one made it send is sent first

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, ReaderGroupError):
            survive(error, "the NATS connection")


def _missing_right(action: str, subject: str) -> str:
    return f"the NATS user may not {action} {subject!r}; grant the rights that docs/operations.md lists"


async def _shut_client(client: PublicClient) -> None:
    """Close the client. Cut its connection if that takes long, as with a frozen server, or is cancelled."""
    closing = asyncio.ensure_future(_close_quietly(client))
    try:
        await asyncio.wait({closing}, timeout=_PING_SECONDS)
    finally:
        client.cut()
        closing.cancel()


async def _close_quietly(client: PublicClient) -> None:
    with contextlib.suppress(Exception):
        await client.close()


def _refusal_of_version(client: PublicClient, url: str) -> UnsupportedError | None:
    version = client.connected_server_version
    try:
        return _refusal_of({"version": f"{version.major}.{version.minor}.{version.patch}"}, url)
    except ValueError:  # nats-py cannot parse the version
        return _refusal_of({}, url)


def _refusal_of(info: Mapping[str, Any], url: str) -> UnsupportedError | None:
    version = str(info.get("version", "0"))
    numbers = tuple(int(number) for number in re.findall(r"\d{1,9}", version)[:2])
    if numbers >= OLDEST_VERSION:
        return None
    return UnsupportedError(
        "a NATS server is too old and would store an atomic batch in parts; upgrade all servers to 2.12 or newer",
        server=info.get("server_name"),
        version=version,
        url=url,
    )


async def _server_info_of(server: str) -> Mapping[str, Any] | None:
    """Return the INFO that a server sends on connect; None if it cannot be reached."""
    parts = urlsplit(server)
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                line = await reader.readline()
            finally:
                writer.close()
            info = json.loads(line.partition(b" ")[2])
            return info if isinstance(info, dict) else None
    except (OSError, TimeoutError, ValueError, ssl.SSLError):
        return None


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel the task, again if it misses the cancellation, as parts of nats-py do, and wait for it a short time."""
    for _ in range(_CANCELLATIONS):
        task.cancel()
        if (await asyncio.wait({task}, timeout=_CANCELLATION_SECONDS))[0]:
            return


def _text(error: Exception | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__

"""A connection to NATS that threads can use: nats-py runs in one hidden thread, whatever the number of stores."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import ssl
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from pydantic_core import from_json

from ..errors import ClosedError, ReaderGroupError, StoreUnavailableError, UnsupportedError
from .nats_address import NatsAddress

_logger = logging.getLogger(__name__)

#: Older servers take the messages of an atomic batch one by one, without a word.
OLDEST_VERSION: Final = (2, 12)
_RECONNECT_PAUSE_SECONDS: Final = 0.1
#: A server that answers no ping for so long, twice, is given up.
_PING_SECONDS: Final = 3
_CONNECT_SECONDS: Final = 2
_PROBE_SECONDS: Final = 1.0
_CANCELLATIONS: Final = 5
_CANCELLATION_SECONDS: Final = 0.2
#: What a slow network or disk carries in any case.
_SLOWEST_BYTES_PER_SECOND: Final = 1_000_000
_NO_RESPONDERS: Final = "503"
_HEADERS_BEGIN: Final = b"NATS/1.0\r\n"

Headers = Mapping[str, str]


class Outgoing(NamedTuple):
    """A message to the server."""

    subject: str
    data: bytes = b""
    headers: Headers | None = None
    has_answer: bool = True
    has_many_answers: bool = False  # they end with one that has a status


class Answer(NamedTuple):
    headers: Headers
    data: bytes

    @property
    def status(self) -> str | None:
        return self.headers.get("Status")

    @property
    def document(self) -> dict[str, Any]:
        """The data of an answer in JSON."""
        found: dict[str, Any] = from_json(self.data)
        return found

    @property
    def is_from_nobody(self) -> bool:
        """Whether the server knew nobody who takes the message: it had no effect."""
        return self.status == _NO_RESPONDERS


class _Client(Client):
    """The client of nats-py, which connects, and again.

    A demand for TLS is one here: nats-py speaks it only if the server wants to. And what is sent and answered does
    not go through the queues and tasks of nats-py, each of which takes a further turn of the loop.
    """

    def __init__(self, on_answer: Callable[[bytes, Headers, bytes], None]) -> None:
        super().__init__()
        self._on_answer = on_answer
        self._answers: int | None = None

    async def listen_for_answers(self, subject: str) -> None:
        self._answers = (await self.subscribe(subject))._id

    def send(self, frames: bytes) -> bool:
        """Send this at once, behind what nats-py has gathered; False if there is no connection."""
        if not self.is_connected:
            return False
        assert self._transport is not None
        self._transport.writelines([*self._pending, frames])
        self._pending, self._pending_data_size = [], 0
        return True

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if sid == self._answers:
            self._on_answer(subject, await self._process_headers(headers) or {}, data)
        else:
            await super()._process_msg(sid, subject, reply, data, headers)

    def _connect_command(self) -> bytes:
        """The first thing that is said to a server, each time; what raises here ends the connection."""
        if "tls" in self.options and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server does not require TLS, and the address does")
        command: bytes = super()._connect_command()
        return command


class NotSentError(Exception):
    """The message did not leave this process."""


class AnswerLostError(Exception):
    """The message was sent, and no answer came."""


class _Exchange:
    """Messages that a thread sends, and the answers that it waits for."""

    __slots__ = ("answers", "failure", "frames", "is_sent", "missing", "_done", "tokens")

    def __init__(self) -> None:
        self.frames = b""
        self.answers: list[list[Answer]] = []
        self.tokens: list[bytes] = []
        self.missing = 0
        self.is_sent = False
        self.failure: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def end(self, failure: Exception | None = None) -> None:
        """Wake the thread. Called in the loop, more than once where things cross."""
        if self._done.locked():
            self.failure = failure
            self._done.release()

    def wait(self, timeout: float) -> bool:
        return self._done.acquire(timeout=timeout)


class NatsConnection:
    """One connection, shared by threads. It comes back by itself when it or its server is gone."""

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self._loop = _event_loop.acquire()
        self._client = _Client(self._on_answer)
        self._is_closed = False
        self._refusal: ReaderGroupError | None = None
        self._last_error: Exception | None = None
        self._is_login_refused = False
        self._inbox = f"{address.inbox_prefix}.{uuid.uuid4().hex}.".encode()
        self._numbers = itertools.count()
        self._expecting: dict[bytes, tuple[_Exchange, list[Answer], bool]] = {}
        self._pending: dict[_Exchange, None] = {}  # in the order of their coming
        self._listeners: dict[str, Callable[[Headers], None]] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._reconnected_callbacks: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_connected = False
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise

    # What threads call

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    @property
    def is_jetstream_server(self) -> bool:
        return bool(self._server_info.get("jetstream"))

    def exchange(self, messages: Sequence[Outgoing], timeout_seconds: float | None = None) -> list[list[Answer]]:
        """Send the messages in this order and return the answers to each of those that have some.

        Waits for them as long as the address says, or ``timeout_seconds``.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._is_closed:
            raise self._closed()
        size = 0
        for message in messages:
            size += len(message.data)
            if len(message.data) > self.max_payload:
                raise NotSentError("a message is larger than the server takes")
        exchange = _Exchange()
        exchange.frames = b"".join([self._frame(message, exchange) for message in messages])
        self._call_in_loop(self._start, exchange)
        if timeout_seconds is None:
            timeout_seconds = self._address.timeout_seconds
        if not exchange.wait(timeout_seconds + size / _SLOWEST_BYTES_PER_SECOND):
            self._call_in_loop(self._give_up, exchange)
            exchange.wait(-1)
        if exchange.failure is not None:
            raise exchange.failure
        return exchange.answers

    def _frame(self, message: Outgoing, exchange: _Exchange) -> bytes:
        if not message.has_answer:
            return _framed(message, b"")
        token = b"%d" % next(self._numbers)
        answers: list[Answer] = []
        exchange.answers.append(answers)
        exchange.tokens.append(token)
        exchange.missing += 1
        self._expecting[token] = exchange, answers, message.has_many_answers
        return _framed(message, self._inbox + token)

    def ask(self, subject: str, data: bytes) -> Answer:
        """The answer to a request that changes nothing, or may be repeated."""
        return self.ask_all([Outgoing(subject, data)])[0][0]

    def ask_all(self, messages: Sequence[Outgoing]) -> list[list[Answer]]:
        try:
            answers = self.exchange(messages)
        except (NotSentError, AnswerLostError) as error:
            if self._is_closed:
                raise self._closed() from error
            raise self.unavailable(str(error)) from error
        if any(answer and answer[0].is_from_nobody for answer in answers):
            raise self.unavailable("no server takes requests for the stream now, as while a new leader is elected")
        return answers

    def send(self, message: Outgoing) -> None:
        """Send a message that has no answer, if there is a connection."""
        self._call_in_loop(self._send_unheard, _framed(message, b""))

    def listen(self, subject: str, hear: Callable[[Headers], None]) -> None:
        """Call ``hear``, in the hidden thread, with the headers of each message on the subject."""
        self._call_in_loop(self._add_listener, subject, hear)

    def unlisten(self, subject: str) -> None:
        self._call_in_loop(self._remove_listener, subject)

    def when_reconnected(self, callback: Callable[[], None]) -> None:
        self._reconnected_callbacks.append(callback)

    def _call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError as error:  # it ended with the last connection of this process
            raise self._closed() from error

    def _closed(self) -> ClosedError:
        return ClosedError("the store is closed", url=self._address.url)

    def unavailable(self, reason: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the NATS servers do not answer: {reason}", url=self._address.url, last_error=_text(self._last_error)
        )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):
            self._run(self._shut())
        _event_loop.release()

    # What runs in the hidden thread

    @property
    def _server_info(self) -> Mapping[str, Any]:
        return self._client._server_info

    async def _open(self) -> None:
        connecting = self._loop.create_task(self._connect())
        # Not `asyncio.wait_for`, which would wait for the end of a task that has missed its cancellation.
        if not (await asyncio.wait({connecting}, timeout=self._address.timeout_seconds))[0]:
            await _cancel(connecting)
            raise self._why_not_connected()
        connecting.result()
        await self._check_versions_of_others()
        if self._refusal is not None:
            raise self._refusal

    def _why_not_connected(self) -> ReaderGroupError:
        if self._is_login_refused:
            return StoreUnavailableError(
                "the NATS servers refuse the credentials of the address; correct user:password@, token@, 'credentials'"
                " or 'nkey'",
                url=self._address.url,
            )
        return self.unavailable("no connection; check the hosts and ports of the address")

    async def _connect(self) -> None:
        """Connect a new client; raises what no further attempt would mend, and tries for ever otherwise."""
        address = self._address
        client = self._client = _Client(self._on_answer)
        login: dict[str, Any] = {}
        if address.token is not None:
            login["token"] = address.token
        if address.password is not None:
            login |= {"user": address.user, "password": address.password}
        try:
            await client.connect(
                list(address.servers),
                name="readergroup",
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                connect_timeout=_CONNECT_SECONDS,
                reconnect_time_wait=_RECONNECT_PAUSE_SECONDS,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                ping_interval=_PING_SECONDS,
                pending_size=0,  # nothing is kept for later: what is published without a connection is an error
                tls=address.tls,
                tls_hostname=address.tls_hostname,
                user_credentials=address.credentials_file,
                nkeys_seed=address.nkey_file,
                inbox_prefix=address.inbox_prefix,
                **login,
            )
        except ReaderGroupError:
            raise
        except ImportError as error:
            raise UnsupportedError("NKeys and credentials need pip install 'nats-py[nkeys]'") from error
        except (OSError, ValueError) as error:
            raise StoreUnavailableError("the connection cannot be made", error=str(error)) from error
        self._check_version()
        await client.listen_for_answers(self._inbox.decode() + "*")
        for subject in self._listeners:
            await self._subscribe(subject)
        self._begin_sending()

    def _check_version(self) -> None:
        self._refusal = _refusal_of(self._server_info, self._address.url)

    async def _check_versions_of_others(self) -> None:
        servers = {*self._address.servers, *(server.geturl() for server in self._client.servers)}
        found = await asyncio.gather(*(_server_info_of(server) for server in sorted(servers)))
        for info in found:
            self._refusal = self._refusal or (_refusal_of(info, self._address.url) if info else None)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        # Of some attempts only the end of the connection is heard, which comes right behind the refusal.
        self._is_login_refused |= "authorization" in str(error).lower()
        _logger.debug("NATS: %r", error)

    async def _on_disconnected(self) -> None:
        self._is_connected = False
        for exchange in [exchange for exchange in self._pending if exchange.is_sent]:
            self._finish(exchange, AnswerLostError("the connection was lost before the answer came"))

    async def _on_reconnected(self) -> None:
        self._check_version()
        self._begin_sending()
        self._tell_reconnected()

    async def _on_closed(self) -> None:
        """The client has given up, as after an error that the server closed the connection for. Begin anew."""
        if not self._is_closed:
            self._spawn(self._connect_anew())

    async def _connect_anew(self) -> None:
        while not self._is_closed:
            try:
                await self._connect()
            except ReaderGroupError as error:
                self._last_error = error
                await asyncio.sleep(_RECONNECT_PAUSE_SECONDS)
            else:
                self._tell_reconnected()
                return

    def _tell_reconnected(self) -> None:
        for callback in self._reconnected_callbacks:
            callback()

    def _start(self, exchange: _Exchange) -> None:
        if self._is_closed:
            self._finish(exchange, self._closed())
            return
        self._pending[exchange] = None
        self._send(exchange)

    def _begin_sending(self) -> None:
        self._is_connected = True
        for exchange in [exchange for exchange in self._pending if not exchange.is_sent]:
            self._send(exchange)

    def _send(self, exchange: _Exchange) -> None:
        """Send all messages; without a connection the exchange waits for `_begin_sending`."""
        if self._is_connected:
            exchange.is_sent = self._client.send(exchange.frames)

    def _send_unheard(self, frame: bytes) -> None:
        if self._is_connected:
            self._client.send(frame)

    def _on_answer(self, subject: bytes, headers: Headers, data: bytes) -> None:
        token = subject[len(self._inbox) :]
        expected = self._expecting.get(token)
        if expected is None:
            return  # too late
        exchange, answers, is_one_of_many = expected
        answer = Answer(headers, data)
        answers.append(answer)
        if is_one_of_many and answer.status is None:
            return
        del self._expecting[token]
        exchange.missing -= 1
        if not exchange.missing:
            self._finish(exchange)

    def _give_up(self, exchange: _Exchange) -> None:
        failure = AnswerLostError("no answer in time") if exchange.is_sent else NotSentError("there is no connection")
        self._finish(exchange, failure)

    def _finish(self, exchange: _Exchange, failure: Exception | None = None) -> None:
        self._pending.pop(exchange, None)
        if failure is not None:
            for token in exchange.tokens:
                self._expecting.pop(token, None)
        exchange.end(failure)

    def _add_listener(self, subject: str, hear: Callable[[Headers], None]) -> None:
        self._listeners[subject] = hear
        if self._is_connected:
            self._spawn(self._subscribe(subject))

    async def _subscribe(self, subject: str) -> None:
        hear = self._listeners.get(subject)
        if hear is None:
            return

        async def on_message(message: Msg) -> None:
            hear(message.headers or {})

        with contextlib.suppress(nats.errors.Error):
            subscription = await self._client.subscribe(subject, cb=on_message)
            if self._listeners.get(subject) is hear:
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

    async def _shut(self) -> None:
        for exchange in list(self._pending):
            failure: Exception = ClosedError("the store was closed meanwhile", url=self._address.url)
            if exchange.is_sent:
                failure = AnswerLostError("the store was closed before the answer came")
            self._finish(exchange, failure)
        for task in list(self._tasks):
            task.cancel()
        await self._client.close()

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _refusal_of(info: Mapping[str, Any], url: str) -> UnsupportedError | None:
    version = str(info.get("version", "0"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers >= OLDEST_VERSION:
        return None
    return UnsupportedError(
        "a NATS server is too old: it would store an atomic batch in parts; upgrade all servers to 2.12 or newer",
        server=info.get("server_name"),
        version=version,
        url=url,
    )


async def _server_info_of(server: str) -> Mapping[str, Any] | None:
    """What a server says of itself to who connects; None if it cannot be reached."""
    parts = urlsplit(server)
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                line = await reader.readline()
            finally:
                writer.close()
            info: dict[str, Any] = json.loads(line.partition(b" ")[2])
            return info
    except (OSError, TimeoutError, ValueError, ssl.SSLError):
        return None


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel the task, and again if that is lost on it, as in parts of nats-py; wait for it a moment, and no longer."""
    for _ in range(_CANCELLATIONS):
        task.cancel()
        if (await asyncio.wait({task}, timeout=_CANCELLATION_SECONDS))[0]:
            return


def _framed(message: Outgoing, reply: bytes) -> bytes:
    """The message as the protocol has it. Subjects, names and values hold no white space: who makes them sees to it."""
    subject, data, headers = message.subject.encode(), message.data, message.headers
    if headers is None:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data)
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()
    size = len(_HEADERS_BEGIN) + len(lines) + 2
    return b"HPUB %b %b %d %d\r\n%b%b\r\n%b\r\n" % (
        subject,
        reply,
        size,
        size + len(data),
        _HEADERS_BEGIN,
        lines,
        data,
    )


def _text(error: Exception | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__


class _EventLoop:
    """The loop that all connections of this process run in, in a thread that is there while one of them is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            self._users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="nats-event-loop", daemon=True
                )
                self._thread.start()
            return self._loop

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        assert loop is not None and thread is not None
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(_all(tasks))
    finally:
        loop.close()


async def _all(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


_event_loop = _EventLoop()
#: What a forked child inherited, kept so that it closes nothing of it.
_inherited: list[object] = []


def _abandon_in_child() -> None:
    global _event_loop
    _inherited.append(_event_loop)
    _event_loop = _EventLoop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)

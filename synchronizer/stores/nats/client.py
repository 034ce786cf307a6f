"""The client of nats-py, with two ways to send and receive: its public API, and a shorter path past its queues.

The shorter path uses internals of nats-py. This module checks at import whether they exist with the expected
signatures. If they do not, everything uses the public API, which is slower.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import nats.aio.client
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from synchronizer.errors import UnsupportedError
from synchronizer.loggers import get_logger

from .frames import Answer, Outgoing, answer_of

_logger = get_logger(__name__)

#: Takes the subject of an answer and the answer. It is called in the hidden thread and never raises.
OnAnswer = Callable[[bytes, Answer], None]
OnDamage = Callable[[Exception], None]
OnDeaf = Callable[[], None]


class Sendable(NamedTuple):
    """A message, the subject for its answer (empty: no answer), and both as a frame."""

    message: Outgoing
    reply: bytes
    frame: bytes


class NoTlsError(nats.errors.Error):
    """The server does not require TLS, and the address does."""


class DemandingClient(Client):
    """Requires TLS if the address asks for it. nats-py alone uses TLS only if the server requires it."""

    def _connect_command(self) -> bytes:
        """Return the first command to a server, at each connect. Raising here ends the connection."""
        if "tls" in self.options and not self._server_info.get("tls_required"):
            raise NoTlsError("the address requires TLS, but the server does not")
        command: bytes = super()._connect_command()
        return command


class PublicClient(DemandingClient):
    """Sends and receives through the public API of nats-py."""

    def __init__(self, on_answer: OnAnswer, on_damage: OnDamage, on_deaf: OnDeaf) -> None:
        super().__init__()
        self._tell_answer = on_answer
        self._tell_damage = on_damage
        self._tell_deaf = on_deaf
        self._is_cut = False
        self._opened: list[asyncio.StreamWriter] = []

    async def hear_answers(self, subject: str) -> None:
        async def hear(message: Msg) -> None:
            headers = message.headers or {}
            self._tell_answer(message.subject.encode(), Answer(headers, message.data, headers.get("Status")))

        await self.subscribe(subject, cb=hear, pending_msgs_limit=0, pending_bytes_limit=0)  # never drop a message

    def cut(self) -> None:
        """Close all connections now, drop unsent data, and open no other. nats-py alone waits until everything is sent.

        nats-py may also go on reconnecting after `close`, and start an attempt while another one is under way.
        """
        self._is_cut = True
        self._remember_connection()
        for writer in self._opened:
            writer.transport.abort()

    async def _select_next_server(self) -> None:
        if not self._is_cut:
            await super()._select_next_server()
            self._remember_connection()
        if self._is_cut:
            self.cut()
            raise nats.errors.NoServersError  # the one error after which nats-py makes no further attempt

    def _remember_connection(self) -> None:
        writer = getattr(getattr(self, "_transport", None), "_io_writer", None)
        if isinstance(writer, asyncio.StreamWriter):
            self._opened = [*(each for each in self._opened if not each.is_closing() and each is not writer), writer]

    def send(self, messages: Sequence[Sendable]) -> Coroutine[Any, Any, None] | None:
        """Send these in order, after all earlier messages. Await the coroutine, if one is returned."""
        return self._publish(messages)

    async def _publish(self, messages: Sequence[Sendable]) -> None:
        for (subject, data, headers, *_), reply, _ in messages:
            await self.publish(subject, data, reply.decode(), dict(headers) if headers is not None else None)


class ShortClient(PublicClient):
    """Sends and receives without the queues and tasks of nats-py, each of which costs an iteration of the loop."""

    def __init__(self, on_answer: OnAnswer, on_damage: OnDamage, on_deaf: OnDeaf) -> None:
        super().__init__(on_answer, on_damage, on_deaf)
        self._answers: int | None = None

    async def hear_answers(self, subject: str) -> None:
        self._answers = (await self.subscribe(subject))._id

    def send(self, messages: Sequence[Sendable]) -> Coroutine[Any, Any, None] | None:
        """Send the messages at once; there is nothing to await."""
        transport = self._transport
        assert transport is not None
        transport.writelines([*self._pending, *(each.frame for each in messages)])
        self._pending, self._pending_data_size = [], 0
        return None

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """Process a message without raising: an exception would stop the read loop of nats-py."""
        try:
            if sid == self._answers:
                self._tell_answer(subject, answer_of(headers, data))
            else:
                await super()._process_msg(sid, subject, reply, data, headers)
        except Exception as error:
            self._tell_damage(error)

    async def _read_loop(self) -> None:
        """Report when the read loop ends while connected: on unknown errors nats-py stops reading silently."""
        await super()._read_loop()
        if self.is_connected:
            self._tell_deaf()


def new_client(on_answer: OnAnswer, on_damage: OnDamage, on_deaf: OnDeaf, *, demands_tls: bool) -> PublicClient:
    """Return a client that is not connected yet."""
    if demands_tls and not _CAN_DEMAND_TLS:
        raise UnsupportedError(
            "this release of nats-py cannot enforce TLS, which the address requires; install another release",
            nats_py=_version(),
        )
    return (ShortClient if CAN_BE_SHORT else PublicClient)(on_answer, on_damage, on_deaf)


# The internals of nats-py that the shorter path uses


def _takes(owner: type, name: str, parameters: Sequence[str], *, is_async: bool) -> bool:
    """Return whether the class has such a method."""
    method = inspect.getattr_static(owner, name, None)
    if not inspect.isfunction(method) or inspect.iscoroutinefunction(method) != is_async:
        return False
    return list(inspect.signature(method).parameters) == ["self", *parameters]


def _has_what_is_short(client_class: type[Client], subscription_class: type[Subscription]) -> bool:
    try:
        client: Any = client_class()
        subscription: Any = subscription_class(client, id=7)
        return (
            _takes(client_class, "_process_msg", ["sid", "subject", "reply", "data", "headers"], is_async=True)
            and _takes(client_class, "_read_loop", [], is_async=True)
            and client._pending == []
            and client._pending_data_size == 0
            and client._transport is None
            and subscription._id == 7
        )
    except Exception:  # an unknown release of nats-py
        return False


def _can_demand_tls(client_class: type[Client]) -> bool:
    try:
        client: Any = client_class()
        return (
            _takes(client_class, "_connect_command", [], is_async=False)
            and isinstance(client._server_info, dict)
            and isinstance(client.options, dict)
        )
    except Exception:
        return False


def _version() -> str:
    return str(getattr(nats.aio.client, "__version__", "unknown"))


CAN_BE_SHORT: Final = _has_what_is_short(Client, Subscription)
_CAN_DEMAND_TLS: Final = _can_demand_tls(Client)
if not CAN_BE_SHORT:
    _logger.warning("this release of nats-py is unknown to this SDK, so calls take longer (nats-py %s)", _version())

"""A TCP proxy between a client and a server, that has the faults of networks: for tests with real connections.

What a silent cut holds back is passed on when the proxy heals, as TCP would send it again: a request may arrive long
after its sender gave it up.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

_HOST: Final = "127.0.0.1"
_LONG: Final = 30.0
_CHUNK_BYTES: Final = 256 * 1024
#: Closing such a socket sends a reset, and what was not sent is dropped.
_RESET: Final = struct.pack("ii", 1, 0)

T = TypeVar("T")


class TcpProxy:
    """Passes on what clients send to ``address`` to the server at ``host`` and ``port``, and its answers.

    It runs in a thread of its own from ``start`` to ``stop``. The faults last until ``heal``, and any thread may
    order them: the call returns when the fault is there.
    """

    def __init__(self, port: int, host: str = _HOST) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._accepting: set[asyncio.Task[None]] = set()
        self._faults = _Faults()
        self._resets = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"{_HOST}:{self.port}"

    @property
    def number_of_connections(self) -> int:
        """How many clients are connected now."""
        return len(self._links)

    @property
    def lost_answers(self) -> int:
        """How many answers were cut off since the proxy was started."""
        return self._faults.lost

    def start(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def stop(self) -> None:
        """Cut all connections and leave nothing behind."""
        if self._thread.is_alive():
            self._run(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_LONG)
        self._loop.close()

    def __enter__(self) -> Self:
        return self if self._thread.is_alive() else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ the faults

    def cut(self) -> None:
        """Reset all connections, and every new one."""

        def refuse() -> None:
            self._faults.refuses = True
            self._reset_all()

        self._now(refuse)

    def damage_answers(self, damage: Callable[[bytes], bytes]) -> None:
        """Pass on what this makes of each piece of what the server sends."""

        def begin() -> None:
            self._faults.damage = damage

        self._now(begin)

    def reset(self) -> None:
        """Reset the connections that there are; new ones are made as ever."""
        self._now(self._reset_all)

    def silence(self) -> None:
        """Nothing passes in either direction, and nobody is told. New connections are made, and get no answer."""
        self._silence(requests=True, answers=True)

    def cut_upstream(self) -> None:
        """Silently hold back what clients send."""
        self._silence(requests=True)

    def cut_downstream(self) -> None:
        """Silently hold back what the server answers: it does what it is asked to."""
        self._silence(answers=True)

    def delay(self, seconds: float) -> None:
        """Pass everything on that much later, in each direction."""

        def slow() -> None:
            self._faults.delay_seconds = seconds

        self._now(slow)

    def lose_answers(self, count: int = 1, *, to: bytes = b"") -> None:
        """Let the next requests pass, and reset their connections when the server begins to answer.

        A request is what comes from a client at once. With ``to`` only those that hold these bytes count.
        """

        def lose() -> None:
            self._faults.answers_to_lose += count
            self._faults.requests_with = to

        self._now(lose)

    def heal(self) -> None:
        """No fault any more. What was held back is passed on now."""
        self._now(self._faults.end)

    # ------------------------------------------------------------------ in the thread

    def _silence(self, *, requests: bool = False, answers: bool = False) -> None:
        def hold() -> None:
            if requests:
                self._faults.requests_pass.clear()
            if answers:
                self._faults.answers_pass.clear()

        self._now(hold)

    def _now(self, order: Callable[[], None]) -> None:
        async def carry_out() -> None:
            order()

        self._run(carry_out())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LONG)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, _HOST, self.port, limit=_CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        self._reset_all()
        for task in [*self._accepting]:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)

    def _reset_all(self) -> None:
        self._resets += 1  # also those that have no link yet
        for link in [*self._links]:
            link.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._accepting.add(task)
        try:
            if self._faults.refuses:
                _reset(writer)
                return
            resets = self._resets
            try:
                upstream = await asyncio.open_connection(*self._target, limit=_CHUNK_BYTES)
            except OSError:
                _reset(writer)  # as a server that is down would refuse it
                return
            if self._resets != resets:  # meanwhile, though the fault may be over again
                _reset(writer)
                _reset(upstream[1])
                return
            link = _Link(self._faults, (reader, writer), upstream)
            self._links.add(link)
            try:
                await link.pump()
            finally:
                self._links.discard(link)
        except asyncio.CancelledError:
            _reset(writer)
        finally:
            self._accepting.discard(task)


class _Faults:
    """What is wrong with the network now."""

    def __init__(self) -> None:
        self.requests_pass = asyncio.Event()
        self.answers_pass = asyncio.Event()
        self.lost = 0
        self.end()

    def end(self) -> None:
        self.refuses = False
        self.delay_seconds = 0.0
        self.answers_to_lose = 0
        self.requests_with = b""
        self.damage: Callable[[bytes], bytes] | None = None
        self.requests_pass.set()
        self.answers_pass.set()

    def takes_answer_of(self, request: bytes) -> bool:
        """Whether the answer to this request is to be lost; it is asked once."""
        if self.answers_to_lose and self.requests_with in request:
            self.answers_to_lose -= 1
            return True
        return False


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One client's connection."""

    def __init__(self, faults: _Faults, client: _Ends, server: _Ends) -> None:
        self._faults = faults
        self._client = client
        self._server = server
        self._loses_next_answer = False

    async def pump(self) -> None:
        """Until one side has closed, and what it had sent is with the other."""
        requests, answers = _late(), _late()
        readings = [
            asyncio.create_task(self._read(self._client[0], requests)),
            asyncio.create_task(self._read(self._server[0], answers)),
        ]
        deliveries = [
            asyncio.create_task(self._pass_requests(requests)),
            asyncio.create_task(self._pass_answers(answers)),
        ]
        try:
            await asyncio.wait(deliveries, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*readings, *deliveries):
                task.cancel()
            await asyncio.gather(*readings, *deliveries, return_exceptions=True)
            for _, writer in (self._client, self._server):
                writer.close()

    def reset(self) -> None:
        for _, writer in (self._client, self._server):
            _reset(writer)

    async def _read(self, source: asyncio.StreamReader, late: _Late) -> None:
        """What comes, each with the time at which it is to be passed on; nothing at the end."""
        clock = asyncio.get_running_loop().time
        data = b"."
        while data:
            data = b""
            with suppress(OSError):
                data = await source.read(_CHUNK_BYTES)
            await late.put((clock() + self._faults.delay_seconds, data))

    async def _pass_requests(self, late: _Late) -> None:
        while data := await _next(late, self._faults.requests_pass):
            self._loses_next_answer = self._loses_next_answer or self._faults.takes_answer_of(data)
            self._server[1].write(data)
            await self._server[1].drain()

    async def _pass_answers(self, late: _Late) -> None:
        while data := await _next(late, self._faults.answers_pass):
            if self._loses_next_answer:
                self._faults.lost += 1
                _reset(self._client[1])  # and the server gets all of the request
                return
            self._client[1].write(data if self._faults.damage is None else self._faults.damage(data))
            await self._client[1].drain()


_Late = asyncio.Queue[tuple[float, bytes]]


def _late() -> _Late:
    return asyncio.Queue(maxsize=64)


async def _next(late: _Late, may_pass: asyncio.Event) -> bytes:
    due, data = await late.get()
    await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
    await may_pass.wait()
    return data


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()

"""Back up a stream of NATS JetStream to a folder while it is used, and restore it: with nats-py, without the CLI.

    python nats_backup.py backup nats://host:4222 readergroup FOLDER
    python nats_backup.py restore nats://host:4222 readergroup FOLDER

It makes and takes the two files of `nats stream backup` and `nats stream restore`. Restoring needs a server that has
no stream of this name.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError, NoServersError

_CHUNK_BYTES = 128 * 1024
_SECONDS = 30.0
#: The errors of a cluster whose servers have not all heard of each other yet.
_TOO_FEW_SERVERS = (10005, 10074)
#: What the last, empty message of a whole snapshot has as its status, unless there is none.
_IS_WHOLE = "204"


async def backup(connection: Client, stream: str, folder: Path) -> None:
    """Write what the stream holds now to ``folder``, which must not exist. After an error there is none."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
        unfinished = Path(place, "backup")
        unfinished.mkdir()
        await _take_snapshot(connection, stream, unfinished)
        unfinished.rename(folder)


async def _take_snapshot(connection: Client, stream: str, folder: Path) -> None:
    inbox = connection.new_inbox()
    chunks = await connection.subscribe(inbox)
    described = await _ask(
        connection,
        f"$JS.API.STREAM.SNAPSHOT.{stream}",
        {"deliver_subject": inbox, "no_consumers": True, "chunk_size": _CHUNK_BYTES, "jsck": True},
    )
    with open(folder / "stream.tar.s2", "wb") as archive:
        while True:
            chunk = await chunks.next_msg(_SECONDS)
            if not chunk.data:
                break
            archive.write(chunk.data)
            if chunk.reply:
                await chunk.respond(b"")  # the server waits for it before it sends more
    if (chunk.headers or {}).get("Status", _IS_WHOLE) != _IS_WHOLE:
        raise RuntimeError(f"the server broke the snapshot off: {chunk.headers}")
    (folder / "backup.json").write_text(json.dumps({name: described[name] for name in ("config", "state")}))


async def restore(connection: Client, stream: str, folder: Path) -> None:
    """Make the stream that ``folder`` holds."""
    described = json.loads((folder / "backup.json").read_text())
    answer = await _ask(connection, f"$JS.API.STREAM.RESTORE.{stream}", described)
    with open(folder / "stream.tar.s2", "rb") as archive:
        while chunk := archive.read(_CHUNK_BYTES):
            await _send(connection, answer["deliver_subject"], chunk)
    made = await _send(connection, answer["deliver_subject"], b"")
    _check(json.loads(made.data))


async def _send(connection: Client, subject: str, chunk: bytes) -> Msg:
    """The answer to a chunk. In a cluster it takes a moment until all servers know who listens."""
    async with asyncio.timeout(_SECONDS):
        while True:
            try:
                return await connection.request(subject, chunk, timeout=_SECONDS)
            except NoRespondersError:
                await asyncio.sleep(0.05)


async def _ask(connection: Client, subject: str, body: dict[str, Any]) -> dict[str, Any]:
    deadline = asyncio.get_running_loop().time() + _SECONDS
    while True:
        message = await connection.request(subject, json.dumps(body).encode(), timeout=_SECONDS)
        answer: dict[str, Any] = json.loads(message.data)
        code = answer.get("error", {}).get("err_code")
        if code not in _TOO_FEW_SERVERS or asyncio.get_running_loop().time() > deadline:
            return _check(answer)
        await asyncio.sleep(0.25)


def _check(answer: dict[str, Any]) -> dict[str, Any]:
    if error := answer.get("error"):
        raise RuntimeError(f"the server refuses: {error.get('description')} ({error.get('err_code')})")
    return answer


async def main(verb: str, servers: str, stream: str, folder: str) -> None:
    told: list[Exception] = []  # a server tells of a missing right only here, and leaves the call without an answer

    async def note(error: Exception) -> None:
        told.append(error)

    try:
        # Without a limit of attempts nats-py tries for minutes to reach a server that is away.
        async with await nats.connect(
            servers.split(","), allow_reconnect=False, max_reconnect_attempts=1, error_cb=note
        ) as connection:
            await {"backup": backup, "restore": restore}[verb](connection, stream, Path(folder))
    except NoServersError as failure:
        raise ConnectionError(f"no server answers; check the address{_last(told)}") from failure
    except nats.errors.TimeoutError as failure:
        raise RuntimeError(f"no answer within {_SECONDS:g} s{_last(told)}") from failure


def _last(told: list[Exception]) -> str:
    return "".join(f": {str(error) or type(error).__name__}" for error in told[-1:])


if __name__ == "__main__":
    if len(sys.argv) != 5 or sys.argv[1] not in ("backup", "restore"):
        sys.exit(__doc__)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (OSError, RuntimeError, nats.errors.Error) as failure:
        sys.exit(f"{sys.argv[1]}: {failure or type(failure).__name__}")

"""The bodies of requests, and the changes that the page can make, with ``allow_writes``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from synchronizer import InvalidArgumentError

from ..client import Client
from ..words import count

#: How long a change may take.
CHANGE_SECONDS: Final = 20.0
#: How many dead letters a change by filters takes at most. The next one continues.
LETTERS: Final = 1_000


class Body(BaseModel):
    """What a request says."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Login(Body):
    token: str


class _Reset(Body):
    to: str
    is_checkpoint: bool = False


class _TakeCheckpoint(Body):
    name: str


class _RemoveReader(Body):
    reader: str


class _Scale(Body):
    stream: str
    split: list[int] | None = Field(None, max_length=1_000)
    merge: list[int] | None = Field(None, max_length=1_000)


class _Letters(Body):
    stream: str
    #: None: the pending ones that the filters select. An empty list would mean all.
    letters: list[str] | None = Field(None, min_length=1, max_length=100)
    error: str | None = None
    key: str | None = None


def reset(client: Client, group: str, body: bytes) -> str:
    change = read(_Reset, body)
    found = client.groups.get(group)
    if change.is_checkpoint:
        checkpoints = found.checkpoints
        if change.to not in checkpoints:
            raise InvalidArgumentError("the group has no checkpoint of this name", group=group, name=change.to)
        found.reset(checkpoints[change.to], timeout=CHANGE_SECONDS)
        return f"reset to checkpoint {change.to}"
    if change.to not in ("head", "tail"):
        raise InvalidArgumentError("a group is reset to 'head', 'tail' or a checkpoint", to=change.to)
    found.reset("head" if change.to == "head" else "tail", timeout=CHANGE_SECONDS)
    return f"reset to {change.to}"


def take_checkpoint(client: Client, group: str, body: bytes) -> str:
    change = read(_TakeCheckpoint, body)
    client.groups.get(group).checkpoint(change.name, timeout=CHANGE_SECONDS)
    return f"took checkpoint {change.name}"


def remove_reader(client: Client, group: str, body: bytes) -> str:
    change = read(_RemoveReader, body)
    is_removed = client.groups.get(group).remove_reader(change.reader)
    return f"removed reader {change.reader}" if is_removed else f"reader {change.reader} was not in the group"


def scale(client: Client, group: str, body: bytes) -> str:
    change = read(_Scale, body)
    if change.stream not in client.groups.get(group).config.streams:
        raise InvalidArgumentError("the group does not read this stream", group=group, stream=change.stream)
    info = client.streams.scale(change.stream, split=change.split, merge=change.merge, timeout=CHANGE_SECONDS)
    return f"{'split' if change.split else 'merged'}: {change.stream} has {len(info.segments):,} segments"


def replay(client: Client, body: bytes) -> tuple[str, str]:
    change = read(_Letters, body)
    letters, filters = client.dead_letters(change.stream), _selected(change)
    return change.stream, f"replayed {count(letters.replay(*change.letters or (), **filters), 'dead letter')}"


def discard(client: Client, body: bytes) -> tuple[str, str]:
    change = read(_Letters, body)
    letters, filters = client.dead_letters(change.stream), _selected(change)
    return change.stream, f"discarded {count(letters.discard(*change.letters or (), **filters), 'dead letter')}"


def _selected(change: _Letters) -> dict[str, Any]:
    if change.letters is None:
        return {"error": change.error, "routing_key": change.key, "limit": LETTERS, "timeout": CHANGE_SECONDS}
    if change.error is not None or change.key is not None:
        raise InvalidArgumentError("name letters, or select them by filters, but not both")
    return {"timeout": CHANGE_SECONDS}


#: What a change of dead letters is called in its address. Each returns the stream, and what it did.
LETTER_CHANGES: Final[Mapping[str, Callable[[Client, bytes], tuple[str, str]]]] = {
    "replay": replay,
    "discard": discard,
}
#: What a change is called in its address, and what does it.
CHANGES: Final[Mapping[str, Callable[[Client, str, bytes], str]]] = {
    "reset": reset,
    "checkpoint": take_checkpoint,
    "remove-reader": remove_reader,
    "scale": scale,
}


def read(kind: type[Any], body: bytes) -> Any:
    """Return the model in the body of a request."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidArgumentError(f"the body of the request is not right: {where}: {first['msg']}") from None

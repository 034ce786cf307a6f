"""The subjects that a store publishes and subscribes to: what its user must be allowed on the servers, and no more."""

from __future__ import annotations

from typing import Final, NamedTuple

#: The kinds of subjects of a store's own stream that it publishes to; `nats_wire` says what they hold.
STORED_KINDS: Final = "dang"
NEWS_KIND: Final = "w"


class Api:
    """Where requests to JetStream about one stream go."""

    def __init__(self, stream: str) -> None:
        self.info = f"$JS.API.STREAM.INFO.{stream}"
        self.create = f"$JS.API.STREAM.CREATE.{stream}"
        self.purge = f"$JS.API.STREAM.PURGE.{stream}"
        self.get = f"$JS.API.STREAM.MSG.GET.{stream}"
        self.delete = f"$JS.API.STREAM.MSG.DELETE.{stream}"
        self.direct_get = f"$JS.API.DIRECT.GET.{stream}"


def line_of(stream: str) -> str:
    """The stream, and the first token of its subjects, in which processes stand in line for a fair lock."""
    return f"{stream}_line"


def word_of(stream: str) -> str:
    """The first token of the subjects at which a process hears that it is the next in line."""
    return f"{stream}_turn"


class Rights(NamedTuple):
    """Subjects, with ``>`` for all below, that a user publishes and subscribes to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def rights_of(stream: str, inbox_prefix: str = "_INBOX") -> Rights:
    """The least that a user of the store needs; without any one of them something fails and names it."""
    api, line = Api(stream), Api(line_of(stream))
    return Rights(
        publish=(
            *(f"{stream}.{kind}.>" for kind in STORED_KINDS),
            *(api.info, api.create, api.purge, api.get, api.delete, api.direct_get),
            f"{line_of(stream)}.>",
            *(line.create, line.delete, line.direct_get),
            f"{word_of(stream)}.>",
        ),
        subscribe=(f"{inbox_prefix}.>", f"{stream}.{NEWS_KIND}.>", f"{word_of(stream)}.>"),
    )


def right_for(subject: str, rights: tuple[str, ...]) -> str:
    """Which of the rights covers the subject, in whatever letters; the subject itself if none does."""
    return next((right for right in rights if _covers(right.lower(), subject.lower())), subject)


def _covers(right: str, subject: str) -> bool:
    return subject.startswith(right[:-1]) if right.endswith(".>") else subject == right

"""The subjects that a store publishes and subscribes to: the least permissions that its user needs on the servers."""

from __future__ import annotations

from typing import Final, NamedTuple

#: The kinds of subjects of its own stream that a store publishes to; module `wire` describes them.
STORED_KINDS: Final = "dang"
NEWS_KIND: Final = "w"


class Api:
    """The subjects for requests to JetStream about one stream."""

    def __init__(self, stream: str) -> None:
        self.info = f"$JS.API.STREAM.INFO.{stream}"
        self.create = f"$JS.API.STREAM.CREATE.{stream}"
        self.purge = f"$JS.API.STREAM.PURGE.{stream}"
        self.get = f"$JS.API.STREAM.MSG.GET.{stream}"
        self.delete = f"$JS.API.STREAM.MSG.DELETE.{stream}"
        self.direct_get = f"$JS.API.DIRECT.GET.{stream}"


def queue_stream_of(stream: str) -> str:
    """Return the name of the stream that holds the queues of fair locks, and first token of its subjects."""
    return f"{stream}_line"


def grant_prefix_of(stream: str) -> str:
    """Return the first token of the subjects on which a process hears that it is first in the queue."""
    return f"{stream}_turn"


class Rights(NamedTuple):
    """The subjects that a user publishes and subscribes to; ``>`` matches all below."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def rights_of(stream: str, inbox_prefix: str = "_INBOX") -> Rights:
    """Return the least rights that a user of the store needs. If one is missing, an error names it."""
    api, queue = Api(stream), Api(queue_stream_of(stream))
    return Rights(
        publish=(
            *(f"{stream}.{kind}.>" for kind in STORED_KINDS),
            *(api.info, api.create, api.purge, api.get, api.delete, api.direct_get),
            f"{queue_stream_of(stream)}.>",
            *(queue.create, queue.delete, queue.direct_get),
            f"{grant_prefix_of(stream)}.>",
        ),
        subscribe=(f"{inbox_prefix}.>", f"{stream}.{NEWS_KIND}.>", f"{grant_prefix_of(stream)}.>"),
    )


def right_for(subject: str, rights: tuple[str, ...]) -> str:
    """Return the right that covers the subject, ignoring case; the subject itself if none does."""
    return next((right for right in rights if _covers(right.lower(), subject.lower())), subject)


def _covers(right: str, subject: str) -> bool:
    return subject.startswith(right[:-1]) if right.endswith(".>") else subject == right

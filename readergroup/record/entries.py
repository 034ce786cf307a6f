"""The format of a group's record: a notification is an event, in a block, in a segment of the store.

The record of one life of a group is the segment ``record/<group>/<life>``. It has the layout of a segment of a stream,
so the same code reads, checks and divides both. An event is a msgpack map: the kind of notification, its change, and
those of its own fields that differ from their defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgpack
from pydantic import Field

from notifications import Change, Notification
from synchronizer import InvalidArgumentError, Revision, UnknownUpdateError

from ..group.notifiers import EndOfDataNotification, ReaderNotification, SegmentNotification
from ..streams.config import FrozenModel
from ..streams.data.block import cut_into_blocks, encode_block
from .naming import record_segment

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
#: The same for every process that writes the record.
_WRITER_ID: Final = bytes(16)


class LagSample(Notification):
    """The lag of a group at one moment, as `ReaderGroup.lag` returns it."""

    number_of_segments: int
    number_of_readers: int
    bytes: int
    events: int
    seconds: float


#: The name of each class of notifications in the record. `CheckpointNotification` has none: a completed checkpoint is a
#: cut of every stream and, in a group with ``on_checkpoint``, comes every 30 s by default. In a record of bounded size
#: these cuts would displace the other notifications. The group's state keeps the last checkpoints.
#: `LagNotification` has none: no two processes measure the same lag, so theirs cannot be told apart. See `LagSample`.
KINDS: Final[dict[str, type[Notification]]] = {
    "segments": SegmentNotification,
    "readers": ReaderNotification,
    "end_of_data": EndOfDataNotification,
    "lag": LagSample,
}
_NAMES: Final = {kind: name for name, kind in KINDS.items()}


class RecordRange(FrozenModel):
    """The notifications of a record from offset ``start`` to ``end``. Has a pickle and a JSON form; names no store."""

    group: str
    #: The life of the record. A group that is deleted and created again has a record with another life.
    life: str
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]

    @property
    def segment(self) -> str:
        """The name of the segment in the store that holds them."""
        return record_segment(self.group, self.life)


def kind_of(notification: Notification) -> str:
    """Return its name in the record. Raise `InvalidArgumentError` for a class that is not recorded."""
    try:
        return _NAMES[type(notification)]
    except KeyError:
        raise InvalidArgumentError(
            f"notifications of this class are not recorded; a record has {', '.join(each.__name__ for each in _NAMES)}",
            notification=type(notification).__name__,
        ) from None


def microseconds(at: datetime) -> int:
    """Return the microseconds from 1970 to ``at``."""
    return (at - _EPOCH) // _MICROSECOND


def encode_notification(notification: Notification) -> bytes:
    change = notification.change
    found: dict[str, Any] = {
        "kind": kind_of(notification),
        "revision": [change.revision.offset, change.revision.index],
        "cause": change.cause,
        "seen_at": microseconds(change.seen_at),
        "fields": notification.model_dump(mode="json", exclude={"change"}, exclude_defaults=True),
    }
    if change.gap:
        found["gap"] = True
    return bytes(msgpack.packb(found))


def decode_notification(segment: str, offset: int, data: bytes) -> Notification:
    try:
        found = msgpack.unpackb(data)
        change = Change(
            source=segment.split("/")[1],
            revision=Revision(*found.pop("revision")),
            cause=found.pop("cause"),
            seen_at=_EPOCH + found.pop("seen_at") * _MICROSECOND,
            gap=found.pop("gap", False),
        )
        notification = KINDS[found.pop("kind")].model_validate({"change": change, **found.pop("fields")})
    except (ValueError, TypeError, KeyError) as error:  # the checksum matches, so a newer release wrote it
        raise _unknown(segment, offset) from error
    if found:
        raise _unknown(segment, offset)
    return notification


def _unknown(segment: str, offset: int) -> UnknownUpdateError:
    return UnknownUpdateError(
        "a newer release wrote this notification; deploy that release here", segment=segment, offset=offset
    )


def encode_entry(events: Sequence[bytes], written_at: datetime) -> bytes:
    """Return the bytes of one append to the record."""
    return b"".join(
        encode_block(events[start:end], written_at=microseconds(written_at), writer_id=_WRITER_ID, first_number=0)
        for start, end in cut_into_blocks(events)
    )

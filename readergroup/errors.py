"""Errors that only streams and reader groups raise. The general ones are in `synchronizer.errors`."""

from __future__ import annotations

from synchronizer.errors import AlreadyExistsError, InvalidArgumentError, ReaderGroupError


class StreamExistsError(AlreadyExistsError):
    """A stream of this name exists with another config. ``streams.configure`` changes the config of a stream."""


class EventTooLargeError(InvalidArgumentError):
    """The event, or the group of events of one ``write_many``, is over the limit. Nothing of it was written."""


class CorruptDataError(ReaderGroupError):
    """What is at this offset of a segment is no intact block of events, or no event. Nothing is skipped."""

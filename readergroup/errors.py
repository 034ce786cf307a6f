"""Errors that only streams and reader groups raise. The general ones are in `synchronizer.errors`."""

from __future__ import annotations

from synchronizer import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ReaderGroupError,
)


class StreamExistsError(AlreadyExistsError):
    """A stream of this name exists with another config. ``streams.configure`` changes the config of a stream."""


class StreamBeingCopiedError(NotFoundError):
    """The stream is a copy that is not whole yet. ``streams.copy`` goes on with it, ``streams.delete`` gives it up."""


class EventTooLargeError(InvalidArgumentError):
    """The event, or the group of events of one ``write_many``, is over the limit. Nothing of it was written."""


class CorruptDataError(ReaderGroupError):
    """What is at this offset of a segment is no intact block of events, or no event. Nothing is skipped."""


class ReaderGroupExistsError(AlreadyExistsError):
    """A group of this name exists with another config. ``group.configure`` changes the config of a group."""


class ReaderNotInGroupError(ReaderGroupError):
    """The reader is not, or no longer, in the group, or no longer owns the segment. What it did now has no effect."""


class CheckpointTimeoutError(DeadlineExceededError):
    """The checkpoint was not completed in time. ``readers`` are those that block it."""


class CheckpointFailedError(ReaderGroupError):
    """The checkpoint was given up: the group was reset meanwhile, or became too large. Nothing came of it."""

    retryable = True


class EndOfDataError(ReaderGroupError, EOFError):
    """The whole group has read all of its streams to their end."""


class WorkerError(ReaderGroupError):
    """The workers of a pool cannot be started."""

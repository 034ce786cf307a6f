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
    """A stream of this name exists with another config.

    Call ``streams.configure`` to change it, and ``streams.scale`` to change the number of its segments.
    """


class StreamBeingCopiedError(NotFoundError):
    """The stream is an unfinished copy. ``streams.copy`` continues it, ``streams.delete`` discards it."""


class EventTooLargeError(InvalidArgumentError):
    """The event, or the events of one ``write_many`` together, exceed the size limit. Nothing was written."""


class CorruptDataError(ReaderGroupError):
    """The segment has no intact block of events, or no intact event, at this offset. Nothing is skipped."""


class ReaderGroupExistsError(AlreadyExistsError):
    """A group of this name exists with another config. Call ``group.configure`` to change it."""


class ReaderNotInGroupError(ReaderGroupError):
    """The reader is not in the group, or does not own the segment any more. The call had no effect."""


class EventStoredError(ReaderGroupError):
    """The sink's database has the event, or all of the batch. The block did not run; continue with the next one."""


class SinkBehindError(ReaderGroupError):
    """The sink's database has stored less than the group has processed. No event was handled."""


class CheckpointTimeoutError(DeadlineExceededError):
    """The checkpoint was not completed in time. ``readers`` lists the readers that block it."""


class CheckpointFailedError(ReaderGroupError):
    """The checkpoint was cancelled: the group was reset meanwhile, or its state became too large. Nothing was saved."""

    retryable = True


class CheckpointCancelledError(CheckpointFailedError):
    """``group.cancel_checkpoint`` cancelled the checkpoint. Nothing was saved."""

    retryable = False


class EndOfDataError(ReaderGroupError, EOFError):
    """The whole group has read all of its streams to their end."""


class WorkerError(ReaderGroupError):
    """The pool cannot start its workers."""

"""What a retention policy deletes."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import FrozenModel, RetentionPolicy, StreamCut
from .decision import Reason


class RetentionReport(FrozenModel):
    """What a retention policy deletes now: the answer of ``streams.retain``."""

    stream: str
    policy: RetentionPolicy
    #: Where the remaining data starts.
    head: StreamCut
    deleted_bytes: int
    kept_bytes: int
    #: Why bytes are deleted; None if none are.
    reason: Reason | None = None
    #: Subscribed groups that have not consumed all that is deleted.
    skipped: tuple[str, ...] = ()
    #: How many bytes each subscribed group has yet to consume.
    unconsumed_bytes: Mapping[str, int] = {}

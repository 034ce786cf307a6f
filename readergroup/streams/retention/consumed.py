"""What subscribed groups have consumed, as the retention policies of streams see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..config import StreamCut


class Consumed(NamedTuple):
    """A subscribed group has consumed what is before all of these cuts of a stream; nothing if there is none."""

    incarnation: str
    cuts: Sequence[StreamCut]


#: By stream, then by group.
Subscribers = Mapping[str, Mapping[str, Consumed]]

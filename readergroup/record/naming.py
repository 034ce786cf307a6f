"""Where the record of a group is in the store."""

from __future__ import annotations

from typing import Final

from ..streams.config import check_name

#: The attribute of the group's log that names the current life of its record.
LIFE: Final = "record"


def record_segment(group: str, life: str) -> str:
    return f"record/{check_name(group, 'reader group')}/{life}"

"""Numbers in words, for people."""

from __future__ import annotations


def count(number: int, unit: str) -> str:
    """Return ``1 event`` or ``2,000 events``."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"

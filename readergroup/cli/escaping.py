"""What a terminal would obey, as text: writers choose what commands print."""

from __future__ import annotations

import re
from typing import Final

#: The control characters of ASCII and Latin-1, without tabs and line ends, and those that reverse text.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with escapes for control characters, as in JSON."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)

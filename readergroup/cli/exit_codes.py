"""The exit codes of commands. 1 is a command that failed."""

from typing import Final

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130

"""The command ``readergroup``."""

import sys

from .exit_codes import INTERRUPTED


def main() -> None:
    """Run the command in ``sys.argv``, and exit. An interrupt while it loads prints no traceback."""
    try:
        from .app import run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)

"""The command ``readergroup``."""

import gc
import os
import sys
from typing import Final

from .exit_codes import INTERRUPTED

#: New objects until Python looks for garbage. A command creates 60,000 while it loads, and each look at them takes
#: 30 ms. With its default of 700, Python looks 100 times.
_OBJECTS_PER_COLLECTION: Final = 100_000


def main() -> None:
    """Run the command in ``sys.argv``, and exit. An interrupt while it loads prints no traceback."""
    _open_what_is_closed()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    # pydantic otherwise reads the metadata of every installed distribution, to find plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if os.environ.get("COLUMNS") == "0":  # of a terminal that does not tell its width: the help would be empty
        del os.environ["COLUMNS"]
    try:
        from .app import run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        # Python otherwise looks for garbage several times more while it exits.
        gc.freeze()


def _open_what_is_closed() -> None:
    """Let input and output that the caller has closed fail when they are used: Python has None in their place.

    A command that reads or prints then says so, instead of printing events to nowhere. What goes to stderr is dropped.
    """
    for name, number, flags in (("stdin", 0, os.O_WRONLY), ("stdout", 1, os.O_RDONLY), ("stderr", 2, os.O_WRONLY)):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, flags)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  until the process ends

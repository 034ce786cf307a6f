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
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    # pydantic otherwise reads the metadata of every installed distribution, to find plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from .app import run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        # Python otherwise looks for garbage several times more while it exits.
        gc.freeze()

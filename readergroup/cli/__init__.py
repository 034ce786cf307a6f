"""The command ``readergroup``."""

import gc
import os
import sys
from typing import Final

from .exit_codes import INTERRUPTED

#: New objects until Python looks for garbage. With its default of 700 it looks 100 times while a command loads.
_OBJECTS_PER_COLLECTION: Final = 50_000


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

"""``python -m readergroup.cli`` is the command ``readergroup``."""

from . import main

if __name__ == "__main__":
    main()

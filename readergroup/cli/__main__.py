"""``python -m readergroup.cli`` is the command ``readergroup``."""

from .app import main

if __name__ == "__main__":
    main()

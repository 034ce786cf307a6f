"""``python -m readergroup.cli`` is the command ``readergroup``."""

from .app import main

main()

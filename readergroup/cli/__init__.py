"""The command ``readergroup``."""

from .app import app as app
from .app import main as main

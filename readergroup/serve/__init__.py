"""The web view of a store: a page, metrics for Prometheus, and JSON for scalers. The command is ``readergroup serve``.

docs/howto/see-it-in-a-browser.md shows how to use it.
"""

from . import requirements as requirements  # first: it reports missing packages

# isort: split
from .application import app

__all__ = ["app"]


def __dir__() -> list[str]:
    """The public names, without the modules that hold them."""
    return __all__

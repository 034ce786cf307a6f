"""Why a test cannot have its server."""

from __future__ import annotations


class ServerUnavailable(Exception):
    """No server of this kind can be started here. The message says in one line what is missing."""

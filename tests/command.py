"""The command ``readergroup`` with all its commands, for `typer.testing.CliRunner`."""

from __future__ import annotations

from readergroup.cli.app import app_with

app = app_with()

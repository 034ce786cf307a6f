"""The command ``readergroup`` with all its commands, for `typer.testing.CliRunner`."""

from __future__ import annotations

from functools import cache

from typer import testing

from readergroup.cli.app import app_with

app = app_with()
# For each call Typer would make all commands again, which takes ten times as long as most calls.
command_of = testing._get_command = cache(testing._get_command)

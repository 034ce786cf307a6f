"""The commands of the configuration prompt, and the answer to each."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final

import synchronizer
from synchronizer import ReaderGroupError

from ..words import count
from .escaping import printable
from .screen import as_printed
from .session import Failed

if TYPE_CHECKING:
    from synchronizer.recipes.collections.shared_config import ConfigEntries

#: The commands of the prompt with their arguments; those in brackets are optional.
USAGE: Final = {
    "get-all": ("", "show all entries of this copy"),
    "get": ("KEY", "show a value of this copy"),
    "put": ("KEY VALUE", "set a value"),
    "put-if-absent": ("KEY VALUE", "set a value if the key has none"),
    "replace": ("KEY VALUE [CURRENT]", "replace a value, if it is CURRENT"),
    "remove": ("KEY [CURRENT]", "remove a key, if its value is CURRENT"),
    "clear": ("", "remove all keys"),
    "refresh": ("", "update this copy"),
    "help": ("", "show this list"),
    "exit": ("", "end; Ctrl-D does the same"),
}


class Entries:
    """The entries of a configuration in text form. A failed command raises `Failed` with the reason."""

    def __init__(self, entries: ConfigEntries) -> None:
        self._entries = entries

    def get_all(self) -> str:
        return "\n".join(starmap(_line, self._entries.items())) or "there are no entries"

    def get(self, key: str) -> str:
        if key not in self._entries:
            raise Failed(f"there is no key {key}")
        value = self._entries[key]
        return as_printed(value) if isinstance(value, str) else as_json(value)

    def put(self, key: str, value: str) -> str:
        self._entries.put(key, read(value))
        return self._told(key)

    def put_if_absent(self, key: str, value: str) -> str:
        if not self._entries.put_if_absent(key, read(value)):
            raise Failed(f"nothing changed: {self._told(key)}")
        return self._told(key)

    def replace(self, key: str, value: str, current: str | None = None) -> str:
        if not self._entries.replace(key, read(value), _expected(current)):
            raise Failed(f"nothing changed: {self._told(key)}")
        return self._told(key)

    def remove(self, key: str, current: str | None = None) -> str:
        if not self._entries.remove(key, _expected(current)):
            raise Failed(f"nothing changed: {self._told(key)}")
        return f"{key} removed"

    def clear(self) -> str:
        self._entries.clear()
        return "all keys removed"

    def refresh(self) -> str:
        self._entries.refresh()
        return f"{count(len(self._entries), 'key')}, revision {self._entries.synchronizer.revision}"

    def answer(self, line: str) -> str:
        """Return the answer to a typed line; each kind of mistake has its own answer."""
        try:
            command, *arguments = shlex.split(line) or [""]
        except ValueError as error:
            return f"{str(error).lower()}; quote values with spaces, such as put greeting 'good day'"
        if not command:
            return ""
        if command == "help":
            return "\n".join(f"{f'{name} {arguments}':<36}{meaning}" for name, (arguments, meaning) in USAGE.items())
        if command not in USAGE:
            return f"there is no command {command}; type help for a list"
        names = USAGE[command][0].split()
        if not len([name for name in names if name[0] != "["]) <= len(arguments) <= len(names):
            said = f"usage: {command} {USAGE[command][0]}".rstrip()
            return f"{said}; quote values with spaces" if len(arguments) > len(names) > 0 else said
        act: Callable[..., str] = getattr(self, command.replace("-", "_"))
        try:
            return act(*arguments)
        except (Failed, ReaderGroupError) as error:
            return " ".join(str(error).split())

    def _told(self, key: str) -> str:
        return _line(key, self._entries[key]) if key in self._entries else f"there is no key {key}"


def _line(key: str, value: object) -> str:
    return f"{printable(key)} = {shown(value)}"


def read(word: str) -> object:
    """Return the JSON value of ``word``, or the text itself if it is not JSON."""
    try:
        return json.loads(word, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):  # nested too deeply
        return word


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} cannot be a number of JSON")
    return value


def shown(value: object) -> str:
    """Return the text to type for ``value``: its own text if possible, otherwise JSON."""
    return value if isinstance(value, str) and value.isprintable() and read(value) == value else as_json(value)


def as_json(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False, default=repr))


def _expected(current: str | None) -> Any:
    return synchronizer.ANY if current is None else read(current)

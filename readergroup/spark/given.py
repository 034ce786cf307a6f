"""Turns what Spark passes to a source into the options that the user gave: by name, as a path, or in SQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from synchronizer import InvalidArgumentError, UnsupportedError

#: Spark adds it to the options of CREATE TABLE, and of nothing else.
_OF_A_TABLE: Final = "provider"


def named_options(given: Mapping[str, str], path: str) -> Mapping[str, str]:
    """Return the options with the path, as of ``load("shop/orders")``, under the name ``path``.

    Raise `UnsupportedError` for a table: Spark does not keep the options of a table of a Python source.
    """
    named = {name.lower(): name for name in given}
    if not given or _OF_A_TABLE in named:
        raise UnsupportedError(
            f"the options 'url' and '{path}' are needed, and a table in Spark's catalog does not keep them; in SQL, "
            "use CREATE TEMPORARY VIEW name USING readergroup OPTIONS (...)"
        )
    if "path" not in named:
        return given
    value = given[named["path"]]
    if path in named and given[named[path]] != value:
        raise InvalidArgumentError(
            f"the path and the option '{path}' differ; give one of them", path=value, **{path: given[named[path]]}
        )
    return {**{name: text for name, text in given.items() if name.lower() != "path"}, path: value}

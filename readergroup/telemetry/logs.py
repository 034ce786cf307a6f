"""The fields of log records: the group, reader, segment and revision that they concern."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

#: On each record of a group. None where the record concerns no particular one.
FIELDS: Final = ("group", "reader", "segment", "revision")


class LogAbout(logging.LoggerAdapter[logging.Logger]):
    """Logs to ``logger``, with these fields on each record. A call adds others by ``extra``, and may change them."""

    def __init__(self, logger: logging.Logger, *, group: str, reader: str | None = None) -> None:
        super().__init__(logger, {**dict.fromkeys(FIELDS), "group": group, "reader": reader})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def fields_of(what: object) -> Mapping[str, str | None]:
    """Return the fields of a record about what a handler gets: an event or a batch."""
    return {name: getattr(what, name, None) for name in FIELDS}

"""A shared state in the web view: its value, and the last updates in its log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from synchronizer import InvalidArgumentError

from ..client import Client
from ..states.history import history_of, last_snapshot, readable
from ..states.kinds import is_collection, is_name, kind_of, opened

#: How many updates are shown.
UPDATES: Final = 20
MAX_UPDATES: Final = 200
#: What is shown of a value and of an update.
_FIELDS: Final = 100
_SHOWN_VALUE: Final = 4_000
_SHOWN_UPDATE: Final = 400


def state_document(client: Client, name: str, limit: int, known: str | None) -> Mapping[str, Any]:
    """Return the state with its last updates; without them if its log still has the length that is ``known``.

    Raises:
        InvalidArgumentError: No state can have this name.
        NotFoundError: There is no such state.
    """
    if not is_name(name):
        raise InvalidArgumentError("no shared state has such a name", name=name)
    info = client.store.info(name)
    if known == str(info.length):
        return {"name": name, "is_unchanged": True}
    found = history_of(client.store, name, limit)
    kind, since = kind_of(name), 0
    if kind is None:
        snapshot = last_snapshot(client.store, name)
        title, fields, since = "", snapshot.fields, snapshot.entries_since
    else:
        with opened(client, name, kind) as synchronizer:
            state = synchronizer.state
        title, fields = type(state).__name__, readable(state.model_dump(), in_collection=is_collection(name))
    return {
        "name": name,
        "is_unchanged": False,
        "known": str(info.length),
        "type": title,
        "fields": {
            _text(field, _SHOWN_UPDATE): _text(value, _SHOWN_VALUE) for field, value in islice(fields.items(), _FIELDS)
        },
        "entries_since": since,
        "updates": [
            {
                "revision": str(each.revision),
                "writer": each.writer,
                "update": _text(each.update, _SHOWN_UPDATE),
                "fields": _text(
                    ", ".join(f"{field}={_text(value, _SHOWN_UPDATE)}" for field, value in each.fields.items()),
                    _SHOWN_UPDATE,
                ),
            }
            for each in reversed(found.updates)
        ],
        "earlier": found.earlier,
    }


def _text(value: Any, length: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= length else f"{text[:length]} ..."

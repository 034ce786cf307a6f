"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from synchronizer.threads.loading import loading


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of HTML. Values are shown as text, whatever they contain."""
    with loading():
        from html import escape

    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

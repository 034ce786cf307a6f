"""How commands print."""

from __future__ import annotations

import pytest

from readergroup.cli import screen


@pytest.mark.parametrize("rows", [[], [("a", "5", "open")], [("shop/orders", "10,000", "sealed"), ("日本", "1", "")]])
def test_a_long_table_looks_like_a_short_one(
    rows: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed() -> list[str]:
        screen.out().print(screen.table("stream", "segments", "is", numbers=["segments"], rows=rows))
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    short = printed()
    monkeypatch.setattr(screen, "_MOST_FOLDED_ROWS", -1)
    assert printed() == short
    assert len(short) == 2 + len(rows)

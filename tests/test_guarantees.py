"""Every guarantee names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/guarantees.md").read_text()
NUMBERS = [*(f"S{number}" for number in range(1, 9)), *(f"L{number}" for number in range(1, 6))]


@pytest.mark.parametrize("number", NUMBERS)
def test_guarantee_is_held_by_tests_that_exist(number: str) -> None:
    (section,) = re.findall(rf"^\*\*{number} .*?(?=^\*\*[SL]\d|^## )", PAGE, re.MULTILINE | re.DOTALL)
    named = re.findall(r"^- `(tests/\S+)::(\w+)`$", section, re.MULTILINE)
    assert named
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert name in defined, f"{path} has no {name}"

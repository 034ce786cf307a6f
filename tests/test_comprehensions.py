"""Python 3.12 and 3.13.0 raise `NameError` where a comprehension hides a variable of an enclosing function.

They do so if the function around the comprehension uses the variable in another function, such as a generator
expression. Python 3.11 does not, and so no test fails there.
"""

from __future__ import annotations

import symtable
import sys
from collections.abc import Iterator

import pytest

from tests.places import ROOT, product_files

#: From 3.12 on, the table of symbols has no comprehensions.
pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.11 finds it for all releases")

_COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp")


def test_no_comprehension_hides_a_variable_of_an_enclosing_function() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {each}"
        for path in product_files()
        for each in _hidden(symtable.symtable(path.read_text(), str(path), "exec"))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("inner", "hidden"),
    [
        ("{name for name in names}", ["f:2: name"]),
        ("{each for each in names}", []),
        ("set(name for name in names)", []),
    ],
)
def test_it_is_noticed(inner: str, hidden: list[str]) -> None:
    source = f"def outer(name):\n def f(names):\n  return (each + name for each in names), {inner}\n return f"
    assert list(_hidden(symtable.symtable(source, "<test>", "exec"))) == hidden


def _hidden(scope: symtable.SymbolTable) -> Iterator[str]:
    children = scope.get_children()
    if isinstance(scope, symtable.Function):
        own = {
            symbol.get_name()
            for child in children
            if child.get_name() in _COMPREHENSIONS
            for symbol in child.get_symbols()
            if symbol.is_local() and not symbol.is_parameter()
        }
        for name in sorted(own & {*scope.get_frees()}):
            yield f"{scope.get_name()}:{scope.get_lineno()}: {name}"
    for child in children:
        yield from _hidden(child)

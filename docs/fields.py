"""Let the reference of the site show the fields of classes, and the comment ``#:`` above an attribute as its text."""

from __future__ import annotations

import ast
from itertools import takewhile
from pathlib import Path
from typing import Any

import griffe


class Fields(griffe.Extension):
    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, agent: Any, **kwargs: Any
    ) -> None:
        if attr.docstring is None:
            text = _comment(attr)
            if text or _is_field(node, attr):
                attr.docstring = griffe.Docstring(text, parent=attr)


def _comment(attribute: griffe.Attribute) -> str:
    if attribute.lineno is None or not isinstance(attribute.filepath, Path):
        return ""
    above = reversed(attribute.lines_collection[attribute.filepath][: attribute.lineno - 1])
    comment = [line.strip() for line in takewhile(lambda line: line.lstrip().startswith("#:"), above)]
    return "\n".join(line.removeprefix("#:").strip() for line in reversed(comment))


def _is_field(node: ast.AST | griffe.ObjectNode, attribute: griffe.Attribute) -> bool:
    """Whether it is in the body of a class that does not explain its fields as arguments."""
    if not isinstance(attribute.parent, griffe.Class) or "instance-attribute" not in attribute.labels:
        return False
    is_in_body = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    docstring = attribute.parent.docstring
    return is_in_body and (docstring is None or "Args:" not in docstring.value)

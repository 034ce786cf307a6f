"""The names at the root of a package. Each loads its module when it is first used, so that the import is cheap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from .threads.loading import loading


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of ``package``: it loads the module of a name, and keeps the value in the package.

    Type checkers do not run this, so the package repeats the imports under ``TYPE_CHECKING``.

    Args:
        package: The full name of the package.
        modules: For each module, the names that it provides, separated by spaces. A relative module begins with a dot.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules.get(package)
            )
        with loading():
            value = getattr(import_module(home, package), name)
        setattr(sys.modules[package], name, value)
        return value

    return load

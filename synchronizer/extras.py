"""How to install what is optional. The one place to change when a package index has the project."""


def install_hint(extra: str) -> str:
    """Return the words of an error that say how to install the extra."""
    return f"run pip install '.[{extra}]' in a clone of the repository"

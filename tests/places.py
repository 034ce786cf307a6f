"""Where tests find files: the modules of the product, and what is not code."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
#: Golden files: what is stored, as the first version that stored it wrote it.
WIRE: Final = ROOT / "tests" / "wire"
SAMPLES: Final = ROOT / "samples"
DOCS: Final = ROOT / "docs"
#: The packages of the product.
PACKAGES: Final = ("synchronizer", "notifications", "readergroup")


def product_files(root: Path = ROOT) -> list[Path]:
    """Return the modules of the product under ``root``, in order."""
    return sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))


def load_product(*left_out: str) -> None:
    """Import all modules of the product, but those with one of these parts in their paths."""
    for file in product_files():
        path = str(file.relative_to(ROOT))
        if not any(part in path for part in left_out):
            import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))

"""Where tests find files: the modules of the product, and what is not code."""

from __future__ import annotations

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

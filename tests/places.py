"""Where tests find what is not code."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
#: Golden files: what is stored, as the first version that stored it wrote it.
WIRE: Final = ROOT / "tests" / "wire"
SAMPLES: Final = ROOT / "samples"
DOCS: Final = ROOT / "docs"

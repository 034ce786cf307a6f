"""``python -m tests.simulation.scale``: what a group costs as it grows. See `docs/scale.md` for what came of it.

python -m tests.simulation.scale --readers 100 --segments 1000       one size, as a table
python -m tests.simulation.scale --all --json docs/images/scale.json --picture docs/images/scale.svg

The last one measures the sizes of the page that are not in the file yet. The largest takes half an hour.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .scale_report import SIZES, draw, load, measure, save, table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scale", description=__doc__.split("\n")[0])
    parser.add_argument("--readers", type=int, default=10)
    parser.add_argument("--segments", type=int, default=100)
    parser.add_argument("--all", action="store_true", help="the sizes of docs/scale.md")
    parser.add_argument(
        "--json", type=Path, help="the file that keeps the figures; what is in it is not measured again"
    )
    parser.add_argument("--picture", type=Path, help="draw the figures into this file")
    options = parser.parse_args(arguments)
    sizes = SIZES if options.all else [(options.readers, options.segments)]
    found = {(size["readers"], size["segments"]): size for size in (load(options.json) if options.json else [])}
    for size in sizes:
        if size not in found:
            found[size] = measure(*size, say=partial(print, file=sys.stderr, flush=True))
            if options.json:
                save(options.json, list(found.values()))
    shown = [found[size] for size in sorted(found)] if options.all else [found[size] for size in sizes]
    print(table(shown))
    if options.picture:
        draw(shown, options.picture)
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of what a seed decides
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.scale", *sys.argv[1:]])
    sys.exit(main())

"""A daemon of PySpark that imports first what each of its workers needs, so that they begin at once.

    python prepared_workers.py MODULE

Takes the place of ``python -m pyspark.daemon MODULE``, whose workers each take half a second for their imports.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import Final

_IMPORTED: Final = ("pyspark.worker", "pyspark_readergroup", "pyspark_readergroup_notifications")


def main() -> None:
    sys.path[0] = os.getcwd()  # as with -m
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads of the daemon would be missing in its workers
    for module in (*_IMPORTED, *sys.argv[1:]):
        importlib.import_module(module)
    gc.freeze()  # the memory stays shared
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()

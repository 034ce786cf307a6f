"""The processor time of a new process: imports, the first event, the help of the command; beside pydantic alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import readergroup as rg

from .figure import Figure, Result
from .measuring import PAYLOAD, alternate
from .stores import Store

STREAM: Final = "bench/events"
GROUP: Final = "bench"
ROUNDS: Final = 10

_BARE: Final = "pass"
_PYDANTIC: Final = "from pydantic import BaseModel\nclass Order(BaseModel):\n    size: int"
_IMPORT: Final = "import readergroup"
_CONNECT: Final = "import readergroup as rg, os\nclient = rg.connect(os.environ['READERGROUP_URL'])\n"
#: What is measured in a new process, and how many times the time of one model of pydantic it may take.
_PROGRAMS: Final[Mapping[str, tuple[str, float]]] = {
    "import, connect": (f"{_CONNECT}client.close()", 1.5),
    "import, connect, add to a counter": (f"{_CONNECT}client.counter('visits').add(1)\nclient.close()", 1.8),
    "import, connect, write an event": (
        f"{_CONNECT}writer = client.writer({STREAM!r})\nwriter.write(b'x')\nclient.close()",
        2.0,
    ),
    "import, connect, read an event": (
        f"{_CONNECT}reader = client.groups.get({GROUP!r}).reader()\nnext(iter(reader))\nclient.close()",
        2.5,
    ),
}


def start(store: Store) -> Iterator[Result]:
    """New processes, until they have imported what they use and done it once."""
    command = Path(sysconfig.get_path("scripts")) / "readergroup"
    with store.fresh() as url:
        _fill(url)
        environment = {**os.environ, "READERGROUP_URL": url}
        # Processes keep what they compile, as those of users do.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        programs = [_BARE, _PYDANTIC, _IMPORT, *(program for program, _ in _PROGRAMS.values())]
        commands = [
            *([sys.executable, "-c", each] for each in programs),
            [str(command), "--help"],
            [str(command), "stream", "list"],
        ]
        runs = [partial(_processor_seconds, each, environment) for each in commands]
        for run in runs:
            run()
        bare, pydantic, imported, *others, helped, listed = alternate(ROUNDS, *runs)
    beside = f"a bare interpreter {_ms(bare)}, one model of pydantic {_ms(pydantic)}"
    for what, seconds, target in (
        ("import readergroup", imported, 150),
        ("readergroup --help", helped, 300),
        ("readergroup stream list", listed, 250),
    ):
        yield Figure(
            what=f"{what}, processor time",
            value=min(seconds) * 1e3,
            unit="ms",
            target=target,
            better="less",
            beside=beside,
        )
    for (what, (_, target)), seconds in zip(_PROGRAMS.items(), others, strict=True):
        yield Figure(
            what=f"{what}: processor time of the process compared with that of one model of pydantic",
            value=median(a / b for a, b in zip(seconds, pydantic, strict=True)),
            unit="×",
            target=target,
            better="less",
            beside=f"{_ms(seconds)}, the model {_ms(pydantic)}",
        )


def _fill(url: str) -> None:
    with rg.connect(url) as client:
        client.streams.create(STREAM)
        client.groups.create(GROUP, streams=[STREAM])
        with client.writer(STREAM) as writer:
            writer.write(PAYLOAD)


def _processor_seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    child = subprocess.Popen(command, env=dict(environment), stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return used.ru_utime + used.ru_stime


def _ms(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.0f} ms"

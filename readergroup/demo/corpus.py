"""The input: files whose lines become events. Lines may contain any bytes."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..streams.serializers import Serializer

#: A longer line counts as several.
MAX_LINE_BYTES: Final = 1024 * 1024

#: A line: its number in its file, from 0, and its bytes without the end.
Line = tuple[int, bytes]


class LineSerializer(Serializer[Line]):
    """Serializes a line as its number, a space, and its bytes."""

    def dumps(self, event: Line) -> bytes:
        return b"%d %b" % event

    def loads(self, data: bytes) -> Line:
        number, _, line = data.partition(b" ")
        return int(number), line


@dataclass(frozen=True)
class Corpus:
    """Files by their names, which are the routing keys of their lines."""

    title: str
    files: dict[str, Path]
    #: How many files were skipped because they cannot be read.
    unreadable: int = 0

    def lines(self, name: str) -> Iterator[bytes]:
        """Iterate over the lines of a file, without their ends."""
        with self.files[name].open("rb") as source:
            while line := source.readline(MAX_LINE_BYTES):
                yield line.removesuffix(b"\n")


def standard_library() -> Corpus:
    """Return a corpus of all ``.py`` files in the standard library of the running Python."""
    root = Path(sysconfig.get_path("stdlib"))
    return _corpus("this Python's standard library", root, [path for path in _walk(root) if path.suffix == ".py"])


def of_path(path: Path) -> Corpus:
    """Return a corpus of the file at ``path``, or of all files in that folder. Raise `OSError` if there is none."""
    if stat.S_ISDIR(path.stat().st_mode):
        return _corpus(path.resolve().name, path, list(_walk(path)))
    path.open("rb").close()
    return _corpus(path.name, path.parent, [path])


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        for file in sorted(files):
            yield Path(folder, file)


def _corpus(title: str, root: Path, paths: list[Path]) -> Corpus:
    readable = [path for path in paths if path.is_file() and os.access(path, os.R_OK)]
    return Corpus(title, {_name(path.relative_to(root)): path for path in readable}, len(paths) - len(readable))


def _name(path: Path) -> str:
    """Return the path as text that can be a routing key, even if the path is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")

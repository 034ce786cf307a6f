"""The files beside a SQLite file: who may open them."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from synchronizer.errors import StoreUnavailableError
from synchronizer.stores import open_store

from ..users import NOBODY, as_nobody

#: Without these the store does not open.
NEEDED = (".lock", ".lock.next", ".notify", ".fair", ".reserve")
SUFFIXES = (*NEEDED, ".requests")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture
def path() -> Iterator[Path]:
    """In a directory that every user may write to."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory / "store.db"
    shutil.rmtree(directory)


def use(path: Path) -> None:
    with open_store(f"sqlite:///{path}") as store:
        store.create("s")
        with store.fair_lock("s", 10):
            store.append("s", b"data")


def beside(path: Path) -> list[os.stat_result]:
    return [os.stat(f"{path}{suffix}") for suffix in SUFFIXES]


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o600, 0o600), (0o644, 0o600), (0o640, 0o600), (0o664, 0o660), (0o666, 0o666)]
)
def test_whoever_may_write_to_the_database_may_open_them_and_nobody_else(path: Path, mode: int, expected: int) -> None:
    for _ in range(2):  # when they are made, and when the mode of the database has changed since
        use(path)
        path.chmod(mode)
    use(path)
    assert [oct(stat.S_IMODE(each.st_mode)) for each in beside(path)] == [oct(expected)] * len(SUFFIXES)


@pytest.mark.parametrize("suffix", NEEDED)
def test_a_link_is_not_followed(path: Path, suffix: str) -> None:
    use(path)
    other = path.with_name("other")
    other.write_bytes(b"kept")
    before = other.stat()
    Path(f"{path}{suffix}").unlink()
    Path(f"{path}{suffix}").symlink_to(other)
    with pytest.raises(StoreUnavailableError, match=f"^a file .* is a symbolic link, which .*; remove it.*{suffix}"):
        use(path)
    assert other.read_bytes() == b"kept"
    assert other.stat().st_mode == before.st_mode


@pytest.mark.parametrize("suffix", NEEDED)
def test_what_is_not_a_file_is_refused(path: Path, suffix: str) -> None:
    use(path)
    Path(f"{path}{suffix}").unlink()
    os.mkfifo(f"{path}{suffix}")
    with pytest.raises(StoreUnavailableError, match=f"not a regular file; remove it.*{suffix}"):
        use(path)


@pytest.mark.parametrize("found", ["link", "pipe"])
def test_neither_is_used_for_the_slots_without_which_the_store_works_too(path: Path, found: str) -> None:
    use(path)
    slots, other = Path(f"{path}.requests"), path.with_name("other")
    other.write_bytes(b"kept")
    before = other.stat()
    slots.unlink()
    if found == "link":
        slots.symlink_to(other)
    else:
        os.mkfifo(slots)
    use(path)
    with open_store(f"sqlite:///{path}") as store:
        assert store.read("s", 0, 100) == b"datadata"
    assert other.read_bytes() == b"kept"
    assert other.stat().st_mode == before.st_mode
    assert slots.is_symlink() == (found == "link") and slots.is_fifo() == (found == "pipe")


@needs_root
def test_who_may_only_read_the_database_can_hold_no_lock(path: Path) -> None:
    use(path)
    path.chmod(0o644)
    use(path)
    for suffix in SUFFIXES:
        assert "Permission denied" in as_nobody(lambda suffix=suffix: os.open(f"{path}{suffix}", os.O_RDONLY))


@needs_root
def test_what_root_makes_belongs_to_the_owner_of_the_database(path: Path) -> None:
    assert as_nobody(lambda: use(path)) == ""
    for suffix in SUFFIXES:
        os.unlink(f"{path}{suffix}")
    use(path)
    assert [(each.st_uid, each.st_gid) for each in beside(path)] == [(NOBODY, NOBODY)] * len(SUFFIXES)
    assert as_nobody(lambda: use(path)) == ""


@needs_root
def test_the_group_of_the_database_may_open_them_if_it_may_write(path: Path) -> None:
    use(path)
    os.chown(path, 1234, NOBODY)
    path.chmod(0o660)
    use(path)
    assert as_nobody(lambda: use(path)) == ""

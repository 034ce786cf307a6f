"""Stores that other distributions add: found by the scheme of an address, without a change to this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from synchronizer import ManualClock, UnsupportedError, open_store
from synchronizer.stores.memory import MemoryStore
from tests.distributions import install, install_sample
from tests.places import SAMPLES
from tests.servers.unavailable import ServerUnavailable
from tests.servers.valkey import ValkeyServer

SAMPLE = SAMPLES / "add_a_store"

CRATE = """
from synchronizer.stores.memory import MemoryStore

class CrateStore(MemoryStore):
    def __init__(self, url, *, clock, must_exist):
        super().__init__(url=url, clock=clock)
        self.opened_with = clock, must_exist
"""


def test_a_store_of_another_distribution_opens_by_its_scheme(tmp_path: Path) -> None:
    target = install_sample(tmp_path, SAMPLE)
    program = """
import sys
from synchronizer import open_store
with open_store(sys.argv[1]) as store:
    store.create("shop/orders")
    print(type(store).__module__, store.append("shop/orders", b"data"))
"""
    try:
        server = ValkeyServer(sync="none").start()
    except ServerUnavailable as reason:
        pytest.skip(f"no Valkey server here: {reason}")
    with server:
        done = subprocess.run(
            [sys.executable, "-c", program, server.url],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(target)},
        )
    assert done.stdout == "valkey_store Appended(offset=0, length=4)\n", done.stderr


def test_it_is_opened_with_the_whole_address_and_all_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(
        install(tmp_path, "crates", stores={"crate": "crate:CrateStore"}, modules={"crate": CRATE})
    )
    clock = ManualClock()
    with open_store("crate://me:secret@here/a?b=c", clock=clock, must_exist=True) as store:
        assert store.url == "crate://me:secret@here/a?b=c"
        assert store.opened_with == (clock, True)  # type: ignore[attr-defined]


def test_what_cannot_be_imported_is_told_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {
        "absent": "no_such_module:open_store",
        "half": "half_of_one:open_store",
        "crateless": "half_of_one:CrateStore",
    }
    modules = {"half_of_one": "import driver_that_nobody_has"}
    monkeypatch.syspath_prepend(install(tmp_path, "broken-stores", stores=stores, modules=modules))
    for scheme, reason in (("absent", "no_such_module"), ("half", "driver_that_nobody_has")):
        with pytest.raises(UnsupportedError, match=f"install its requirements.*{reason}") as raised:
            open_store(f"{scheme}://me:secret@here")
        assert raised.value.facts["entry_point"] == stores[scheme]
        assert raised.value.facts["distribution"] == "broken-stores"
        assert "secret" not in str(raised.value)
    with open_store("memory://") as store:
        assert store.create("s")


def test_an_entry_point_that_names_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {"misnamed": "misnamed_crate:NoSuchStore"}
    monkeypatch.syspath_prepend(install(tmp_path, "misnamed", stores=stores, modules={"misnamed_crate": CRATE}))
    with pytest.raises(UnsupportedError, match="NoSuchStore"):
        open_store("misnamed://here")


def test_an_unknown_scheme_is_answered_with_those_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {"crate": "crate:CrateStore", "barrel": "crate:CrateStore"}
    monkeypatch.syspath_prepend(install(tmp_path, "crates", stores=stores, modules={"crate": CRATE}))
    with pytest.raises(UnsupportedError, match="scheme of the address is unknown.*scheme='crates'") as raised:
        open_store("crates://me:secret@here")
    assert {"crate", "barrel"} <= set(raised.value.facts["added"])  # type: ignore[call-overload]
    for built_in in ("sqlite://", "postgresql://", "nats://", "memory://"):
        assert built_in in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_scheme_of_the_sdk_stays_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = dict.fromkeys(["memory", "sqlite", "postgresql", "postgres", "nats"], "crate_instead:CrateStore")
    target = install(
        tmp_path, "crates-for-all", stores=stores, modules={"crate_instead": "raise SystemExit('imported')"}
    )
    monkeypatch.syspath_prepend(target)
    with open_store("memory://") as store:
        assert type(store) is MemoryStore
    with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        assert type(store).__module__ == "synchronizer.stores.sqlite.store"


def test_a_scheme_that_two_distributions_add_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("crates", "barrels"):
        modules = {f"{name}_store": CRATE}
        install(tmp_path, name, stores={"box": f"{name}_store:CrateStore"}, modules=modules)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match="uninstall all but one.*'barrels', 'crates'"):
        open_store("box://here")

"""Distributions that tests install into a folder of their own."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

from tests.waiting import PATIENCE_SECONDS


def install(target: Path, name: str, *, stores: Mapping[str, str], modules: Mapping[str, str]) -> Path:
    """Install a distribution with these modules and stores (scheme to entry point) into ``target``, and return it.

    Python finds it if ``target`` is on its path. To install such a wheel is to unpack it, so no pip has to start.
    """
    wheel = _wheel(target, name, stores=stores, modules=modules)
    with ZipFile(wheel) as archive:
        archive.extractall(target)
    wheel.unlink()
    return target


def _wheel(target: Path, name: str, *, stores: Mapping[str, str], modules: Mapping[str, str]) -> Path:
    entries = "".join(f"{scheme} = {value}\n" for scheme, value in stores.items())
    metadata = f"{name.replace('-', '_')}-1.0.dist-info"
    files = {
        **{f"{module}.py": text for module, text in modules.items()},
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{metadata}/entry_points.txt": f"[readergroup.stores]\n{entries}",
    }
    files[f"{metadata}/RECORD"] = _record(files) + f"{metadata}/RECORD,,\n"
    target.mkdir(exist_ok=True)
    wheel = target / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def install_sample(target: Path, project: Path) -> Path:
    """Install what the pyproject.toml of a sample says, without its build backend, which a test may not have."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())
    modules = declared["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    wheel = _wheel(
        target,
        declared["project"]["name"],
        stores=declared["project"]["entry-points"]["readergroup.stores"],
        modules={module.removesuffix(".py"): (project / module).read_text() for module in modules},
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, timeout=PATIENCE_SECONDS)
    wheel.unlink()
    return target


def _record(files: Mapping[str, str]) -> str:
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}\n")
    return "".join(lines)

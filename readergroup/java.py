"""Looks for the Java that Spark would start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Final

from synchronizer import UnsupportedError

OLDEST_JAVA: Final = 17
_ADVICE: Final = (
    "install Java 17 or newer, for example the package openjdk-17-jre-headless of Debian and Ubuntu, and set "
    "JAVA_HOME to its folder if it is not on the PATH"
)


def check_java() -> int:
    """Return the version of the Java that PySpark will start.

    Call it before you create a session: without Java, PySpark fails there with JAVA_GATEWAY_EXITED.

    Raises:
        UnsupportedError: There is no Java that runs Spark; the error says what to install.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")
    if java is None:
        raise UnsupportedError(f"Spark needs Java, which is not installed; {_ADVICE}", java_home=home)
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    # 'openjdk version "17.0.19" 2026-04-21', or '"1.8.0_392"' in Java 8.
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    if found is None:
        raise UnsupportedError(f"the version of the installed Java is unknown; {_ADVICE}", java=java)
    version = int(found.group(1))
    if version < OLDEST_JAVA:
        raise UnsupportedError(f"the installed Java is too old for Spark; {_ADVICE}", java=java, version=version)
    return version

"""A server must not outlive the test run, however that ends."""

from __future__ import annotations

import subprocess


class Guard:
    """Kills the process ``pid`` when this process is gone, even if it was killed itself.

    The guard sleeps on a pipe that nobody writes to: it ends with the last process that holds the other end. The
    signal that Linux sends at the death of a parent would do worse: it comes when the *thread* that started the
    server ends.
    """

    def __init__(self, pid: int, signal_name: str = "KILL") -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f'read line; kill -{signal_name} "$0"; kill -CONT "$0"', str(pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard is not for the guard
        )

    def dismiss(self) -> None:
        """The process has ended; its number may soon be another's."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin
        self._process.stdin.close()

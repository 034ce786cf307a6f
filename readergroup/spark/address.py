"""The address of a store that all processes of a Spark session share."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from synchronizer import InvalidArgumentError, UnsupportedError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def this_host() -> str:
    """Return an identity of the running kernel. Its processes share the locks of files, also across containers."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


class StoreAddress(BaseModel):
    """An address, as the driver got it and its tasks receive it. Its text form hides it: it may hold a password."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr
    #: The host of the process that made this object: in a query, of the driver.
    host: str = Field(default_factory=this_host, repr=False)

    @classmethod
    def of(cls, url: str) -> StoreAddress:
        """Return the address. Raise for one that no two processes of Spark share."""
        scheme, _, rest = url.partition("://")
        if scheme == "memory":
            raise UnsupportedError(
                "the processes of Spark cannot use a store in memory; use a SQLite file, PostgreSQL or NATS",
                scheme=scheme,
            )
        if scheme == "sqlite" and not rest.startswith("//"):
            raise InvalidArgumentError(
                "the processes of Spark run in other folders; write the absolute path, after four slashes: "
                "'sqlite:////var/lib/shop.db'"
            )
        return cls(url=SecretStr(url))

    def usable(self) -> str:
        """Return the address as text. Raise if it names a file of another host."""
        url = self.url.get_secret_value()
        if url.startswith("sqlite:") and self.host != this_host():
            raise UnsupportedError(
                "this task runs on another host than the driver, and a SQLite file serves only one host; use "
                "PostgreSQL or NATS",
                host=socket.gethostname(),
            )
        return url

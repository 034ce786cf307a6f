"""Reports packages that the web view needs and that are not installed."""

from __future__ import annotations

from synchronizer import UnsupportedError
from synchronizer.extras import install_hint

try:
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
except ImportError as error:
    raise UnsupportedError(
        f"the web view needs starlette and prometheus-client; {install_hint('serve')}", missing=error.name
    ) from error

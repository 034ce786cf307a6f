"""The options of a scaling policy, the policy in words, and the load of a stream that scales by itself."""

from __future__ import annotations

from typing import Annotated

import typer

import readergroup as rg

from .retention import parsed_size
from .screen import say, size
from .session import WrongUsage
from .tables import Table

Segments = Annotated[
    int | None,
    typer.Option(
        help=(
            "Number of segments: the most readers of a group that can share the stream. With --scale-events or "
            "--scale-bytes: the least number. Default: 1."
        ),
        show_default=False,
    ),
]
LeastSegments = Annotated[
    int | None,
    typer.Option(
        "--segments",
        help=(
            "The least number of segments, with --scale-events or --scale-bytes. Default: 1. To split or merge "
            "segments, use 'stream scale'."
        ),
        show_default=False,
    ),
]
ScaleEvents = Annotated[
    float | None,
    typer.Option(
        "--scale-events", metavar="RATE", help="Scale by itself: events per second and segment.", show_default=False
    ),
]
ScaleBytes = Annotated[
    str | None,
    typer.Option(
        "--scale-bytes", metavar="SIZE", help="Scale by itself: bytes per second and segment, such as 1MB.",
        show_default=False,
    ),
]  # fmt: skip
MaxSegments = Annotated[
    int | None,
    typer.Option(help="The most segments of a stream that scales by itself. Default: 16.", show_default=False),
]


def scaling_of(
    segments: int | None, scale_events: float | None, scale_bytes: str | None, max_segments: int | None
) -> rg.ScalingPolicy | None:
    """Return the policy of these options; None without any."""
    if scale_events is None and scale_bytes is None:
        if max_segments is not None:
            raise WrongUsage("--max-segments needs --scale-events or --scale-bytes")
        return None if segments is None else rg.ScalingPolicy.fixed(segments)
    if scale_events is not None and scale_bytes is not None:
        raise WrongUsage("use either --scale-events or --scale-bytes")
    least = 1 if segments is None else segments
    most = max(16, least) if max_segments is None else max_segments
    if scale_events is not None:
        return rg.ScalingPolicy.by_event_rate(scale_events, min_segments=least, max_segments=most)
    assert scale_bytes is not None
    target = parsed_size("--scale-bytes", scale_bytes)
    return rg.ScalingPolicy.by_data_rate(target, min_segments=least, max_segments=most)


def scaling_in_words(policy: rg.ScalingPolicy) -> str:
    load = policy.load
    if load is None:
        return "only 'stream scale' changes the number of segments"
    target = f"{load.target:,g} events" if load.unit == "events" else size(round(load.target))
    return f"{load.min_segments} to {load.max_segments} segments, each for about {target}/s"


def show_scaling(policy: rg.ScalingPolicy, report: rg.ScalingReport) -> None:
    """Print the rates of a stream that scales by itself, and what comes next."""
    say(f"\nScaling: {scaling_in_words(policy)}.")
    windows = [f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s" for seconds in report.windows_seconds]
    rows = [(segment, *(_rate(each, report.unit) for each in rates)) for segment, rates in report.rates.items()]
    say(Table(f"{report.unit}/s over", *windows, numbers=windows, rows=rows))
    what = "nothing"
    if report.action is not None:
        what = f"{report.action} {', '.join(report.segments)}"
    say(f"Next: {what}: {report.reason}")


def _rate(rate: float | None, unit: str) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.1f}" if unit == "events" else size(round(rate))

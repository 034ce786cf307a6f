"""The options of a retention policy, the policy in words, and ``readergroup stream retain``."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Final

import typer

import readergroup as rg

from .screen import print_json, say, size
from .session import WrongUsage

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_BYTES: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

_AGE: Final = "such as 30m, 12h or 7d"
_SIZE: Final = "such as 500MB or 10GiB"

MaxAge = Annotated[
    str | None,
    typer.Option(
        "--retention-max-age", metavar="AGE", help=f"Delete events that are older, {_AGE}.", show_default=False
    ),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--retention-max-bytes", metavar="SIZE", help=f"Delete the oldest events beyond this size, {_SIZE}.",
        show_default=False,
    ),
]  # fmt: skip
MinAge = Annotated[
    str | None,
    typer.Option(
        "--retention-min-age", metavar="AGE", help="Keep consumed events that are younger.", show_default=False
    ),
]
MinBytes = Annotated[
    str | None,
    typer.Option(
        "--retention-min-bytes", metavar="SIZE", help="Keep this much of consumed events.", show_default=False
    ),
]
ConsumedBy = Annotated[
    str | None,
    typer.Option(
        "--retention-consumed-by", metavar="subscribers", help="Delete what all subscribed groups have consumed.",
        show_default=False,
    ),
]  # fmt: skip


def policy_of(
    max_age: str | None, max_bytes: str | None, min_age: str | None, min_bytes: str | None, consumed_by: str | None
) -> rg.RetentionPolicy | None:
    """Return the policy of these options; None without any."""
    if max_age is max_bytes is min_age is min_bytes is consumed_by is None:
        return None
    if consumed_by not in (None, "subscribers"):
        raise WrongUsage(f"--retention-consumed-by takes 'subscribers', not {consumed_by!r}")
    return rg.RetentionPolicy(
        max_age=None if max_age is None else age("--retention-max-age", max_age),
        max_bytes=None if max_bytes is None else parsed_size("--retention-max-bytes", max_bytes),
        min_age=None if min_age is None else age("--retention-min-age", min_age),
        min_bytes=None if min_bytes is None else parsed_size("--retention-min-bytes", min_bytes),
        consumed_by="subscribers" if consumed_by is not None else None,
    )


def age(option: str, text: str) -> timedelta:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)\s*([smhdw])", text.strip().lower(), re.ASCII)
    if found is not None:
        with suppress(OverflowError):
            return timedelta(seconds=float(found[1]) * _SECONDS[found[2]])
    raise WrongUsage(f"{option} takes an age {_AGE}, not {text!r}")


def parsed_size(option: str, text: str) -> int:
    """Return the bytes of a size such as 10GiB."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in _BYTES:
        raise WrongUsage(f"{option} takes a size {_SIZE}, not {text!r}")
    return int(float(found[1]) * _BYTES[found[2]])


def in_words(policy: rg.RetentionPolicy | None) -> str:
    """Return what a policy deletes and keeps, in words."""
    if policy is None:
        return "keeps all events"
    limits = [f"events older than {_days(policy.max_age)}"] if policy.max_age is not None else []
    limits += [f"the oldest events beyond {size(policy.max_bytes)}"] if policy.max_bytes is not None else []
    limits += ["what all subscribed groups have consumed"] if policy.consumed_by is not None else []
    kept = [f"younger than {_days(policy.min_age)}"] if policy.min_age is not None else []
    kept += [f"among the last {size(policy.min_bytes)}"] if policy.min_bytes is not None else []
    return f"deletes {', '.join(limits)}" + (f"; keeps consumed events {' or '.join(kept)}" if kept else "")


def _days(age: timedelta) -> str:
    seconds = age.total_seconds()
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} seconds"


def show_report(report: rg.RetentionReport, *, dry_run: bool) -> None:
    """Print on a line what a policy deleted, or would delete, and which groups that concerns."""
    if report.reason is None:
        done = "nothing to delete"
    else:
        why = {"max_age": "too old", "max_bytes": "beyond the size", "consumed": "consumed"}[report.reason]
        done = f"{'would delete' if dry_run else 'deleted'} {size(report.deleted_bytes)}, {why}"
    say(f"{report.stream}: {done}; {size(report.kept_bytes)} {'would be' if dry_run else 'are'} left")
    if report.skipped:
        say(f"  not consumed by {', '.join(report.skipped)}")
    behind = {group: behind for group, behind in report.unconsumed_bytes.items() if behind}
    if behind and report.policy.consumed_by is not None:
        slowest = max(behind, key=lambda group: behind[group])
        say(f"  kept for subscribed groups: {size(behind[slowest])}, the most for {slowest}")


def retain_all(client: rg.Client, stream: str | None, *, dry_run: bool, as_json: bool) -> None:
    """Apply the policy of a stream, or of all streams that have one."""
    names = client.streams.retention.streams() if stream is None else [stream]
    reports = []
    for name in names:
        try:
            reports.append(client.streams.retain(name, dry_run=dry_run))
        except (rg.NotFoundError, rg.InvalidArgumentError):  # deleted, or without a policy by now
            if stream is not None:
                raise
    if as_json:
        print_json(reports)
        return
    for report in reports:
        show_report(report, dry_run=dry_run)
    if not reports:
        say("No stream has a retention policy.")

"""All findings, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable

from gateway.doctor.finding import Finding, Health

_MARKS = {Health.FINE: "ok", Health.WARNING: "??", Health.BROKEN: "!!"}


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if something must be done."""
    return int(any(finding.health is Health.BROKEN for finding in findings))


def as_text(findings: Iterable[Finding]) -> str:
    """A line each, and one more with what to do."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.health]}  {finding.subject}: {finding.message}")
        if finding.fix:
            lines.append(f"      fix: {finding.fix}")
    return "\n".join(lines)


def as_json(findings: Iterable[Finding]) -> str:
    """`{"healthy": ..., "findings": [{"subject", "health", "message", "fix"}, ...]}`."""
    listed = list(findings)
    healthy = not exit_code(listed)
    return json.dumps({"healthy": healthy, "findings": [one.to_json() for one in listed]})

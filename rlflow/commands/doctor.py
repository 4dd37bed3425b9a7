"""`rlflow doctor [PLAN]`: what may be wrong with this machine and with a Ray cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.doctor.findings import Finding
    from rlflow.plan import Plan

_MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM", "not applicable": "-"}


@click.command()
@click.argument("path", metavar="[PLAN]", type=click.Path(path_type=Path), required=False)
@click.option("--address", help="A Ray cluster to look at too; default: RAY_ADDRESS, else none.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0, max=86_400),
    default=0,
    metavar="SECONDS",
    help="How long the cluster may take to be there and to have what the plan needs.",
)
@click.option("--set", "-D", "overrides", multiple=True, metavar="PATH=VALUE", help="Replace an argument.")
@click.option("--flow", metavar="NAME", help="Which flow, when the file has several.")
@click.option("--cluster", metavar="NAME", help="Which cluster's schedule.")
@click.option("--format", "format_", type=click.Choice(("text", "json")), default="text")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def doctor(
    path: Path | None,
    address: str | None,
    wait: float,
    overrides: tuple[str, ...],
    flow: str | None,
    cluster: str | None,
    format_: str,
    debug: bool,
) -> None:
    """Check this machine, and a Ray cluster, for what runs fail on later. Exit code 1 when there is a problem.

    With a plan (.json) or a .rlflow file: also whether it finds the devices, CPUs and settings that it needs.
    """
    from rlflow.backends.ray_runtime.doctor.environment import ThisMachine
    from rlflow.backends.ray_runtime.doctor.examine import examine
    from rlflow.driver import Options

    options = Options(flow, cluster, overrides)
    if options != Options() and (path is None or path.suffix == ".json"):
        raise click.UsageError("--set, --flow and --cluster apply to a .rlflow file")
    address = address or os.environ.get("RAY_ADDRESS", "")
    if wait and not address:
        raise click.UsageError("--wait waits for a cluster: give its --address")
    plan = None if path is None else _plan(path, options)
    findings = examine(ThisMachine(), plan, address, wait)
    if format_ == "json":
        click.echo(json.dumps([_as_json(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(lines(findings)))
    if any(finding.status == "problem" for finding in findings):
        raise SystemExit(1)


def _plan(path: Path, options: object) -> Plan:
    from rlflow import driver

    assert isinstance(options, driver.Options)
    return driver.load_plan(path) if path.suffix == ".json" else driver.compile(path, options)


def _as_json(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "status": finding.status.value,
        "found": finding.found,
        "wanted": finding.wanted,
        "fix": finding.fix,
    }


def lines(findings: list[Finding]) -> list[str]:
    """A line for every check; what is wanted and the fix below those that are not well."""
    width = max(len(finding.check) for finding in findings)
    shown = []
    for finding in findings:
        shown.append(f"{_MARKS[finding.status]:<8} {finding.check:<{width}}  {finding.found}")
        if finding.status in ("warning", "problem"):
            indent = " " * (width + 11)
            shown += [
                f"{indent}{label}: {text}" for label, text in (("wanted", finding.wanted), ("fix", finding.fix)) if text
            ]
    counts = {status: sum(finding.status == status for finding in findings) for status in _MARKS}
    shown.append("")
    shown.append(
        f"{len(findings)} checks: {counts['ok']} ok, {counts['warning']} warnings, {counts['problem']} problems, "
        f"{counts['not applicable']} not applicable"
    )
    return shown

"""`rlflow explain CODE`: the page of a diagnostic. `rlflow explain PLAN`: the decisions of a plan."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rlflow.diagnostics import CODES, did_you_mean
from rlflow.diagnostics.codes import WARNINGS, find_code, page_path, page_text

_AREAS = {
    "0": "syntax and comments",
    "1": "names and types",
    "2": "placement, memory, resources",
    "3": "staleness, versions, schedule",
    "4": "plan and backend capability",
    "5": "while running",
    "6": "import and export",
    "9": "internal",
}


@click.command()
@click.argument("code", metavar="[CODE|PLAN]", required=False)
@click.option(
    "--profile",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Of a .rlflow file: estimate from what `rlflow profile` measured.",
)
def explain(code: str | None, profile: Path | None) -> None:
    """Say what a code such as RLF1003 means, with an example and the fix. Without CODE: list them all.

    With a plan (.json) or a .rlflow file instead of a code: every decision in it, what came next, and why that lost.
    """
    if profile is not None and not (code or "").endswith(".rlflow"):
        raise click.UsageError("--profile applies to a .rlflow file")
    if code is None:
        click.echo(_listing())
        return
    if code.endswith((".json", ".rlflow")):
        _explain_plan(Path(code), profile)
        return
    found = find_code(code)
    if found is None:
        guess = did_you_mean(code.lower(), [*(known.lower() for known in CODES), *CODES.values()])
        shown = guess.upper() if guess and guess.startswith("rlf") else guess
        hint = f"did you mean `{shown}`?" if shown else "`rlflow explain` lists all codes"
        raise click.UsageError(f"unknown code `{code}`; {hint}")
    page = page_text(found)
    if not page:
        raise click.ClickException(f"this installation has no page for {found}: `{page_path(found)}` is missing")
    if not sys.stdout.isatty():
        click.echo(page, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(highlight=False).print(Markdown(page))


def _explain_plan(path: Path, profile: Path | None) -> None:
    from rlflow import driver
    from rlflow.backends.visualizers.decisions import explain_plan

    options = driver.Options(profile=profile)
    plan = driver.load_plan(path) if path.suffix == ".json" else driver.compile(path, options)
    click.echo(explain_plan(plan), nl=False)


def _listing() -> str:
    lines: list[str] = []
    area = ""
    for code, name in CODES.items():
        if code[3] != area:
            area = code[3]
            lines += ["", _AREAS[area]]
        lines.append(f"  {code}  {name}{'  (warning)' if code in WARNINGS else ''}")
    return "\n".join([*lines[1:], "", "rlflow explain CODE shows a code's page."])

"""`rlflow diff A B`: what two plans decide differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlflow.plan import Plan
    from rlflow.plan_diff import Change

_FILE = click.Path(path_type=Path)
_MARKS = {"added": "+", "removed": "-", "changed": "~", "moved": "~"}
_MOST_TEXT = 100
"""Characters of one value."""


@click.command()
@click.argument("before", metavar="A", type=_FILE)
@click.argument("after", metavar="B", type=_FILE)
@click.option("--format", "format_", type=click.Choice(("text", "json")), default="text")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when they differ.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def diff(before: Path, after: Path, format_: str, exit_code: bool, debug: bool) -> None:
    """Say what two plans decide differently. A and B are plans (.json) or .rlflow files, which are compiled."""
    from rlflow.plan_diff import plan_changes

    changes = plan_changes(_plan(before), _plan(after))
    if format_ == "json":
        click.echo(json.dumps([_as_json(change) for change in changes], indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(changes)) if changes else f"`{before}` and `{after}` decide the same")
    if exit_code and changes:
        raise SystemExit(1)


def _plan(path: Path) -> Plan:
    from rlflow import driver

    return driver.load_plan(path) if path.suffix == ".json" else driver.compile(path)


def _as_json(change: Change) -> dict[str, Any]:
    return {"path": change.path, "kind": change.kind, "before": change.before, "after": change.after}


def _lines(changes: list[Change]) -> list[str]:
    """Grouped by the plan's part, one line a change."""
    lines: list[str] = []
    section = ""
    for change in changes:
        if change.section != section:
            section = change.section
            lines.append(section)
        where = change.path.removeprefix(section).removeprefix(".") or section
        if change.kind == "added":
            text = f"{where}: {_text(change.after)}"
        elif change.kind == "removed":
            text = f"{where}: {_text(change.before)}"
        elif change.kind == "moved":
            text = f"{where}: order {' '.join(change.before)} -> {' '.join(change.after)}"
        else:
            text = f"{where}: {_text(change.before)} -> {_text(change.after)}"
        lines.append(f"  {_MARKS[change.kind]} {text}")
    return lines


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."

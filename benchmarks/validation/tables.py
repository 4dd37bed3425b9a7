"""Markdown tables and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def seconds(value: float | None) -> str:
    """Three or four digits, empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """An error with its sign, empty for None."""
    if value is None:
        return ""
    text = f"{100 * value:+.0f} %"
    return "0 %" if text in ("+0 %", "-0 %") else text


def share(value: float | None) -> str:
    """A size of an error, without a sign."""
    return "" if value is None else f"{100 * abs(value):.1f} %"

"""Published runs, one row of published_runs.csv each. README.md says what the columns mean and where they come from."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STAGES = ("rollout", "old_logprob", "ref_logprob", "update", "reward", "advantage", "reshard", "offload")
"""Columns `STAGE_s` that add up to a synchronous step."""
FILE = Path(__file__).with_name("published_runs.csv")


@dataclass(frozen=True, slots=True)
class Run:
    """One row; `text` has its columns as they are written."""

    text: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.text["id"]

    @property
    def source(self) -> str:
        """The letter of the source, which is the system that ran."""
        return self.id[0]

    @property
    def grade(self) -> str:
        return self.text["grade"]

    def number(self, column: str) -> float | None:
        """A column as a number; None where it is not published."""
        text = self.text[column]
        return float(text) if text else None

    def count(self, column: str) -> int | None:
        value = self.number(column)
        return None if value is None else int(value)

    def size(self, column: str, name: str) -> int | None:
        """The size behind a name in a layout: 4 for `tp` in "tp4 pp8"."""
        found = re.search(rf"\b{name}(\d+)\b", self.text[column])
        return int(found[1]) if found else None

    def said(self, column: str, pattern: str) -> int | None:
        """The number that a pattern's first group catches in a column."""
        found = re.search(pattern, self.text[column])
        return int(found[1]) if found else None

    @property
    def published(self) -> dict[str, float]:
        """Stage to its published seconds, without those that the source removed (0)."""
        found = {stage: self.number(f"{stage}_s") for stage in STAGES}
        return {stage: seconds for stage, seconds in found.items() if seconds}

    @property
    def is_synchronous(self) -> bool:
        return self.text["mode"] == "synchronous"


@cache
def runs(file: Path = FILE) -> tuple[Run, ...]:
    with file.open(encoding="utf-8", newline="") as lines:
        return tuple(Run(row) for row in csv.DictReader(lines))


def run(name: str) -> Run:
    """The row with this id. KeyError for an unknown one."""
    return {each.id: each for each in runs()}[name]

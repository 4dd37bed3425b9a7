"""The table of diagnostic codes and the sources agree."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from rlflow.diagnostics import CODES

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "rlflow" / "diagnostics" / "codes.py"

NOT_RAISED_YET: dict[str, str] = {}
"""Codes of the table that no source uses, each with the reason why it is kept."""


@cache
def codes_in_sources() -> dict[str, str]:
    """Every code written in the sources, with one file that has it."""
    found: dict[str, str] = {}
    for folder in ("rlflow", "grammar", "passes", "backends"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file != TABLE:
                for code in re.findall(r"\bRLF\d{4}\b", file.read_text("utf-8")):
                    found.setdefault(code, str(file.relative_to(ROOT)))
    return found


def test_sources_use_only_codes_of_the_table() -> None:
    assert {code: file for code, file in codes_in_sources().items() if code not in CODES} == {}


@pytest.mark.parametrize("code", sorted(CODES))
def test_code_is_used(code: str) -> None:
    used = code in codes_in_sources()
    assert used or code in NOT_RAISED_YET, "no source uses it: use it, take it out, or give the reason in this file"
    assert not (used and code in NOT_RAISED_YET), "it is used now: take it off the list"


def test_codes_and_slugs_are_well_formed() -> None:
    assert all(re.fullmatch(r"RLF\d{4}", code) for code in CODES)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", slug) for slug in CODES.values())
    assert len(set(CODES.values())) == len(CODES)
    assert list(CODES) == sorted(CODES)

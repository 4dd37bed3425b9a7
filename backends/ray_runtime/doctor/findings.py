"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Finding:
    """`check`: its name. `found` and `wanted`: in words, with units. `fix`: what to do; empty when all is well."""

    check: str
    status: Status
    found: str
    wanted: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Found:
    """What a check returns; the runner adds its name."""

    status: Status
    found: str
    wanted: str = ""
    fix: str = ""


def ok(found: str, wanted: str = "") -> Found:
    return Found(Status.OK, found, wanted)


def warning(found: str, wanted: str, fix: str) -> Found:
    return Found(Status.WARNING, found, wanted, fix)


def problem(found: str, wanted: str, fix: str) -> Found:
    return Found(Status.PROBLEM, found, wanted, fix)


def not_applicable(why: str) -> Found:
    return Found(Status.NOT_APPLICABLE, why)

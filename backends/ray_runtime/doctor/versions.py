"""Version ranges as packages declare them (PEP 440): as much of them as rlflow's own declarations use."""

from __future__ import annotations

import re

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(\[[^\]]*\])?\s*(?P<range>[^;]*)(;(?P<marker>.*))?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|~=|<|>)\s*([0-9][0-9A-Za-z.*+-]*)")


def release(version: str) -> tuple[int, ...]:
    """The numbers of `2.13.0+cpu` or `3.0rc1`, without zeros at the end."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in found[1].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_within(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as `>=2.56,<3`; ValueError for a clause that is none."""
    have = release(version)
    for clause in filter(None, (part.strip() for part in wanted.strip("() ").split(","))):
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise ValueError(f"not a version range: {clause}")
        sign, bound = found[1], release(found[2])
        held = {
            ">=": have >= bound,
            "<=": have <= bound,
            "==": have == bound or (found[2].endswith("*") and have[: len(bound)] == bound),
            "!=": have != bound,
            "~=": have >= bound and have[: len(bound) - 1] == bound[:-1],
            "<": have < bound,
            ">": have > bound,
        }[sign]
        if not held:
            return False
    return True


def declared(requirements: tuple[str, ...], extras: tuple[str, ...]) -> dict[str, str]:
    """Package to range, of what is always needed and what the extras need."""
    found = {}
    for requirement in requirements:
        parts = _REQUIREMENT.fullmatch(requirement.strip())
        if parts is None:
            continue
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", parts["marker"] or "")
        if extra is None or extra[1] in extras:
            found[parts["name"]] = parts["range"].strip("() ")
    return found

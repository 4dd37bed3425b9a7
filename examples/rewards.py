"""Reward functions of the examples. A function gets what its parameters are called; see docs on `python(...)`."""

from __future__ import annotations

import re


def exact_match(response: str, answer: str) -> float:
    """1 when the response is the answer and nothing else (white space around it aside), else 0."""
    return float(response.strip() == str(answer).strip())


def first_number(response: str, answer: str) -> float:
    """1 when the first whole number in the response is the answer, else 0. For models that talk around it."""
    found = re.search(r"-?\d+", response)
    return float(found is not None and int(found.group()) == int(answer))


def last_number(response: str, answer: str) -> float:
    """1 when the last whole number in the response is the answer, else 0. For models that reason before it."""
    found = re.findall(r"-?\d+", response)
    return float(bool(found) and int(found[-1]) == int(answer))


def correct_digits(response: str, answer: str) -> dict[str, float | bool]:
    """The part of the answer's characters that stand at their place; a longer response loses as much as it is longer.

    Partial credit lets a model that starts from random weights find the way. `exact` is logged beside the score.
    """
    given, wanted = response.strip(), str(answer).strip()
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return {"score": right / max(len(given), len(wanted), 1), "exact": given == wanted}

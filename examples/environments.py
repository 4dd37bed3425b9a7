"""Environments of the examples, and the rewards that go with them.

An environment is a class; one instance is made for every sample. `step` gets the text of the model's turn and returns
what the model reads next, or None when the conversation is over.
"""

from __future__ import annotations

import re
from typing import Any

_TASK = re.compile(r"(\d{1,6})([+*%-])(\d{1,6})")


class Calculator:
    """Calculates for a model that asks: `12+7?` is answered with `19;`. It knows `+`, `-`, `*` and `%` (remainder).

    A bare `?` asks for the result of the question itself. A turn without a question mark at its end is the model's
    answer and ends the conversation. What cannot be calculated is answered with `;` alone.
    """

    def reset(self, record: dict[str, Any]) -> None:
        self._question = str(record["prompt"])

    def step(self, text: str) -> str | None:
        if not text.endswith("?"):
            return None
        return f"{self._result(text[:-1] or self._question.rstrip('='))};"

    def _result(self, expression: str) -> str:
        found = _TASK.fullmatch(expression)
        if found is None:
            return ""
        a, b = int(found[1]), int(found[3])
        if found[2] == "%":
            return str(a % b) if b else ""
        return str(a + b if found[2] == "+" else a - b if found[2] == "-" else a * b)


def answer_after_tool(response: str, answer: str) -> dict[str, float | bool]:
    """0.2 when the calculator said the answer, and 0.8 times the part of the answer's characters that are right.

    The answer is what follows the calculator's last `;`, or everything without one: a model that knows the result need
    not ask. `exact` and `asked` are logged beside the score. The 0.2 is for a right result only: a model soon writes
    `?4;` by itself, which looks like the calculator's answer.
    """
    wanted = str(answer).strip()
    asked = f"?{wanted};" in response
    given = response.rpartition(";")[2]
    right = sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted), 1)
    return {"score": 0.2 * asked + 0.8 * right, "exact": given == wanted, "asked": asked}


def exact_after_tool(response: str, answer: str) -> float:
    """1 when what follows the calculator's last `;` (or everything without one) is the answer, else 0."""
    return float(response.rpartition(";")[2] == str(answer).strip())

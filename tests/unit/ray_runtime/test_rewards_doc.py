"""The functions in docs/rewards.md do what the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.backends.ray_runtime.rewards import Sample, load_reward, score_rows
from rlflow.ir.ops import PythonReward

DOCS = Path(__file__).parents[3] / "docs"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", (DOCS / "rewards.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("function", "responses", "expected"),
    [
        ("exact", ["2 ", "3"], [1.0, 0.0]),
        ("compute_score", ["it is 2", "3"], [1.0, 0.0]),
        ("by_all", ["2", "3"], [1.0, 0.0]),
        ("areal", ["it is 2", "3"], [1.0, 0.0]),
    ],
)
def test_the_signatures_of_the_page(tmp_path: Path, function: str, responses: list[str], expected: Any) -> None:
    (tmp_path / "page.py").write_text(SNIPPETS[0])
    rows = [Sample(0, i, {"prompt": "1+1=", "answer": "2"}, text) for i, text in enumerate(responses)]
    scores, extras = score_rows(load_reward(PythonReward(function=f"page:{function}"), tmp_path, {}), rows, 0, 5.0)
    assert scores.tolist() == expected
    assert extras == ({"short": [True, True]} if function == "compute_score" else {})


def test_none_does_not_apply(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(SNIPPETS[0])
    rows = [Sample(0, 0, {"prompt": "1+1=", "answer": None}, "2")]
    scores, extras = score_rows(load_reward(PythonReward(function="page:by_all"), tmp_path, {}), rows, 0, 5.0)
    assert np.isnan(scores).all()
    assert extras == {"reward_na": [True]}


def test_the_other_snippets_are_python() -> None:
    assert len(SNIPPETS) == 2
    ast.parse(SNIPPETS[1])

"""Typed programs: each is checked or gets diagnostics, prints, and parses back to the same tree; and many are sound."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from fuzz_answer import answer, workplace
from fuzz_mutations import written
from fuzz_typed import typed_program
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.grammar import nodes


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rlflow_strategies_of_fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made = _load(Path(__file__).parents[1] / "strategies.py")
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workplace(tmp_path_factory.mktemp("typed"))


def test_typed_programs_are_answered_and_a_good_share_is_sound(place: Path) -> None:
    """Without this share the other tests would only look at the first error of a program."""
    found: Counter[str] = Counter()
    for seed in range(120):
        found.update(answer(place, written(typed_program(random.Random(seed))).encode()).split())
    assert found["sound"] >= 30, found
    assert len(found) >= 6, f"the programs meet too few of the checks: {found}"


@relaxed
@given(st.integers(0, 2**32), st.lists(made.expressions, min_size=1, max_size=4), st.sampled_from([0.03, 0.1, 0.5]))
def test_odd_expressions_in_typed_programs(place: Path, seed: int, odd: list[nodes.Expr], share: float) -> None:
    answer(place, written(typed_program(random.Random(seed), odd, share)).encode())


@relaxed
@given(made.programs)
def test_any_tree_is_answered(place: Path, tree: nodes.Program) -> None:
    answer(place, written(tree).encode())

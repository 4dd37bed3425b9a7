"""The plan that the visualizers' tests draw."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlflow.plan import Plan


@pytest.fixture
def plan() -> Plan:
    """`grpo_plan()` of the file beside this one, loaded by path: under importlib mode test folders are no packages."""
    spec = importlib.util.spec_from_file_location("visualizer_plans", Path(__file__).with_name("plans.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Plan = module.grpo_plan()
    return made

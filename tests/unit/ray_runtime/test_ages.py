"""The age of samples is checked where they are trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.streams.ages import check_ages
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan
from tests.unit.ray_runtime.test_accepted import stale


def samples(*versions: int) -> Batch:
    return Batch(len(versions), {"version": np.array(versions), "uid": np.arange(len(versions)) + 30})


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return stale(tmp_path, trigger="trigger s at 75%, carry partial")


def test_a_sample_older_than_promised_stops_the_run(plan: Plan) -> None:
    check_ages(plan, "m", samples(8, 6, 7), step=9, rank=0)
    with pytest.raises(RunFailure) as caught:
        check_ages(plan, "m", samples(8, 5, 7), step=9, rank=1)
    assert caught.value.code == "RLF5040"
    assert caught.value.message == (
        "step 9 would train on a sample of `s` that is 3 steps old, and the plan promises at most 2"
    )
    assert caught.value.notes[0].startswith("prompt 31, on rank 1: its oldest token is of version 5")


def test_what_has_no_bound_or_no_version_is_not_checked(tmp_path: Path, plan: Plan) -> None:
    check_ages(stale(tmp_path, "1 step, admit count"), "m", samples(0), step=99, rank=0)
    check_ages(plan, "another", samples(0), step=99, rank=0)
    check_ages(plan, "m", Batch(0, {}), step=99, rank=0)

"""The calibration: at most eight fitted numbers a family, each with evidence, within its range."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rlflow.cost.errors import CostError, UnknownFactError
from rlflow.cost.knobs import FAMILIES, Knobs, calibration, evidence


def test_at_most_eight():
    assert len(fields(Knobs)) <= 8


@pytest.mark.parametrize("family", sorted(set(FAMILIES.values())))
def test_values_are_in_their_ranges_and_have_evidence(family):
    found, knobs = evidence(family), calibration(family).knobs
    assert set(found) == {field.name for field in fields(Knobs)}
    for name, entry in found.items():
        assert entry.low <= entry.value <= entry.high
        assert getattr(knobs, name) == entry.value
        assert len(entry.text) > 10


def test_override():
    tuned = calibration("nvidia").override(train_dense=0.5)
    assert tuned.knobs.train_dense == 0.5
    assert tuned.knobs.train_moe == calibration("nvidia").knobs.train_moe
    assert calibration("nvidia").knobs.train_dense != 0.5


@pytest.mark.parametrize(
    "bad", [{"train": 0.5}, {"train_dense": 0.0}, {"host_step_s": -1.0}, {"decode_memory": float("nan")}]
)
def test_impossible_overrides(bad):
    with pytest.raises(CostError):
        calibration("nvidia").override(**bad)


def test_unknown_family():
    with pytest.raises(UnknownFactError, match="tpu"):
        calibration("tpu")

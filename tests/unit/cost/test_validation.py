"""The cost model against published runs: the page is that of the code, the fit is that of the rows, the aims hold."""

from __future__ import annotations

import pytest
from scipy.stats import spearmanr

from benchmarks.validation import folds
from benchmarks.validation.fit import PRIORS, evidence, fit
from benchmarks.validation.measures import ordered_pairs, rank_correlation
from benchmarks.validation.observe import Observation
from benchmarks.validation.predict import predict
from benchmarks.validation.report import DOC, report
from benchmarks.validation.results import compositions, medians, shipped, wholes
from benchmarks.validation.runs import Run, run, runs
from rlflow.cost.knobs import calibration


def test_page_is_up_to_date():
    """Otherwise: `make validation`."""
    assert DOC.read_text("utf-8") == report()


def test_every_row_is_on_the_page():
    text = DOC.read_text("utf-8")
    assert all(f"| {each.id} | {each.grade} |" in text for each in runs())


@pytest.mark.parametrize("family", sorted(PRIORS))
def test_shipped_knobs_are_the_fit_of_all_rows(family):
    """Fitted again, within what rounding and another scipy may change."""
    assert folds.stale() == []
    again = fit(family, evidence(family))
    assert again == pytest.approx(folds.read()[family][folds.ALL], rel=0.02)


def test_fit_uses_no_odd_and_no_rank_only_rows():
    used = [each for family in PRIORS for each in evidence(family)]
    assert {each.grade for each in used} == {"A", "B"}
    assert all(each.source != "N" for each in evidence("nvidia", without="N"))


def test_fit_finds_the_knobs_that_made_its_rows():
    """Steps of N as other knobs predict them: the fit meets them, and finds the knob that decides some of them alone.
    (Weights read more slowly and more host work in a layer look alike in whole steps.)"""
    true = {"decode_memory": 0.5, "sync_bandwidth": 0.25, "train_moe": 0.3}
    made = calibration("nvidia").override(**true)
    steps = {name: predict(run(name), made).step for name in ("N1", "N4", "N5", "N7", "N11", "N17")}
    rows = [Run({**run(name).text, "step_s": repr(step)}) for name, step in steps.items()]
    found = fit("nvidia", rows)
    assert found["sync_bandwidth"] == pytest.approx(0.25, rel=0.1)
    assert found["decode_memory"] < PRIORS["nvidia"]["decode_memory"][0]
    fitted = calibration("nvidia").override(**found)
    assert {name: predict(run(name), fitted).step for name in steps} == pytest.approx(steps, rel=0.08)


def test_without_rows_the_centres_are_left():
    for family, priors in PRIORS.items():
        assert fit(family, ()) == pytest.approx({name: centre for name, (centre, _) in priors.items()}, rel=1e-3)


def test_aims():
    """What is aimed at, and for left-out sources, where 15 % is the aim, what must not get worse."""
    found = medians()
    assert found["megatron"] <= 0.10
    assert found["composition"] <= 0.05
    assert found["composition_left_out"] <= 0.05
    assert found["steps"] <= 0.12
    assert found["steps_left_out"] <= 0.17
    assert max(abs(each.error) for each in compositions()) <= 0.08
    pairs = [(each.predicted, each.published) for each in wholes(shipped())]
    assert rank_correlation(pairs) >= 0.95


@pytest.mark.parametrize(
    "pairs",
    [
        [(1.0, 2.0), (2.0, 1.0), (3.0, 5.0), (4.0, 4.0)],
        [(1.0, 1.0), (1.0, 2.0), (2.0, 2.0), (5.0, 0.5), (3.0, 9.0)],
    ],
)
def test_rank_correlation_is_spearmans(pairs):
    assert rank_correlation(pairs) == pytest.approx(spearmanr([a for a, _ in pairs], [b for _, b in pairs]).statistic)


def test_rank_correlation_of_too_little():
    assert rank_correlation([(1.0, 2.0), (2.0, 3.0)]) is None
    assert rank_correlation([(1.0, 2.0)] * 4) is None


def test_pairs_of_one_workload():
    """N1, N2 and N10 share a workload, N7 does not; within 5 % there is no order."""
    times = {"N1": (10.0, 20.0), "N2": (5.0, 10.0), "N10": (7.0, 9.0), "N7": (1.0, 99.0), "N11": (1.0, 20.5)}
    found = [Observation(run(name), "step", ours, theirs) for name, (ours, theirs) in times.items()]
    assert ordered_pairs(found[:4]) == (2, 3)
    assert ordered_pairs(found) == (2, 5)

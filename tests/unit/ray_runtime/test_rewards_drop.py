"""Samples that cannot be scored: dropped and counted where the flow says so, and never a silent zero."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.rewards import Sample, Scores, load_reward, score_rows
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import PythonReward

MODULE = """
import re, time
def maybe(response): return None if response == "?" else {"score": float(len(response)), "kept": True}
def nan(response): return float("nan")
def picky(response):
    if response == "bad": raise ValueError("cannot read it")
    return 1.0
def hangs(response):
    if response == "bad": time.sleep(30)
    return 1.0
def spins(response):
    while response == "bad": pass
    return 1.0
def backtracks(response):
    return float(re.match(r"(a+)+$", "a" * 64 + "b") is not None) if response == "bad" else 1.0
CALLS = []
def groups(prompts, completions):
    CALLS.append(len(completions))
    if "bad" in completions: raise ValueError("not this group")
    return [None if c == "?" else 1.0 for c in completions]
def group_backtracks(prompts, completions):
    if "bad" in completions: re.match(r"(a+)+$", "a" * 64 + "b")
    return [1.0] * len(completions)
def sleeps(response): time.sleep(0.25); return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flow")
    (path / "scoring.py").write_text(MODULE)
    return path


def score(folder: Path, function: str, *texts: str, timeout: float = 0.3, **options: Any) -> Scores:
    source = PythonReward(function=f"scoring:{function}", **options)
    rows = [Sample(i // 2, i % 2, {"prompt": "p", "answer": None}, text) for i, text in enumerate(texts)]
    return score_rows(load_reward(source, folder, {}), rows, source.retries, timeout, source.on_error)


def values(scores: Scores) -> list[float | None]:
    return [None if np.isnan(value) else value for value in scores[0].tolist()]


# --- not applicable (K5) ------------------------------------------------------------------------------------------


def test_none_is_not_applicable_and_counted(folder: Path) -> None:
    scores = score(folder, "maybe", "a", "?", "abc")
    assert scores[0].dtype == np.float32
    assert values(scores) == [1.0, None, 3.0]
    assert scores[1] == {"kept": [True, None, True], "reward_na": [False, True, False]}
    assert score(folder, "maybe", "a")[1] == {"kept": [True]}


def test_a_nan_that_was_computed_is_an_error_under_every_rule(folder: Path) -> None:
    for rule in ("fail", "drop"):
        with pytest.raises(RunFailure) as caught:
            score(folder, "nan", "a", on_error=rule)
        assert caught.value.code == "RLF5005"


# --- drop (T19) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "code"), [("picky", "RLF5003"), ("hangs", "RLF5004")])
def test_one_of_many_is_dropped_and_all_of_them_stop_the_run(folder: Path, function: str, code: str) -> None:
    scores = score(folder, function, "a", "bad", *["b"] * 62, on_error="drop")
    assert values(scores) == [1.0, None, *[1.0] * 62]
    assert sum(scores[1]["reward_dropped"]) == 1
    assert "reward `scoring:" in scores[1]["reward_error"][1]
    assert scores[1]["reward_error"][0] is None
    assert "reward_na" not in scores[1]
    with pytest.raises(RunFailure) as caught:
        score(folder, function, "bad", "bad", on_error="drop")
    assert caught.value.code == code
    assert caught.value.notes[-1] == "none of the 2 samples of this step could be scored"
    with pytest.raises(RunFailure):
        score(folder, function, "a", "bad", "b")


def test_a_batched_function_loses_only_the_group_that_fails(folder: Path) -> None:
    scores = score(folder, "groups", "a", "b", "c", "bad", "?", "f", on_error="drop")
    assert values(scores) == [1.0, 1.0, None, None, None, 1.0]
    assert scores[1]["reward_dropped"] == [False, False, True, True, False, False]
    assert scores[1]["reward_na"] == [False, False, False, False, True, False]


def test_drop_comes_after_the_retries(folder: Path) -> None:
    source = PythonReward(function="scoring:groups", retries=2, on_error="drop")
    function = load_reward(source, folder, {})
    calls = function.function.__globals__["CALLS"]
    rows = [Sample(0, i, {"prompt": "p", "answer": None}, text) for i, text in enumerate(("bad", "b"))]
    with pytest.raises(RunFailure):
        score_rows(function, rows, source.retries, 1.0, source.on_error)
    assert calls == [2, 2, 2]


# --- worker processes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_running() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if started:
        ray.shutdown()


def samples(*texts: str) -> Batch:
    rows = np.arange(len(texts))
    records = [{"prompt": "p", "answer": None}] * len(texts)
    return Batch(len(texts), {"uid": rows // 2, "sample": rows % 2, "record": records, "text": list(texts)})


def pool(folder: Path, function: str, workers: int, **options: Any) -> Any:
    from rlflow.backends.ray_runtime.reward_worker import RewardPool

    return RewardPool("mine", PythonReward(function=f"scoring:{function}", **options), folder, {}, workers=workers)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_running")
class TestPool:
    @pytest.mark.parametrize(
        ("function", "dropped"),
        [
            *[(name, [2]) for name in ("picky", "hangs", "spins", "backtracks")],
            *[(name, [2, 3]) for name in ("groups", "group_backtracks")],
        ],
    )
    def test_the_rest_is_scored_and_the_pool_goes_on(self, folder: Path, function: str, dropped: list[int]) -> None:
        scoring = pool(folder, function, 2, timeout_us=500_000, on_error="drop")
        scores = scoring.collect(scoring.start(samples("a", "b", "bad", "d", "e", "f", "g", "h")))
        assert [i for i, value in enumerate(values(scores)) if value is None] == dropped
        assert [i for i, mark in enumerate(scores[1]["reward_dropped"]) if mark] == dropped
        assert values(scoring.collect(scoring.start(samples("a", "b", "c", "d")))) == [1.0] * 4
        scoring.close()

    @pytest.mark.parametrize(("function", "code"), [("picky", "RLF5003"), ("hangs", "RLF5004"), ("nan", "RLF5005")])
    def test_when_every_sample_fails_the_run_stops(self, folder: Path, function: str, code: str) -> None:
        scoring = pool(folder, function, 2, timeout_us=300_000, on_error="drop")
        with pytest.raises(RunFailure) as caught:
            scoring.collect(scoring.start(samples("bad", "bad", "bad", "bad")))
        assert caught.value.code == code

    def test_one_workers_samples_may_all_fail(self, folder: Path) -> None:
        scoring = pool(folder, "picky", 2, on_error="drop")
        scores = scoring.collect(scoring.start(samples("bad", "bad", "a", "b")))
        assert values(scores) == [None, None, 1.0, 1.0]
        scoring.close()

    def test_four_workers_are_at_least_twice_as_fast_as_one(self, folder: Path) -> None:
        """K3; the calls sleep, so that it does not matter how many cores there are."""
        seconds = {}
        for workers in (1, 4):
            scoring = pool(folder, "sleeps", workers)
            scoring.collect(scoring.start(samples(*"abcd")))  # every process has run before
            began = time.monotonic()
            scoring.collect(scoring.start(samples(*"abcdefghijklmnop")))
            seconds[workers] = time.monotonic() - began
            scoring.close()
        assert seconds[1] >= 4.0
        assert seconds[4] <= seconds[1] / 2

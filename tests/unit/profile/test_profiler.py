"""From the events of a run to a profile, and from the profile back to the step that was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.diagnostics import RunFailure
from rlflow.ir.flow import Flow
from rlflow.profiler import profile_of

FLOW = """
flow sums {
  data  d = reasoning_gym("chain_sum", size = 64)
  model m = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1)
  reward e = scorer(d)
  step {
    b = d.take(4 prompts)
    s = m.generate(b, n = 8, max_new = 10 tokens)
    w = e(s)
    a = group_normalize(w)
    m.train(s, advantages = a, loss = ppo_clip(), optimizer = adamw(lr = 1e-3))
  }
  evaluate held every 2 steps {
    t = d.all()
    g = m.generate(t, max_new = 10 tokens, temperature = 0)
    c = e(g)
  }
}
"""
FACTS = {"versions": {"rlflow": "0", "torch": "2"}, "seed": 3}
US = {"take:b": 100, "run:s": 4000, "run:w": 200, "wait:w": 1500, "run:a": 50, "run:m.train": 8000, "publish:m": 20}
TOKENS = {"take:b": 24, "run:s": 352, "run:m.train": 352}
STEP_US = sum(US.values())


def run(factors: list[float]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Events and metrics of a run whose steps take `factors` times US, one instruction after the other."""
    events: list[dict[str, Any]] = []
    metrics: list[dict[str, Any]] = []
    clock = 0
    for step, by in enumerate(factors, start=1):
        begun: dict[str, int] = {}
        for instruction, us in US.items():
            kind, _, stage = instruction.partition(":")
            begun[instruction] = clock
            base = {"pool": "main", "rank": 0, "step": step, "kind": kind, "instruction": instruction}
            base |= {"stage": "" if kind == "publish" else stage, "start_us": clock, "duration_us": round(us * by)}
            if instruction in TOKENS:
                base["tokens"] = TOKENS[instruction]
            events.append(base)
            clock += round(us * by)
        start, end = begun["run:w"], begun["run:a"]
        events.append(
            {
                "pool": "cpu", "rank": 0, "step": step, "kind": "call", "instruction": "call:w", "stage": "w",
                "start_us": start, "duration_us": end - start, "result_us": end - start,
            }
        )  # fmt: skip
        metrics.append({"step": step, "data": {"timing_s/step": STEP_US * by / 1e6}})
    return events, metrics


@pytest.fixture
def flow_file(tmp_path: Path) -> Path:
    file = tmp_path / "sums.rlflow"
    file.write_text(FLOW, "utf-8")
    return file


@pytest.fixture
def flow(flow_file: Path) -> Flow:
    return driver.check(flow_file).flow


def test_medians_after_the_warm_up(flow: Flow) -> None:
    """Steps of 9, 9, 1, 2, 3, 4, 5 times the numbers: the median of the last five is 3 times."""
    events, metrics = run([9, 9, 1, 2, 3, 4, 5])
    found = profile_of(flow, "local", events, metrics, FACTS)
    assert (found.step_us, found.step_low_us, found.step_high_us) == (3 * STEP_US, 2 * STEP_US, 4 * STEP_US)
    assert (found.steps, found.warm_up, found.seed) == (7, 2, 3)
    samples = found.find("s")
    assert samples is not None
    assert (samples.us, samples.low_us, samples.high_us, samples.steps) == (12_000, 8000, 16_000, 5)
    assert (samples.rows, samples.tokens, samples.prompt_tokens, samples.max_new) == (32, 352.0, 6.0, 10)
    score = found.find("w")
    assert score is not None
    assert (score.us, score.call_us) == (3 * 1500, 3 * 200)
    train = found.find("m.train")
    assert train is not None
    assert (train.us, train.publish_us) == (24_000, 60)


def test_a_profile_gives_back_the_step_that_was_measured(flow: Flow, flow_file: Path) -> None:
    events, metrics = run([7, 3, 1, 1, 1])
    file = flow_file.with_name("profile.json")
    file.write_text(profile_of(flow, "local", events, metrics, FACTS).to_json(), "utf-8")
    cadence = driver.compile(flow_file, driver.Options(profile=file)).cadence
    assert cadence is not None
    assert cadence.us == STEP_US


def test_an_evaluation_that_ran_once_counts(flow: Flow) -> None:
    events, metrics = run([1, 1, 1])
    base = {"pool": "main", "rank": 0, "kind": "run", "instruction": "run:held.g", "stage": "held.g", "tokens": 5}
    early = base | {"step": 0, "start_us": 0, "duration_us": 70}
    late = base | {"step": 3, "start_us": 10**9, "duration_us": 40}
    once = profile_of(flow, "local", [early, *events], metrics, FACTS).find("held.g")
    assert once is not None
    assert (once.us, once.phase, once.rows) == (70, "held", None)
    twice = profile_of(flow, "local", [early, *events, late], metrics, FACTS).find("held.g")
    assert twice is not None
    assert twice.us == 40


def test_a_run_of_the_warm_up_alone_measures_nothing(flow: Flow) -> None:
    events, metrics = run([1, 1])
    with pytest.raises(RunFailure) as caught:
        profile_of(flow, "local", events, metrics, FACTS)
    assert caught.value.code == "RLF4005"


def test_usage(flow_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rlflow.cli import main

    def code(*arguments: str | Path) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["profile", *map(str, arguments)])
        return int(ended.value.code or 0)

    assert code("plan.json") == 2
    assert code(flow_file, "--steps", "2") == 2
    assert code(flow_file, "-o", flow_file.parent) == 2
    assert code(flow_file, "-o", flow_file.parent / "absent" / "p.json") == 2
    full = flow_file.parent / "full"
    full.mkdir()
    (full / "file").write_text("x", "utf-8")
    assert code(flow_file, "--run-dir", full, "-o", flow_file.with_name("p.json")) == 2
    assert "is not empty" in capsys.readouterr().err
    assert not flow_file.with_name("p.json").exists()

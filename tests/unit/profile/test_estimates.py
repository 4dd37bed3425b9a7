"""Estimates from a profile: the numbers, how they scale, and everything that follows from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import driver
from rlflow.cli import main
from rlflow.diagnostics import CompileError, RunFailure
from rlflow.passes.analysis.conditions import Size
from rlflow.passes.analysis.profiled import factor
from rlflow.plan import Plan
from rlflow.profile.table import Profile, StageProfile

FLOW = """
flow sums {
  data  d = reasoning_gym("chain_sum", size = 64)
  model m = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1)
  model r = frozen(m)
  reward e = scorer(d)
  step {
    b   = d.take(4 prompts)
    s   = m.generate(b, n = 8, max_new = 10 tokens)
    ref = r.logprobs(s)
    w   = e(s)
    a   = group_normalize(w)
    m.train(s, advantages = a, reference = ref, loss = ppo_clip() + 0.01 * kl(k3), optimizer = adamw(lr = 1e-3))
  }
}
"""
ON_DEVICES = FLOW.replace('tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1)', 'preset("qwen3_8b")') + (
    "schedule sums on pod { pool main = 8 devices }\ncluster pod { host = 8 * ascend_910b { memory = 1.5 TiB } }\n"
)
US = {"b": 100, "s": 4000, "ref": 1000, "w": 1500, "a": 50, "m.train": 8000}

MakeProfile = Callable[..., Profile]
Write = Callable[[str], Path]


def compiled(flow: Path, profile: Profile, *overrides: str) -> Plan:
    return driver.compile(flow, options(flow, profile, *overrides))


def options(flow: Path, profile: Profile, *overrides: str) -> driver.Options:
    file = flow.with_name("profile.json")
    file.write_text(profile.to_json(), "utf-8")
    return driver.Options(overrides=overrides, profile=file)


def times(plan: Plan) -> dict[str, int]:
    return {estimate.stage: estimate.us for estimate in plan.estimates}


def command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return int(ended.value.code or 0)


def test_a_plan_for_cpus_gets_times_and_a_period(write: Write, make_profile: MakeProfile) -> None:
    """The reward runs beside the reference and is longer; handing over its samples takes time of the pool."""
    flow = write(FLOW)
    assert driver.compile(flow).cadence is None
    plan = compiled(flow, make_profile(flow, US, call_us=300, publish_us=20))
    assert times(plan) == US | {"s": 4300, "m.train": 8020}
    assert all(estimate.measured == "measured" for estimate in plan.estimates)
    assert plan.cadence is not None
    assert plan.cadence.us == 100 + 4300 + max(1000, 1500) + 50 + 8020
    parts = {estimate.stage: dict(estimate.parts) for estimate in plan.estimates}
    assert parts["s"] == {"run": 4000, "call w": 300}
    assert parts["m.train"] == {"run": 8000, "publish": 20}


def test_the_plan_names_its_profile(write: Write, make_profile: MakeProfile) -> None:
    flow = write(FLOW)
    profile = make_profile(flow, US)
    plan = compiled(flow, profile)
    assert plan.profile is not None
    assert plan.profile.sha256 == hashlib.sha256(profile.to_json().encode()).hexdigest()
    assert plan == Plan.from_json(plan.to_json())
    assert compiled(flow, profile).to_json() == plan.to_json()
    assert driver.compile(flow).profile is None


def test_other_numbers_of_rows_scale_every_stage(write: Write, make_profile: MakeProfile) -> None:
    flow = write(FLOW)
    plan = compiled(flow, make_profile(flow, US, call_us=300, publish_us=20), "b.count=12")
    three = {stage: 3 * us for stage, us in US.items()}
    assert times(plan) == three | {"s": 3 * 4300, "m.train": 3 * 8000 + 20}
    (samples,) = [estimate.measured for estimate in plan.estimates if estimate.stage == "s"]
    assert samples == "measured with 32 rows, here 96: times 3"


def test_longer_responses_scale_what_counts_tokens(write: Write, make_profile: MakeProfile) -> None:
    """6 tokens of prompt stay, 5 of response become 10: a row has 16 tokens in place of 11."""
    flow = write(FLOW)
    found = times(compiled(flow, make_profile(flow, US, prompt=6, response=5), "s.max_new=20"))
    assert found == US | {stage: round(US[stage] * 16 / 11) for stage in ("s", "ref", "m.train")}


def test_more_epochs_scale_the_training(write: Write, make_profile: MakeProfile) -> None:
    flow = write(FLOW.replace("optimizer =", "epochs = 1, optimizer ="))
    profile = make_profile(flow, US)
    flow.write_text(flow.read_text("utf-8").replace("epochs = 1", "epochs = 3"), "utf-8")
    assert times(compiled(flow, profile))["m.train"] == 3 * 8000


@given(
    rows=st.integers(1, 10**6),
    more=st.integers(1, 50),
    new=st.integers(1, 10**5),
    longer=st.integers(1, 50),
    prompt=st.floats(0, 1000),
    response=st.floats(0.01, 1000),
    epochs=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_scaling_against_counted_tokens(
    rows: int, more: int, new: int, longer: int, prompt: float, response: float, epochs: int
) -> None:
    entry = StageProfile(
        stage="s", phase="step", conditions={}, us=1, low_us=1, high_us=1, steps=1, rows=rows,
        tokens=rows * (prompt + response), prompt_tokens=prompt, max_new=new,
    )  # fmt: skip
    then = rows * more * (prompt + response * longer) * epochs
    found = factor(entry, Size(rows * more, new * longer, epochs))
    assert float(found) == pytest.approx(then / (rows * (prompt + response)), rel=1e-9)
    assert factor(entry, Size(rows, new)) == Fraction(1)


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ("hidden = 32", "hidden = 64", {"s", "ref", "m.train"}),
        ("optimizer =", "minibatch = 16 samples, optimizer =", {"m.train", "m.train.old"}),
        ("optimizer =", "microbatch = 64 tokens, optimizer =", {"m.train"}),
        ("lr = 1e-3", "lr = 1e-4", set()),
    ],
)
def test_what_changes_the_time_of_a_stage_and_what_does_not(
    old: str, new: str, lost: set[str], write: Write, make_profile: MakeProfile
) -> None:
    flow = write(FLOW)
    profile = make_profile(flow, US)
    flow.write_text(FLOW.replace(old, new), "utf-8")
    checked = driver.check(flow, options(flow, profile))
    plan = driver.plan_of(checked, options(flow, profile))
    assert set(times(plan)) == US.keys() - lost
    assert {w.code for w in checked.warnings} == ({"RLF4007"} if lost else set())
    assert {w.message.split("`")[1] for w in checked.warnings} == lost
    assert (plan.cadence is None) == bool(lost)


def test_a_stage_that_changed_is_left_to_the_cost_model(write: Write, make_profile: MakeProfile) -> None:
    """RLF4007 says so, and a comment silences it."""
    flow = write(ON_DEVICES)
    computed = times(driver.compile(flow))
    profile = make_profile(flow, {"s": 4000, "m.train": 8000})
    checked = driver.check(flow, options(flow, profile))
    plan = driver.plan_of(checked, options(flow, profile))
    assert times(plan) == {"s": 4000, "m.train": 8000, "ref": computed["ref"]}
    assert {e.stage for e in plan.estimates if not e.measured} == {"ref"}
    assert [w.code for w in checked.warnings] == ["RLF4007"] * 4  # b, ref, w, a
    silent = ON_DEVICES.replace("ref = r.logprobs(s)", "ref = r.logprobs(s)  # rlflow: ignore[RLF4007]")
    flow.write_text(silent, "utf-8")
    found = driver.check(flow, options(flow, profile)).warnings
    assert not any("`ref`" in w.message for w in found)
    assert [w.code for w in found] == ["RLF4007"] * 3


def test_a_profile_that_knows_no_stage_is_refused(write: Write, make_profile: MakeProfile) -> None:
    flow = write(FLOW)
    profile = make_profile(flow, {"s": 4000})
    flow.write_text(FLOW.replace("hidden = 32", "hidden = 64"), "utf-8")
    with pytest.raises(CompileError) as caught:
        compiled(flow, profile)
    assert [d.code for d in caught.value.diagnostics] == ["RLF4006"]


def test_a_profile_of_another_flow_is_refused(write: Write, make_profile: MakeProfile) -> None:
    flow = write(FLOW)
    profile = make_profile(flow, US)
    flow.write_text(FLOW.replace("flow sums", "flow other"), "utf-8")
    with pytest.raises(RunFailure) as caught:
        compiled(flow, profile)
    assert caught.value.code == "RLF4006"


def test_verbs_estimate_from_a_profile(
    write: Write, make_profile: MakeProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = write(FLOW)
    chosen = options(flow, make_profile(flow, US, call_us=300))
    assert chosen.profile is not None
    given_ = ["--profile", str(chosen.profile)]
    assert command("show", flow, *given_) == 0
    assert "measured by profile" in capsys.readouterr().out
    assert command("explain", flow, *given_) == 0
    assert "s on main, 4.3 ms (measured): run 4 ms, call w 0.3 ms" in capsys.readouterr().out
    assert command("simulate", flow, *given_, "--format", "json") == 0
    period = driver.compile(flow, chosen).cadence
    assert period is not None
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(period.us / 1e6)
    assert command("compile", flow, *given_, "-o", flow.with_name("plan.json")) == 0
    assert driver.load_plan(flow.with_name("plan.json")).profile is not None
    for verb in ("show", "simulate"):
        assert command(verb, flow.with_name("plan.json"), *given_) == 2
    assert command("explain", "RLF4005", *given_) == 2
    assert command("show", flow, "--profile", flow.with_name("absent.json")) == 2
    assert command("show", flow, "--profile", flow) == 1
    assert "RLF4005" in capsys.readouterr().err


def test_sweeps_use_the_profile(write: Write, make_profile: MakeProfile, capsys: pytest.CaptureFixture[str]) -> None:
    flow = write(FLOW)
    profile = options(flow, make_profile(flow, US)).profile
    assert profile is not None
    assert command("simulate", flow, "--profile", profile, "--sweep", "b.count=4,8", "--format", "json") == 0
    one, two = (row["step_s"] for row in json.loads(capsys.readouterr().out))
    assert two == pytest.approx(2 * one)

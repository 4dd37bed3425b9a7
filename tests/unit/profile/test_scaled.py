"""What a profile says of layouts that were not measured: the cost model, held to the layout that was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.ir.flow import Layout
from rlflow.passes.analysis.measured_costs import _layout
from rlflow.plan import MoveObject, Plan
from rlflow.profile.table import Profile, StageProfile

MakeProfile = Callable[..., Profile]
Write = Callable[[str], Path]

FLOW = """
flow f {
  data d = reasoning_gym("chain_sum", size = 512)
  model m = preset("qwen3_8b")
  model r = frozen(m)
  reward e = scorer(d)
  step {
    b = d.take(32 prompts)
    s = m.generate(b, n = 8, max_new = 1024 tokens)
    ref = r.logprobs(s)
    m.train(s, advantages = group_normalize(e(s)), reference = ref, loss = ppo_clip() + 0.01 * kl(k3),
            minibatch = 64 samples, optimizer = adamw(lr = 1e-6))
  }
  allow m staleness <= 2 steps with truncated_is(2.0)
}
"""
CLUSTER = "cluster pod { host = 8 * ascend_910b { memory = 1.5 TiB } hosts = 2 * host }\n"
PLACED = "schedule f on pod { pool main = 16 devices\nplace m, r on main with tp = TP }\n"
STAGES = ("s", "ref", "m.train")
TOKENS = {"prompt": 256, "response": 256}
"""As the cost model assumes, so that measured times are not scaled for lengths."""


def profile_of(plan: Plan, flow: Path, make: MakeProfile, **times: float) -> Profile:
    """The stages as the plan has them, each so many times as long as it estimates."""
    us = {e.stage: round(e.us * times.get(e.stage.replace("m.", ""), 1.0)) for e in plan.estimates}
    return make(flow, us, **TOKENS)


def compiled(flow: Path, profile: Profile | None = None) -> Plan:
    if profile is None:
        return driver.compile(flow)
    file = flow.with_name("profile.json")
    file.write_text(profile.to_json(), "utf-8")
    return driver.compile(flow, driver.Options(profile=file))


def us(plan: Plan) -> dict[str, int]:
    return {e.stage: e.us for e in plan.estimates if e.stage in STAGES}


def warnings(flow: Path) -> list[str]:
    found = driver.check(flow, driver.Options(profile=flow.with_name("profile.json"))).warnings
    return [note for warning in found for note in warning.notes]


def test_another_layout_is_scaled_by_what_the_model_was_off(write: Write, make_profile: MakeProfile) -> None:
    measured, other = (write(FLOW + PLACED.replace("TP", tp) + CLUSTER, f"tp{tp}.rlflow") for tp in ("4", "8"))
    profile = profile_of(compiled(measured), measured, make_profile, s=1.5, train=0.5)
    plain, scaled = us(compiled(other)), us(compiled(other, profile))
    assert scaled["s"] == pytest.approx(1.5 * plain["s"], rel=1e-3)
    assert scaled["ref"] == pytest.approx(plain["ref"], rel=1e-3)
    assert scaled["m.train"] == pytest.approx(0.5 * plain["m.train"], rel=1e-3)
    assert us(compiled(measured, profile))["s"] == pytest.approx(1.5 * us(compiled(measured))["s"], rel=1e-4)
    notes = warnings(other)
    assert any(
        note.startswith("its time is by the cost model times 1.5, as measured in the layout dp 4") for note in notes
    )


def test_the_engines_of_a_scaled_stage_are_as_slow(write: Write, make_profile: MakeProfile) -> None:
    measured, other = (write(FLOW + PLACED.replace("TP", tp) + CLUSTER, f"tp{tp}.rlflow") for tp in ("4", "8"))
    profile = profile_of(compiled(measured), measured, make_profile, s=2.0)
    engines = [
        e.engine for plan in (compiled(other), compiled(other, profile)) for e in plan.estimates if e.stage == "s"
    ]
    plain, scaled = engines
    assert plain is not None
    assert scaled is not None
    assert scaled.token_s == pytest.approx(2 * plain.token_s, rel=1e-3)
    assert scaled.bands[0][1] == pytest.approx(2 * plain.bands[0][1], rel=1e-3)
    assert scaled.kv_tokens == plain.kv_tokens


def test_a_model_on_other_terms_is_not_scaled(write: Write, make_profile: MakeProfile) -> None:
    measured = write(FLOW + PLACED.replace("TP", "4") + CLUSTER)
    profile = profile_of(compiled(measured), measured, make_profile, s=3.0, train=3.0)
    other = write(
        (FLOW + PLACED.replace("TP", "8") + CLUSTER).replace("minibatch = 64", "minibatch = 128"), "other.rlflow"
    )
    plain, scaled = us(compiled(other)), us(compiled(other, profile))
    assert scaled["m.train"] == plain["m.train"]
    assert scaled["s"] == pytest.approx(3 * plain["s"], rel=1e-3)


def test_the_search_counts_with_measured_times(write: Write, make_profile: MakeProfile) -> None:
    """All stages twice as slow: the same placement at twice the period. Generation ten times as slow: more devices."""
    auto = write(FLOW + "schedule f on pod { auto }\n" + CLUSTER, "auto.rlflow")
    placed = write(FLOW + PLACED.replace("TP", "4") + CLUSTER)
    estimated, found = compiled(placed), compiled(auto)
    assert found.search is not None

    def search(**times: float) -> Plan:
        return compiled(auto, profile_of(estimated, placed, make_profile, **times))

    same, twice, slow = search(), search(s=2.0, ref=2.0, train=2.0), search(s=10.0)
    assert [pool.name for pool in same.pools] == [pool.name for pool in found.pools]
    assert same.search is not None
    assert twice.search is not None
    assert same.search.us == pytest.approx(found.search.us, rel=0.01)
    assert twice.search.us == pytest.approx(2 * same.search.us, rel=0.05)

    def share(plan: Plan) -> float:
        """Of the devices, those that generate."""
        pools = {pool.name: len(pool.ranks) for pool in plan.pools}
        return pools[next(stage.pool for stage in plan.stages if stage.id == "s")]

    assert share(slow) > share(same)


def test_copies_hide_behind_measured_stages(write: Write, make_profile: MakeProfile) -> None:
    """Stages that are ten thousand times as fast as estimated leave copies nothing to run beside."""
    small = "schedule f on pod {\npool main = 16 devices { memory = 30 GiB }\nplace m.generate on main with tp = 2\n"
    flow = write(FLOW + small + "place m.train, r on main with tp = 4 }\n" + CLUSTER)
    plan = compiled(flow)
    fast = profile_of(plan, flow, make_profile, s=1e-4, ref=1e-4, train=1e-4)

    def waited(of: Plan) -> int:
        return sum(i.exposed_us for program in of.programs for i in program.step if isinstance(i, MoveObject))

    assert waited(compiled(flow, fast)) > waited(plan) == 0


def test_layouts_are_read_back(write: Write, make_profile: MakeProfile) -> None:
    """From the words in which a profile keeps them."""
    flow = write(FLOW + PLACED.replace("TP", "4, pp = 2") + CLUSTER)
    entries = {entry.stage: entry for entry in profile_of(compiled(flow), flow, make_profile).stages}
    plan = compiled(flow)
    for stage in STAGES:
        layout = _layout(entries[stage])
        assert layout is not None
        assert (layout.tp, layout.pp, layout.dp) == (4, 2, 2)
        placed = next(s.layout for s in plan.stages if s.id == stage)
        assert placed is not None
        assert layout == Layout(**placed.model_dump() | {"split": tuple(placed.split)})
    odd = entries["s"].model_copy(update={"conditions": {"layout": "tp 4, colour red"}})
    assert isinstance(odd, StageProfile)
    assert _layout(odd) is None
    assert replace(Layout(), tp=4) == _layout(entries["s"].model_copy(update={"conditions": {"layout": "tp 4"}}))

"""From spells to an engine, from an engine in a profile to a plan, and the lengths that a simulation of it draws."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.simulator.run import Options, simulate
from rlflow.cost.assumed_lengths import assumed_lengths, lengths_of
from rlflow.imposed_lengths import imposed_lengths
from rlflow.profile.engine_fit import Spell, fitted
from rlflow.profile.table import EngineProfile, LengthsProfile
from tests.unit.profile.conftest import MakeProfile, Write

FLOW = """
flow sums {
  data  d = reasoning_gym("chain_sum", size = 64)
  model m = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1)
  reward e = scorer(d)
  step {
    b = d.take(4 prompts)
    s = m.generate(b, n = 8, max_new = 100 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(lr = 1e-3))
  }
  seed 11
}
"""


def test_a_fit_finds_the_step_time() -> None:
    draw = random.Random(0)
    spells = [Spell(0, 4, n, round(2000 + 7 * n)) for n in (50, 80, 120, 60)]
    for _ in range(60):
        steps, batch = draw.randint(1, 40), draw.randint(1, 32)
        tokens = steps * batch * draw.randint(20, 300)
        spells.append(Spell(steps, steps * batch, tokens, round(600 * steps + 12 * steps * batch + 0.05 * tokens)))
    found = fitted(spells)
    assert found is not None
    assert found.step_us == pytest.approx(600, rel=0.01)
    assert found.sample_us == pytest.approx(12, rel=0.05)
    assert found.token_us == pytest.approx(0.05, rel=0.05)
    assert found.prefill_token_us == pytest.approx(7, rel=0.01)


def test_a_fit_keeps_the_sum_and_never_gives_a_negative_time() -> None:
    """Spells that take less the more there is to do, as on a machine that somebody else leaves."""
    spells = [Spell(10, 10 * b, 1000 * b, 50_000 - 1000 * b) for b in range(1, 30)]
    found = fitted(spells)
    assert found is not None
    assert min(found.step_us, found.sample_us, found.token_us) >= 0
    total = sum(found.step_us * s.steps + found.sample_us * s.samples + found.token_us * s.tokens for s in spells)
    assert total == pytest.approx(sum(spell.us for spell in spells), rel=1e-4)
    assert fitted([]) is None


def test_a_simulation_draws_the_lengths_that_a_run_imposes(
    write: Write, make_profile: MakeProfile, tmp_path: Path
) -> None:
    path = write(FLOW)
    times = {"b": 100, "s": 4000, "m.train": 5000}
    profile = make_profile(path, times, prompt=6, response=5)
    engine = EngineProfile(step_us=600, sample_us=10, token_us=0, prefill_token_us=5)
    lengths = LengthsProfile(mean=20, sigma=1, prompt_share=0.5)
    stages = tuple(
        stage.model_copy(update={"engine": engine, "lengths": lengths}) if stage.stage == "s" else stage
        for stage in profile.stages
    )
    file = tmp_path / "profile.json"
    file.write_text(profile.model_copy(update={"stages": stages}).to_json(), "utf-8")
    assert json.loads(file.read_text("utf-8"))["stages"]
    plan = driver.compile(path, driver.Options(profile=file))
    facts = next(estimate.engine for estimate in plan.estimates if estimate.stage == "s")
    assert facts is not None
    simulated = lengths_of(assumed_lengths(facts), plan.seed, "s")
    imposed = imposed_lengths(plan, "lognormal(20, 1)", plan.seed)["s"]
    pairs = [(prompt, sample) for prompt in range(50) for sample in range(8)]
    assert [simulated(*pair) for pair in pairs] == [imposed.tokens(0, *pair) for pair in pairs]
    # One batch: as many steps as the longest sample has tokens, the first one after its prompts are read.
    found = simulate(plan, Options(steps=1, warm_up=0, seed=plan.seed))
    took = next(e["duration_us"] for e in found.events if e["instruction"] == "run:s")
    drawn = [imposed.tokens(0, prompt, sample) for prompt in range(4) for sample in range(8)]
    assert took == pytest.approx(600 * max(drawn) + 10 * sum(drawn), rel=0.1)

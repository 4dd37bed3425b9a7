"""The last samples of a batch gather on few engines, and the free devices begin what comes next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.simulator.run import Options, simulate
from rlflow.backends.simulator.run_migration import engines_needed, kept
from rlflow.cli import main
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan
from rlflow.plan_decisions import EngineEstimate

FLOW = """
flow f {
  data d = reasoning_gym("chain_sum", size = 4096)
  model m = preset("qwen3_8b")
  model big = preset("qwen3_32b")
  model teacher = frozen(big)
  reward e = scorer(d)
  step {
    b = d.take(32 prompts)
    s = m.generate(b, n = 8, max_new = 4096 tokens)
    l = teacher.logprobs(s)
    m.train(s, advantages = group_normalize(e(s)), reference = l, loss = ppo_clip() + 0.001 * kl(k3), optimizer = adamw(1e-6))
  }
  allow m staleness <= 2 steps with truncated_is(2.0)
}
schedule f on pod {
  pool all = 32 devices { swap = false }
  place m.generate on all with tp = TP
  place teacher on all with tp = 8
  place m.train on FIT with tp = 4
  RULE
}
cluster pod { host = 8 * ascend_910b { memory = 1.5 TiB } hosts = 8 * host }
"""

Compile = Callable[..., Plan]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    def make(rule: str = "", tp: int = 4, fit: str = "all") -> Plan:
        file = tmp_path / "f.rlflow"
        rule += "" if fit == "all" else f"\n  pool {fit} = 32 devices"
        file.write_text(FLOW.replace("RULE", rule).replace("TP", str(tp)).replace("FIT", fit), "utf-8")
        return driver.compile(file)

    return make


def facts(**changed: int) -> EngineEstimate:
    numbers = {"replicas": 8, "lock_step": 1, "slots": 64, "kv_tokens": 100_000, "prompt_tokens": 100, "max_new": 900}
    return EngineEstimate(
        **(numbers | changed),
        mean_new=300.0,
        bands=((64, 0.01, 0.0001),),
        token_s=1e-8,
        prefill_token_s=1e-6,
        prefill_square_s=0.0,
        prefill_context_s=0.0,
        prefill_tokens=8192,
    )


def test_as_many_engines_as_slots_and_cache_ask_for() -> None:
    assert engines_needed(facts(), 1) == 1
    assert engines_needed(facts(), 64) == 1
    assert engines_needed(facts(), 65) == 2
    assert engines_needed(facts(kv_tokens=10_000), 11) == 2  # 11 of 1000 tokens at their full length
    assert engines_needed(facts(kv_tokens=10_000, lock_step=2), 11) == 1


def test_the_fullest_engines_are_kept() -> None:
    assert kept([3, 0, 9, 4, 4], facts(kv_tokens=10_000)) == (2, 3)
    assert kept([0, 7, 0], facts()) is None
    assert kept([1, 7], facts(kv_tokens=4_000)) is None


def test_the_same_samples_in_less_time(compiled: Compile) -> None:
    """What follows on the free devices is worth more than what moving costs."""
    plan = compiled()
    options = [Options(steps=3, seed=1, migrate=share) for share in ({}, {"s": 0.02}, {"s": 0.3})]
    plain, late, early = (simulate(plan, each) for each in options)
    assert plain.tokens_per_step == late.tokens_per_step == early.tokens_per_step
    assert plain.ages == late.ages == early.ages == {"s": {0: sum(plain.ages["s"].values())}}
    assert float(early.period) < 0.97 * float(plain.period)
    assert late.period < plain.period
    assert 0 < late.moved["s"] < early.moved["s"] < 0.3 * 32 * 8
    assert early.pools["all"].busy <= 1
    started = [float(e["start_us"]) for r in (plain, early) for e in r.events if e["stage"] == "l" and e["step"] == 1]
    assert started[1] < 0.8 * started[0]


def test_stages_that_nothing_follows_gain_nothing(compiled: Compile) -> None:
    """The teacher's time stated as none: only the costs of moving are left."""
    plan = compiled()
    plain, moved = (
        simulate(plan, Options(steps=3, seed=1, stated={"l": 1e-6}, migrate=share)) for share in ({}, {"s": 0.3})
    )
    assert plain.period < moved.period < 1.2 * float(plain.period)


def test_stages_that_cannot_migrate_are_named(compiled: Compile) -> None:
    with pytest.raises(RunFailure, match="no stage `ss` generates") as failure:
        simulate(compiled(), Options(seed=0, migrate={"ss": 0.2}))
    assert failure.value.help in (("did you mean `s`?",), ("such stages are s",))
    with pytest.raises(RunFailure, match="go on with samples of the next batch"):
        simulate(compiled("staleness m = 1 step", fit="fit"), Options(seed=0, migrate={"s": 0.2}))
    with pytest.raises(RunFailure, match="has one engine"):
        simulate(compiled(tp=32), Options(seed=0, migrate={"s": 0.2}))


def test_the_command_says_what_moved(compiled: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled()
    file = str(tmp_path / "f.rlflow")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", file, "--seeds", "1", "--steps", "2", "--migrate", "s=30%"])
    assert ended.value.code == 0
    assert "moved to other engines at the end of a batch of s: " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["simulate", file, "--migrate", "s=30%"])
    assert ended.value.code == 2
    assert "add --seeds N" in capsys.readouterr().err

"""Environments that take time between turns: samples leave their engines, and come back with all they had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.simulator.run import Options, simulate
from rlflow.backends.simulator.run_turns import Turns
from rlflow.cli import main
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

EXAMPLES = Path(__file__).parents[3] / "examples"
FLOW = """
flow f {
  data d = reasoning_gym("chain_sum", size = 512)
  model m = preset("qwen3_8b")
  environment tool = python("environments:Calculator", timeout = 5 s)
  reward e = scorer(d)
  step {
    b = d.take(16 prompts)
    s = m.generate(b, n = 8, max_new = 256 tokens, environment = tool, turns = 4)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-6))
  }
  allow m staleness <= 4 steps with truncated_is(2.0)
}
schedule f on pod {
  pool gen = 8 devices
  pool fit = 8 devices
  place m.generate on gen with tp = 2
  place m.train on fit with tp = 4
  RULE
}
cluster pod { host = 8 * ascend_910b { memory = 1.5 TiB } hosts = 2 * host }
"""

Compile = Callable[..., Plan]


@pytest.fixture
def several_turns(tmp_path: Path) -> Compile:
    def make(rule: str = "") -> Plan:
        (tmp_path / "environments.py").write_text((EXAMPLES / "environments.py").read_text("utf-8"), "utf-8")
        file = tmp_path / "f.rlflow"
        file.write_text(FLOW.replace("RULE", rule), "utf-8")
        return driver.compile(file)

    return make


def test_a_response_is_made_in_equal_turns() -> None:
    turns = Turns("s", 4, 1e6, 0)
    assert [turns.end(10, turn) for turn in (1, 2, 3, 4)] == [2, 5, 7, 10]
    assert [turns.end(2, turn) for turn in (1, 2, 3, 4)] == [1, 1, 1, 2]
    waits = [
        float(turns.wait(prompt, sample, turn)) for prompt in range(40) for sample in range(8) for turn in (1, 2, 3)
    ]
    assert sum(waits) / len(waits) == pytest.approx(1e6, rel=0.1)
    assert len(set(waits)) == len(waits)
    assert turns.wait(3, 2, 1) == Turns("s", 4, 1e6, 0).wait(3, 2, 1) != Turns("s", 4, 1e6, 1).wait(3, 2, 1)


def test_a_block_is_longer_by_the_waits(several_turns: Compile) -> None:
    plan = several_turns()
    plain, waiting = (simulate(plan, Options(turns=turns)) for turns in ({}, {"s": 2.0}))
    assert float(waiting.period) - float(plain.period) == pytest.approx(3 * 2e6, rel=1e-6)
    assert waiting.pools["gen"].busy < plain.pools["gen"].busy


def test_samples_come_back_with_their_tokens(several_turns: Compile) -> None:
    """As many tokens as without an environment; the last sample has waited three times, some for long."""
    plan = several_turns()
    options = [Options(steps=4, seed=3, turns=turns) for turns in ({}, {"s": 1e-4}, {"s": 1.0}, {"s": 10.0})]
    plain, quick, slow, slower = (simulate(plan, each) for each in options)
    assert plain.tokens_per_step == quick.tokens_per_step == slow.tokens_per_step == slower.tokens_per_step
    period = [float(found.period) / 1e6 for found in (plain, quick, slow, slower)]
    assert period[0] < period[1] < period[0] + 2  # contexts are computed again
    assert period[1] + 3 < period[2] < period[1] + 3 * 10
    assert period[3] > period[2] + 3 * 5


@pytest.mark.parametrize(
    "rule",
    [
        "staleness m = 2 steps",
        "staleness m = 1 step, admit slack_edf",
        "staleness m = 1 step, admit evict",
        "trigger s at 60%, carry partial",
        "staleness m = 1 step\ntrigger s at 70%, carry finish",
    ],
)
def test_ages_are_as_promised(several_turns: Compile, rule: str) -> None:
    plan = several_turns(rule)
    for seed in (0, 1):
        found = simulate(plan, Options(steps=6, warm_up=0, seed=seed, turns={"s": 3.0}))
        promised = found.promised["s"]
        assert promised is None or found.worst_age <= promised
        assert len(found.ends) == 6


def test_staleness_hides_the_waits(several_turns: Compile) -> None:
    """While some samples wait, those of the next batch run, where samples are admitted one by one."""
    waits = {"s": 4.0}
    together = simulate(several_turns(), Options(steps=6, seed=0, turns=waits))
    rule = "staleness m = 3 steps, admit slack_edf"
    ahead = simulate(several_turns(rule), Options(steps=6, seed=0, turns=waits))
    assert float(ahead.period) < 0.6 * float(together.period)


def test_wrong_names(several_turns: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailure, match="no stage `ss` has an environment") as failure:
        simulate(several_turns(), Options(turns={"ss": 1.0}))
    assert failure.value.help == ("did you mean `s`?",) or failure.value.help == ("such stages are s",)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(tmp_path / "f.rlflow"), "--turn", "s"])
    assert ended.value.code == 2
    assert "--turn s: write NAME=SECONDS" in capsys.readouterr().err

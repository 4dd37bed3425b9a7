"""Filters that drop groups: rounds of sampling, their time, and that plans drop the same prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.simulator.run import Options, simulate
from rlflow.cli import main
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

EXAMPLES = Path(__file__).parents[3] / "examples"
TIMES = {"samples": 2.0, "digits": 0.5, "actor.train": 1.5}
SPLIT = """
schedule dapo on pod {
  pool gen = 8 devices
  pool fit = 8 devices
  place actor.generate on gen with tp = 1
  place actor.train on fit with tp = 1
}
cluster pod { host = 8 * ascend_910b { memory = 1.5 TiB } hosts = 2 * host }
"""

Compile = Callable[..., Plan]


@pytest.fixture
def dapo(tmp_path: Path) -> Compile:
    def make(*overrides: str, schedule: str = "") -> Plan:
        for name in ("data", "rewards.py"):
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(EXAMPLES / name)
        file = tmp_path / "dapo.rlflow"
        file.write_text((EXAMPLES / "dapo.rlflow").read_text("utf-8") + schedule, "utf-8")
        return driver.compile(file, driver.Options(overrides=overrides))

    return make


def test_a_round_takes_the_time_of_what_runs_again(dapo: Compile) -> None:
    """A step of 2 + 0.5 + 1.5 s and 2.5 s for every further round; a filter that keeps all has none."""
    plan = dapo()
    for share in (1.0, 0.5):
        found = simulate(plan, Options(steps=50, stated=TIMES, keep={"kept": share}))
        rounds = found.refills["kept"].rounds
        assert float(found.period) / 1e6 == pytest.approx(4.0 + 2.5 * (rounds - 1), rel=1e-6)
        assert (rounds == 1) == (share == 1)
    assert found.pools["main"].busy == pytest.approx((2 * rounds + 1.5) / (4.0 + 2.5 * (rounds - 1)), rel=0.05)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_as_many_rounds_as_it_takes(dapo: Compile, share: float) -> None:
    """Rounds of 16 prompts until 16 groups are kept: against draws of their own."""
    import random

    rng, total, draws = random.Random(3), 0, 4000
    for _ in range(draws):
        kept = 0
        while kept < 16:
            kept += sum(rng.random() < share for _ in range(16))
            total += 1
    found = simulate(dapo(), Options(steps=400, stated=TIMES, keep={"kept": share})).refills["kept"]
    assert found.rounds == pytest.approx(total / draws, rel=0.05)
    assert found.short == 0


def test_the_refill_is_a_limit(dapo: Compile) -> None:
    plan = dapo("kept.refill=1")
    found = simulate(plan, Options(steps=100, stated=TIMES, keep={"kept": 0.4})).refills["kept"]
    assert found.most == 2
    assert 0 < found.short < 1


def test_prompts_are_dropped_by_seed_and_number(dapo: Compile) -> None:
    one, again, other = (
        simulate(dapo(), Options(steps=40, stated=TIMES, seed=seed, keep={"kept": 0.5})) for seed in (1, 1, 2)
    )
    assert one.ends == again.ends != other.ends
    slow = simulate(dapo(), Options(steps=40, stated=TIMES | {"actor.train": 9.0}, seed=1, keep={"kept": 0.5}))
    assert slow.refills == one.refills


def test_names_and_pools(dapo: Compile) -> None:
    with pytest.raises(RunFailure, match="no stage `kep` drops groups") as failure:
        simulate(dapo(), Options(stated=TIMES, keep={"kep": 0.5}))
    assert failure.value.help == ("did you mean `kept`?",)
    split = dapo(schedule=SPLIT)
    assert split.stage("kept").pool == split.stage("samples").pool, "a selection lives with what makes its samples"
    assert simulate(split, Options(stated=TIMES, keep={"kept": 0.5})).refills["kept"]
    away = next(pool.name for pool in split.pools if pool.name not in (split.stage("kept").pool, "cpu"))
    moved = tuple(s.model_copy(update={"pool": away}) if s.id == "kept" else s for s in split.stages)
    with pytest.raises(RunFailure, match="where `samples` runs on the same pool") as failure:
        simulate(split.model_copy(update={"stages": moved}), Options(stated=TIMES, keep={"kept": 0.5}))
    assert failure.value.code == "RLF4003"


def test_the_command_says_how_often_it_samples(capsys: pytest.CaptureFixture[str]) -> None:
    stated = [word for name, seconds in TIMES.items() for word in ("--stage", f"{name}={seconds}")]

    def run(*more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["simulate", str(EXAMPLES / "dapo.rlflow"), *stated, *more])
        return int(ended.value.code or 0)

    assert run("--keep", "kept=50%", "--seeds", "3") == 0
    text = capsys.readouterr().out
    assert "20 steps, stages as estimated, 3 seeds" in text
    assert "rounds of sampling for kept: 2." in text
    assert run("--keep", "kept=0.5", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert 2 <= found["refills"]["kept"]["rounds"] <= found["refills"]["kept"]["most"]
    for wrong in ("kept", "kept=0", "kept=120%", "=50%", "kept=x"):
        assert run("--keep", wrong) == 2
        assert "write NAME=SHARE" in capsys.readouterr().err

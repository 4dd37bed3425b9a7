"""Stages that several pools sample for: how prompts are divided, and what each pool's list then says."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import driver
from rlflow.backends.ray_runtime.launcher import RunObserver, RunSettings, run_plan
from rlflow.diagnostics import RunFailure
from rlflow.passes.analysis.lending import Worker, divide
from rlflow.plan import MoveObject, Plan

TEXT = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 9)
  model m = {model}
  reward e = scorer(d)
  step {{
    b = d.take(64 prompts)
    s = m.generate(b, n = 8, max_new = {new} tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-6))
  }}
}}
schedule f on {cluster} {{
  pool gen = {n} devices
  pool fit = {n} devices {{ {setting} }}
  place m.generate on gen, fit {tp}
  place m.train on fit
}}
cluster pod {{ host = 8 * ascend_910b {{ memory = 1.5 TiB }} hosts = 2 * host }}
"""


@st.composite
def workers(draw: st.DrawFn) -> tuple[list[Worker], int, int]:
    unit = draw(st.integers(1, 3))
    prompts = unit * draw(st.integers(1, 8))
    found = []
    for number in range(draw(st.integers(2, 3))):
        start, each = draw(st.integers(0, 5)), draw(st.integers(1, 9))
        busy = draw(st.sampled_from([0, 0, 3, 40]))
        found.append(Worker(f"p{number}", unit, busy, lambda k, start=start, each=each: start + each * k))  # type: ignore[misc]
    return found, prompts, unit


@settings(max_examples=150, deadline=None)
@given(workers())
def test_the_last_pool_ends_as_early_as_it_can(case: tuple[list[Worker], int, int]) -> None:
    found, prompts, unit = case

    def last(parts: tuple[int, ...] | list[int]) -> float:
        return max(worker.ends(part) for worker, part in zip(found, parts, strict=True))

    parts = divide(found, prompts, unit)
    assert sum(parts) == prompts
    assert all(part % unit == 0 for part in parts)
    every = product(range(0, prompts + 1, unit), repeat=len(found))
    assert last(parts) == min(last(split) for split in every if sum(split) == prompts)


def test_prompts_are_in_proportion_to_speed() -> None:
    def pool(name: str, per_second: int) -> Worker:
        return Worker(name, 1, 0.0, lambda prompts: prompts / per_second)

    assert divide([pool("a", 3), pool("b", 1)], 64, 1) == [48, 16]
    assert divide([pool("a", 1), pool("b", 1), pool("c", 2)], 64, 4) == [16, 16, 32]


def compiled(folder: Path, **settings: object) -> Plan:
    values = {
        "model": 'preset("qwen3_8b")',
        "cluster": "pod",
        "n": 8,
        "setting": "",
        "tp": "with tp = 2",
        "new": 4096,
        **settings,
    }
    file = folder / "f.rlflow"
    file.write_text(TEXT.format(**values), "utf-8")
    return driver.compile(file)


def test_both_pools_sample_and_the_trainer_waits_for_both(tmp_path: Path) -> None:
    plan = compiled(tmp_path)
    lists = {program.pool: [i.id for i in program.step if not isinstance(i, MoveObject)] for program in plan.programs}
    assert lists["gen"] == ["take:b", "put:b->fit", "reshard:m", "run:s.on.gen", "put:s.on.gen->fit"]
    at = [lists["fit"].index(name) for name in ("take:b", "reshard:m", "run:s.on.fit", "take:s.on.gen", "run:s")]
    assert at == sorted(at)
    assert lists["fit"].index("run:s") < lists["fit"].index("run:m.train")
    assert {queue.id for queue in plan.queues} == {"b->fit", "s.on.gen->fit"}
    (channel,) = plan.channels
    assert set(channel.readers) == {"s.on.gen", "s.on.fit"}
    parts = [plan.stage(stage).op.part for stage in ("s.on.gen", "s.on.fit")]  # type: ignore[union-attr]
    assert parts[0][0] == 0
    assert parts[0][1] == parts[1][0]
    assert parts[1][1] == 64
    assert Plan.from_json(plan.to_json()) == plan


def test_training_state_leaves_while_its_devices_are_lent(tmp_path: Path) -> None:
    plan = compiled(tmp_path, setting="memory = 40 GiB")
    (program,) = [program for program in plan.programs if program.pool == "fit"]
    moves = [(i.kind, i.object) for i in program.step if isinstance(i, MoveObject)]
    ids = [i.id for i in program.step]
    assert ("offload", "m weights") in moves
    assert ids.index("offload:m weights") < ids.index("run:s.on.fit") < ids.index("onload:m weights")
    (memory,) = [memory for memory in plan.memory if memory.pool == "fit"]
    assert memory.peak <= memory.capacity < memory.peak_without_swaps


def test_where_speeds_are_not_known_devices_count(tmp_path: Path) -> None:
    model = 'tiny(qwen3, alphabet = "0123456789+-=. ")'
    plan = compiled(tmp_path, model=model, cluster="local", n=2, tp="", new=8)
    assert [c.chosen for c in plan.choices] == ["gen 32, fit 32"]
    assert plan.choices[0].reason == "in proportion to devices, since how fast they are is not known"


def test_the_runtime_refuses_it(tmp_path: Path) -> None:
    model = 'tiny(qwen3, alphabet = "0123456789+-=. ")'
    plan = compiled(tmp_path, model=model, cluster="local", n=2, tp="", new=8)
    with pytest.raises(RunFailure, match="`s` is on gen and fit") as failure:
        run_plan(plan, RunSettings(tmp_path, tmp_path / "run"), RunObserver())
    assert failure.value.code == "RLF4003"

"""The memory of compiled plans, replayed from their instruction lists without the planner's own timeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlflow import driver
from rlflow.diagnostics import CompileError
from rlflow.plan import MoveObject, Plan, Program, PublishWeights, ReshardWeights, RunStage
from rlflow.plan_decisions import PoolMemory

TEXT = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 9)
  model m = preset("{model}")
  model r = frozen(m)
  reward e = scorer(d)
  step {{
    b = d.take(64 prompts)
    s = m.generate(b, n = 8, max_new = {new} tokens)
    ref = r.logprobs(s)
    m.train(s, advantages = group_normalize(e(s)), reference = ref, loss = ppo_clip() + kl(),
            minibatch = {mini} samples, optimizer = adamw(1e-6))
  }}
}}
schedule f on pod {{
{schedule}
}}
cluster pod {{ host = 8 * {device} {{ memory = {host} GiB }} hosts = 4 * host }}
"""
TIGHT = """  pool main = 32 devices {{ memory = {memory} GiB }}
  place m.generate on main with tp = {gen}
  place m.train, r on main with tp = {fit}, recompute = full, zero = {zero}"""
TOGETHER = """  pool main = {n} devices {{ memory = {memory} GiB }}
  place m.generate on main with tp = {gen}
  place m.train, r on main with tp = {fit}"""
APART = """  pool gen = {n} devices {{ memory = {memory} GiB }}
  pool fit = {n} devices {{ memory = {memory} GiB }}
  place m.generate on gen with tp = {gen}
  place m.train, r on fit with tp = {fit}"""


@st.composite
def programs(draw: st.DrawFn) -> str:
    layout = draw(st.sampled_from([TOGETHER, APART])).format(
        n=draw(st.sampled_from([8, 16])),
        memory=draw(st.integers(16, 59)),
        gen=draw(st.sampled_from([1, 2, 4, 8])),
        fit=draw(st.sampled_from([2, 4, 8])),
    )
    return TEXT.format(
        model=draw(st.sampled_from(["qwen3_8b", "qwen2_5_7b", "llama3_1_8b"])),
        new=draw(st.sampled_from([512, 4096, 16384])),
        mini=draw(st.sampled_from([128, 512])),
        schedule=layout,
        device=draw(st.sampled_from(["ascend_910b", "h20"])),
        host=draw(st.sampled_from([256, 1024, 2048])),
    )


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_no_stage_of_an_accepted_plan_exceeds_a_device(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("plan") / "f.rlflow"
    path.write_text(text)
    plan = compiled(path)
    assume(plan is not None)
    assert plan is not None
    for memory in plan.memory:
        (program,) = [program for program in plan.programs if program.pool == memory.pool]
        here = [reshard for reshard in plan.reshards if reshard.target == memory.pool]
        replay(memory, program, in_place=any(reshard.in_place for reshard in here))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_stage_exceeds_a_device_where_weights_are_resharded_in_place(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    gen, fit = data.draw(st.sampled_from([(2, 4), (4, 2), (1, 4), (8, 2), (4, 8)]))
    text = TEXT.format(
        model="qwen2_5_32b",
        new=data.draw(st.sampled_from([512, 2048])),
        mini=128,
        schedule=TIGHT.format(memory=data.draw(st.integers(30, 59)), gen=gen, fit=fit, zero=2),
        device="ascend_910b",
        host=2048,
    )
    if data.draw(st.booleans()):
        text = text.replace(f"with tp = {gen}", f"with tp = {gen}, reshard = in_place", 1)
    path = tmp_path_factory.mktemp("plan") / "f.rlflow"
    path.write_text(text)
    plan = compiled(path)
    assume(plan is not None)
    assert plan is not None
    replay(plan.memory[0], plan.programs[0], in_place=any(reshard.in_place for reshard in plan.reshards))


def compiled(path: Path) -> Plan | None:
    """None where the layout or the memory does not fit, which has been said with numbers."""
    try:
        return driver.compile(path)
    except CompileError as error:
        if {d.code for d in error.diagnostics} <= {"RLF2001", "RLF2004", "RLF2020"}:
            return None
        raise


def replay(memory: PoolMemory, program: Program, *, in_place: bool = False) -> None:
    """Walk two steps, every move done where it stands: nothing negative, what a stage needs there, and never too much.

    An object is whole where the table has the most of it; from there its bytes at every other place follow. In place,
    the trained weights are on the host when they are overwritten, and come back from there.
    """
    phases = {phase.stage: dict(phase.contents) for phase in memory.phases}
    moved = {i.object for i in program.step if isinstance(i, MoveObject)}
    whole = {name: max(contents.get(name, 0) for contents in phases.values()) for name in moved}
    amounts = {name: whole[name] - most_above_start(program, name) for name in moved}
    saved = False
    if in_place:
        amounts["m weights"] = whole["m weights"]
    for instruction in program.step:
        if isinstance(instruction, ReshardWeights) and f"{instruction.model} rollout weights" in moved:
            amounts[f"{instruction.model} rollout weights"] = 0  # gone since its last use, and written anew
    for instruction in program.step:
        if isinstance(instruction, MoveObject) and instruction.kind == "save":
            assert in_place
            assert instruction.object == "m weights"
            assert amounts["m weights"] == whole["m weights"] == instruction.bytes
            saved = True
            continue
        if isinstance(instruction, MoveObject):
            sign = 1 if instruction.kind == "onload" else -1
            amounts[instruction.object] += sign * instruction.bytes
            assert 0 <= amounts[instruction.object] <= whole[instruction.object], instruction.id
            continue
        stage = phase_of(instruction)
        if stage not in phases:
            continue
        rollout = f"{instruction.model} rollout weights" if isinstance(instruction, ReshardWeights) else ""
        if rollout in moved and not in_place:
            amounts[rollout] = whole[rollout]
        for name in moved:
            if is_needed(stage, name):
                assert amounts[name] == whole[name], f"{name} is not whole when {stage} needs it"
        standing = sum(size for name, size in phases[stage].items() if name not in moved)
        assert standing + sum(amounts.values()) <= memory.capacity, stage
        if rollout in moved and in_place:
            assert saved, "what is overwritten is on the host"
            assert amounts[rollout] == 0
            room = dict(phases[stage])[f"reshard {instruction.model} room"] if f"{stage} room" in phases[stage] else 0
            assert whole[rollout] <= whole["m weights"] + room, "the copy has room where the trained weights were"
            amounts["m weights"], amounts[rollout] = 0, whole[rollout]
    assert all(sum(contents.values()) <= memory.capacity for contents in phases.values())
    assert memory.peak == max(phase.bytes for phase in memory.phases) <= memory.capacity


def most_above_start(program: Program, name: str) -> int:
    """By how much the bytes of an object exceed those at the start of a step at the most."""
    above, most = 0, 0
    for instruction in program.step:
        if isinstance(instruction, MoveObject) and instruction.object == name:
            above += instruction.bytes if instruction.kind == "onload" else -instruction.bytes
            most = max(most, above)
    return most


def is_needed(phase: str, name: str) -> bool:
    """By what the objects of this flow are for."""
    if phase == "m.train":
        return name in ("m weights", "m optimizer", "m gradients")
    if phase == "s":
        return name in ("m rollout weights", "s keys and values")
    if phase == "ref":
        return name == "r weights"
    return phase in ("reshard m", "publish m", "m.train.old") and name == "m weights"


def phase_of(instruction: object) -> str:
    if isinstance(instruction, RunStage):
        return instruction.stage
    if isinstance(instruction, ReshardWeights):
        return f"reshard {instruction.model}"
    return f"publish {instruction.model}" if isinstance(instruction, PublishWeights) else ""


def test_a_plan_that_fits_only_with_swaps_is_refused_without_them(tmp_path: Path) -> None:
    text = TEXT.format(
        model="qwen3_8b",
        new=4096,
        mini=128,
        schedule=TOGETHER.format(n=8, memory=40, gen=2, fit=4),
        device="ascend_910b",
        host=1024,
    )
    path = tmp_path / "f.rlflow"
    path.write_text(text)
    plan = compiled(path)
    assert plan is not None
    assert any(isinstance(i, MoveObject) for i in plan.programs[0].step)
    path.write_text(text.replace("memory = 40 GiB", "memory = 40 GiB, swap = false"))
    with pytest.raises(CompileError) as refused:
        driver.compile(path)
    assert [d.code for d in refused.value.diagnostics] == ["RLF2004"]

"""Plans that swap, executed on one rank without Ray: what is where is measured on the tensors after every instruction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlflow.backends.ray_runtime.checkpoint import load_checkpoint, save_checkpoint
from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.residency import Residency
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics import CompileError, RunFailure
from rlflow.driver import compile
from rlflow.plan import MoveObject, Plan
from tests.unit.ray_runtime.conftest import FakeReward

FLOW = """\
flow sums {
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 64, layers = 2, intermediate = 128COMPUTE)
  model  reference = frozen(actor)
  reward exact     = python("rewards:score")
  step {
    batch   = questions.take(4 prompts)
    samples = actor.generate(batch, n = 4, max_new = 8 tokens)
    ref     = reference.logprobs(samples)
    points  = exact(samples)
    adv     = group_normalize(points)
    actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + 0.01 * kl(k3),
                minibatch = MINIBATCH samples, optimizer = adamw(lr = 2e-3))
  }
  evaluate held every 1 steps {
    tests   = questions.all()
    answers = actor.generate(tests, max_new = 3 tokens, temperature = 0)
    right   = exact(answers)
    ref     = reference.logprobs(answers)
  }
  stop after 3 steps
}
schedule sums {
  pool main = 1 devices { POOL }
}
"""
TIGHT, ROOMY = "memory = 9 MiB", "memory = 100 MiB"

Compiled = Callable[..., Plan]


@pytest.fixture
def compiled(tmp_path: Path) -> Compiled:
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")

    def build(pool: str, *, minibatch: int = 8, compute: str = "") -> Plan:
        text = FLOW.replace("POOL", pool).replace("MINIBATCH", str(minibatch)).replace("COMPUTE", compute)
        (tmp_path / "sums.rlflow").write_text(text, "utf-8")
        return compile(tmp_path / "sums.rlflow")

    return build


def loaded(plan: Plan, folder: Path) -> RankState:
    state = RankState(plan, "main", 0, 1, folder, seed=0)
    state.load_models()
    state.load_data()
    state.rewards = {"exact": FakeReward(lambda text: float(len(set(text))))}  # type: ignore[dict-item]
    return state


def run(state: RankState, steps: int = 3, evaluate: bool = False) -> tuple[Interpreter, list[StepMetrics]]:
    interpreter = Interpreter(state, lambda step: None)
    program, out = state.plan.programs[0], []
    for step in range(1, steps + 1):
        out.append(StepMetrics(state.plan, "main", 0))
        interpreter.run(program.step, step, out[-1])
        if evaluate:
            for evaluation in program.evaluations:
                metrics = StepMetrics(state.plan, "main", 0, evaluation.name)
                interpreter.run(evaluation.instructions, step, metrics)
    return interpreter, out


def losses(metrics: list[StepMetrics]) -> list[tuple[float, ...]]:
    return [tuple(m.means[name][0] for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss")) for m in metrics]


def weights(state: RankState) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in state.models["actor"].loaded.model.parameters()]


def test_a_plan_that_fits_only_with_swap_runs_and_is_refused_without(compiled: Compiled, tmp_path: Path) -> None:
    roomy, tight = compiled(ROOMY), compiled(TIGHT)
    assert not any(isinstance(i, MoveObject) for i in roomy.programs[0].step)
    moved = {(i.kind, i.object) for i in tight.programs[0].step if isinstance(i, MoveObject)}
    assert {("offload", "actor optimizer"), ("onload", "actor optimizer"), ("drop", "reference weights")} <= moved
    assert tight.memory[0].peak <= tight.memory[0].capacity < tight.memory[0].peak_without_swaps
    with pytest.raises(CompileError) as caught:
        compiled(TIGHT + "\n    swap = false")
    (error,) = [found for found in caught.value.diagnostics if found.code == "RLF2004"]
    assert "9.0 MiB" in error.message

    states = [loaded(plan, tmp_path) for plan in (roomy, tight)]
    first, second = (losses(run(state)[1]) for state in states)
    assert first == second
    assert len(set(first)) == 3
    for one, other in zip(*(weights(state) for state in states), strict=True):
        assert torch.equal(one, other)


def test_measured_bytes_never_exceed_the_plans(compiled: Compiled, tmp_path: Path) -> None:
    state = loaded(compiled(TIGHT), tmp_path)
    interpreter = Interpreter(state, lambda step: None)
    assert interpreter.residency is not None
    peaks, away = [], set()
    for step in range(1, 4):
        metrics = StepMetrics(state.plan, "main", 0)
        interpreter.run(state.plan.programs[0].step, step, metrics)
        entries = interpreter.residency.ledger.entries
        ran = [i.id for i in state.plan.programs[0].step if i.kind != "checkpoint"]
        assert [entry.instruction for entry in entries] == ran
        for entry in entries:
            assert all(size <= entry.planned[name] for name, size in entry.measured.items()), entry
            away |= {name for name, size in entry.measured.items() if not size}
        by_id = {entry.instruction: entry for entry in entries}
        assert by_id["run:samples"].measured["samples keys and values"] > 0
        assert by_id["run:actor.train"].measured["actor gradients"] > 0
        assert [event["device_bytes"] for event in metrics.events if "device_bytes" in event] == [
            entry.device_bytes for entry in entries
        ]
        assert metrics.highs["memory/main/over_plan_bytes"] == 0
        assert metrics.highs["memory/main/planned_peak_bytes"] <= state.plan.memory[0].peak
        peaks.append(metrics.highs["memory/main/device_peak_bytes"])
    assert {"actor optimizer", "reference weights"} <= away
    actor, reference = (state.models[name].loaded.model for name in ("actor", "reference"))
    size = sum(p.numel() * 4 for p in actor.parameters())
    # In training: weights, gradients and two moments. Its own count of what is there, not the ledger's.
    assert peaks == [4 * size] * 3
    assert all(p.untyped_storage().nbytes() == 0 for p in reference.parameters())
    assert all(p.grad is None for p in actor.parameters())


def test_evaluations_find_what_they_need_and_change_nothing(compiled: Compiled, tmp_path: Path) -> None:
    with_evaluations, without = (loaded(compiled(TIGHT), tmp_path) for _ in range(2))
    interpreter, metrics = run(with_evaluations, evaluate=True)
    assert losses(metrics) == losses(run(without)[1])
    reference = with_evaluations.models["reference"].loaded.model
    assert all(p.untyped_storage().nbytes() == 0 for p in reference.parameters())  # away again, as the plan has it
    assert interpreter.residency is not None
    with interpreter.residency.trained():
        assert all(p.untyped_storage().nbytes() for p in with_evaluations.models["actor"].trainer.moments())  # type: ignore[union-attr]


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(compiled: Compiled, tmp_path: Path) -> None:
    """The optimizer comes from a file, whose memory cannot be given back as it is."""
    plan = compiled(TIGHT)
    whole = losses(run(loaded(plan, tmp_path))[1])
    first = loaded(plan, tmp_path)
    interpreter, _ = run(first, steps=1)
    assert interpreter.residency is not None
    with interpreter.residency.trained():
        save_checkpoint(first, tmp_path / "checkpoints", 1)
    second = loaded(plan, tmp_path)
    load_checkpoint(second, tmp_path / "checkpoints", 1)
    goes_on, later = Interpreter(second, lambda step: None), []
    for step in (2, 3):
        later.append(StepMetrics(plan, "main", 0))
        goes_on.run(plan.programs[0].step, step, later[-1])
    assert losses(later) == whole[1:]


def test_a_stage_without_its_object_is_refused_before_the_first_step(compiled: Compiled, tmp_path: Path) -> None:
    plan = compiled(TIGHT)
    program = plan.programs[0]
    kept = [i for i in program.step if i.id != "onload:reference weights"]
    broken = plan.model_copy(update={"programs": (program.model_copy(update={"step": tuple(kept)}),)})
    with pytest.raises(RunFailure) as caught:
        Interpreter(loaded(broken, tmp_path), lambda step: None)
    found = caught.value.to_diagnostic()
    assert found.code == "RLF5033"
    assert all(word in found.message for word in ("`ref`", "`reference weights`", "`main`"))


def test_more_than_a_device_may_hold_fails_with_both_numbers(compiled: Compiled, tmp_path: Path) -> None:
    plan = compiled(TIGHT)
    memory = plan.memory[0].model_copy(update={"capacity": 1_000_000})
    with pytest.raises(RunFailure) as caught:
        run(loaded(plan.model_copy(update={"memory": (memory,)}), tmp_path), steps=1)
    found = caught.value.to_diagnostic()
    assert found.code == "RLF5034"
    assert "run:actor.train" in found.message
    assert "1000000" in found.message


def test_a_cpu_pool_without_memory_has_no_table_and_moves_nothing(compiled: Compiled, tmp_path: Path) -> None:
    plan = compiled("")
    assert plan.memory == ()
    interpreter, metrics = run(loaded(plan, tmp_path), steps=1)
    assert interpreter.residency is None
    assert losses(metrics) == losses(run(loaded(compiled(TIGHT), tmp_path), steps=1)[1])


def test_part_of_an_object_leaves_in_whole_tensors(compiled: Compiled, tmp_path: Path) -> None:
    state = loaded(compiled(ROOMY), tmp_path)
    residency = Residency(state, state.plan.memory[0])
    held = residency.objects["reference weights"]
    whole, before = (
        held.device_bytes(),
        [p.detach().clone() for p in state.models["reference"].loaded.model.parameters()],
    )
    held.leave(held.bytes // 3, keep=True)
    assert 0 < held.device_bytes() <= held.planned_bytes
    held.leave(held.bytes // 3, keep=True)
    assert 0 < held.device_bytes() <= held.planned_bytes
    held.come(held.bytes // 3)
    assert held.device_bytes() <= held.planned_bytes
    held.come(held.away_bytes)
    held.arrive()
    assert held.device_bytes() == whole
    for parameter, value in zip(state.models["reference"].loaded.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_bf16_learns_the_same_and_tells_what_the_plan_does_not_count(compiled: Compiled, tmp_path: Path) -> None:
    """The plan has the optimizer away while the old log-probabilities are computed from the float32 weights."""
    roomy, tight = (compiled(pool, compute=', compute = "bf16"') for pool in (ROOMY, TIGHT))
    (_, first), (interpreter, second) = (run(loaded(plan, tmp_path)) for plan in (roomy, tight))
    assert losses(first) == losses(second)
    assert interpreter.residency is not None
    by_id = {entry.instruction: entry for entry in interpreter.residency.ledger.entries}
    size = sum(p.numel() for p in interpreter._state.models["actor"].loaded.model.parameters())
    away = by_id["offload:actor optimizer"]
    assert away.measured["actor optimizer"] == 0
    assert away.measured["actor weights"] == (4 + 2) * size
    assert second[-1].highs["memory/main/over_plan_bytes"] == (4 + 2) * size  # beside them the frozen copy's 4 - 2

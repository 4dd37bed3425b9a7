"""Selections, and the refill of dynamic sampling, with rewards that follow a script."""

from __future__ import annotations

import queue as queues
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.reward_worker import Handle
from rlflow.backends.ray_runtime.state import RankState
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.driver import compile
from rlflow.plan import Plan

FLOW = """\
flow chosen {{
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer", shuffle = false)
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, context = 32 tokens)
  model  reference = frozen(actor)
  reward exact     = python("rewards:score")
  step {{
    batch   = questions.take(4 prompts)
    samples = actor.generate(batch, n = 4, max_new = 3 tokens)
    points  = exact(samples)
    kept    = {selection}
    {rest}
  }}
  stop after 5 steps
}}
"""
GRPO = """adv = group_normalize(kept.score)
    actor.train(kept, advantages = adv, loss = ppo_clip(0.2), optimizer = adamw(lr = 1e-2))"""
NLL = "actor.train(kept, loss = nll(), optimizer = adamw(lr = 1e-2))"
DPO = """ref = reference.logprobs(kept)
    actor.train(kept, reference = ref, loss = dpo(), optimizer = adamw(lr = 1e-2))"""

Script = Callable[[int, int], float]
"""The score of a sample by its prompt's uid and its number in the group."""


class ScriptedReward:
    ended = 0.0  # when a function returned: these run none

    def __init__(self, script: Script) -> None:
        self.script = script
        self.samples: list[Batch] = []

    def start(self, samples: Batch) -> Handle:
        self.samples.append(samples)
        return Handle((), ())

    def collect(self, handle: Handle) -> tuple[np.ndarray, dict[str, list[Any]]]:
        samples = self.samples[-1]
        pairs = zip(samples.array("uid").tolist(), samples.array("sample").tolist(), strict=True)
        return np.array([self.script(uid, number) for uid, number in pairs], dtype=np.float32), {}

    def close(self) -> None:
        pass


def prepare(folder: Path, selection: str, rest: str = GRPO) -> Plan:
    rows = [f'{{"question": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(10) for b in range(5)]
    (folder / "data.jsonl").write_text("".join(rows), "utf-8")
    (folder / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")
    (folder / "chosen.rlflow").write_text(FLOW.format(selection=selection, rest=rest), "utf-8")
    return compile(folder / "chosen.rlflow")


def state_of(
    plan: Plan, folder: Path, script: Script, rank: int = 0, world: int = 1, group: dist.ProcessGroup | None = None
) -> RankState:
    state = RankState(plan, "main", rank, world, folder, seed=0, group=group)
    state.load_models()
    state.load_data()
    state.rewards = {"exact": ScriptedReward(script)}  # type: ignore[dict-item]
    return state


def run(state: RankState, monkeypatch: pytest.MonkeyPatch, step: int = 1) -> tuple[Batch, dict[str, float]]:
    """One step; the batch that it trains on and its metrics."""
    trained: list[Batch] = []
    train = Trainer.train

    def spy(self: Trainer, samples: Batch, *rest: Any, **options: Any) -> dict[str, float]:
        trained.append(samples)
        return train(self, samples, *rest, **options)

    monkeypatch.setattr(Trainer, "train", spy)
    metrics = StepMetrics(state.plan, "main", state.rank)
    Interpreter(state, lambda _: None).run(state.plan.programs[0].step, step, metrics)
    monkeypatch.undo()
    return trained[0], reduce_parts([metrics.parts()])


def mixed_where(*uids: int) -> Script:
    """Different scores for these prompts, equal ones for all others."""
    return lambda uid, sample: float(sample == 0) if uid in uids else 1.0


# --- best of, best and worst ------------------------------------------------------------------------------------------


def test_best_of_keeps_the_best_with_their_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "best_of(samples, points, keep = 2)", NLL)
    batch, found = run(state_of(plan, tmp_path, lambda uid, sample: float((sample * 7 + uid) % 5)), monkeypatch)
    assert batch.array("uid").tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for uid in range(4):
        scores = [float((sample * 7 + uid) % 5) for sample in range(4)]
        rows = batch.array("uid") == uid
        assert sorted(batch.array("score")[rows].tolist()) == sorted(scores)[-2:]
        assert batch.array("sample")[rows].tolist() == sorted(batch.array("sample")[rows].tolist())
    assert (found["filter/kept"], found["filter/dropped"]) == (8, 8)
    assert "actor/nll_loss" in found


def test_best_of_with_a_threshold_numbers_groups_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "best_of(samples, points, keep = 1, at_least = 2)", NLL)
    batch, _ = run(state_of(plan, tmp_path, lambda uid, sample: float(uid)), monkeypatch)
    assert batch.array("uid").tolist() == [2, 3]
    assert batch.array("sample").tolist() == [0, 0]  # of equal ones the first
    assert batch.array("group").tolist() == [0, 1]


def test_nothing_kept_is_a_skipped_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "best_of(samples, points, keep = 1, at_least = 99)", NLL)
    state = state_of(plan, tmp_path, lambda uid, sample: 0.0)
    before = [parameter.clone() for parameter in state.models["actor"].loaded.model.parameters()]
    batch, found = run(state, monkeypatch)
    assert batch.rows == 0
    assert found["actor/skipped_updates"] == 1
    after = state.models["actor"].loaded.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_pairs_are_best_then_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "best_worst(samples, points)", DPO)
    scores = {0: [1.0, 3.0, 0.0, 2.0], 1: [1.0] * 4, 2: [0.0, 0.0, 5.0, 5.0], 3: [float("nan"), 1.0, 2.0, float("nan")]}
    batch, found = run(state_of(plan, tmp_path, lambda uid, sample: scores[uid][sample]), monkeypatch)
    assert batch.array("uid").tolist() == [0, 0, 2, 2, 3, 3]
    assert batch.array("sample").tolist() == [1, 2, 2, 0, 2, 1]
    assert batch.array("score").tolist() == [3.0, 0.0, 5.0, 0.0, 2.0, 1.0]
    assert batch.array("group").tolist() == [0, 0, 1, 1, 2, 2]
    assert (found["filter/kept"], found["filter/dropped"]) == (3, 1)
    assert found["actor/dpo_loss"] == pytest.approx(np.log(2), abs=1e-5)  # the reference is the model itself


def test_no_pair_is_a_skipped_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "best_worst(samples, points)", DPO)
    batch, found = run(state_of(plan, tmp_path, lambda uid, sample: 1.0), monkeypatch)
    assert batch.rows == 0
    assert found["actor/skipped_updates"] == 1


# --- mixed groups -----------------------------------------------------------------------------------------------------


def test_without_a_refill_it_trains_on_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "mixed_groups(samples, points)")
    state = state_of(plan, tmp_path, mixed_where(1, 3))
    batch, found = run(state, monkeypatch)
    assert batch.array("uid").tolist() == [1] * 4 + [3] * 4
    assert batch.array("group").tolist() == [0] * 4 + [1] * 4
    assert {name: found[f"filter/{name}"] for name in ("kept", "dropped", "refills", "surplus")} == {
        "kept": 2, "dropped": 2, "refills": 0, "surplus": 0
    }  # fmt: skip
    assert state.cursors == {"questions": 4}
    nothing = state_of(plan, tmp_path, mixed_where())
    assert run(nothing, monkeypatch)[1]["actor/skipped_updates"] == 1


def test_a_refill_goes_on_with_the_next_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "mixed_groups(samples, points, refill = 5)")
    state = state_of(plan, tmp_path, mixed_where(1, 6, 7, 8, 9, 10))
    batch, found = run(state, monkeypatch)
    # 1 | 6 7 | 8 and not 9 and 10, which are one too many: exactly the prompts of a step
    assert batch.array("uid")[::4].tolist() == [1, 6, 7, 8]
    assert batch.array("group").tolist() == np.repeat(np.arange(4), 4).tolist()
    assert batch.array("score").tolist() == [1.0, 0.0, 0.0, 0.0] * 4
    assert {name: found[f"filter/{name}"] for name in ("kept", "dropped", "refills", "surplus")} == {
        "kept": 4, "dropped": 6, "refills": 2, "surplus": 2
    }  # fmt: skip
    assert state.cursors == {"questions": 12}  # what was taken, so a resume goes on behind it
    assert found["perf/total_num_tokens"] > 3 * 4 * 4 * 4  # every sample that was made counts
    batch, _ = run(state_after(plan, tmp_path, state, mixed_where(12, 13, 14, 15)), monkeypatch, step=2)
    assert batch.array("uid")[::4].tolist() == [12, 13, 14, 15]


def state_after(plan: Plan, folder: Path, before: RankState, script: Script) -> RankState:
    state = state_of(plan, folder, script)
    state.cursors = dict(before.cursors)
    return state


def test_a_refill_samples_what_one_large_step_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random streams belong to prompts, so the tokens do not depend on which taking a prompt came with."""
    plan = prepare(tmp_path, "mixed_groups(samples, points, refill = 5)")
    batch, _ = run(state_of(plan, tmp_path, mixed_where(5, 9, 13, 17)), monkeypatch)
    prepare(tmp_path, "mixed_groups(samples, points)")
    text = (tmp_path / "chosen.rlflow").read_text("utf-8").replace("take(4 prompts)", "take(20 prompts)")
    (tmp_path / "chosen.rlflow").write_text(text, "utf-8")
    wide = compile(tmp_path / "chosen.rlflow")
    other, _ = run(state_of(wide, tmp_path, mixed_where(5, 9, 13, 17)), monkeypatch)
    assert batch.items("text") == other.items("text")
    assert batch.array("uid").tolist() == other.array("uid").tolist()


def test_too_few_groups_is_an_error_with_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "mixed_groups(samples, points, refill = 2)")
    with pytest.raises(RunFailure, match="1 of 4 groups are left after 2 refills: in 92 % of 12 groups") as failure:
        run(state_of(plan, tmp_path, mixed_where(9)), monkeypatch)
    assert failure.value.code == "RLF5016"
    assert failure.value.stage == "kept"
    assert "raise `refill`" in failure.value.help[0]


def test_too_few_groups_may_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(tmp_path, "mixed_groups(samples, points, refill = 2, on_short = train)")
    state = state_of(plan, tmp_path, mixed_where(9))
    batch, found = run(state, monkeypatch)
    assert batch.array("uid").tolist() == [9] * 4
    assert found["filter/refills"] == 2
    assert state.cursors == {"questions": 12}
    empty, found = run(state_of(plan, tmp_path, mixed_where()), monkeypatch)
    assert empty.rows == 0
    assert found["actor/skipped_updates"] == 1


# --- ranks ------------------------------------------------------------------------------------------------------------

SCRIPT = mixed_where(3, 4, 8, 9, 10)


def _step(folder: Path, rank: int, world: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What one rank keeps (prompts, in order) and learns (the metrics), in mini-batches of 8 samples."""
    plan = Plan.from_json((folder / "plan.json").read_text("utf-8"))
    state = state_of(plan, folder, SCRIPT, rank, world, group)
    with pytest.MonkeyPatch.context() as patch:
        batch, found = run(state, patch)
    names = ("actor/loss", "actor/grad_norm", "actor/entropy")
    return {
        "uids": batch.array("uid")[::4].tolist(),
        "cursors": state.cursors,
        "learned": {name: found[name] for name in names},
        "filter": {name: value for name, value in found.items() if name.startswith("filter/")},
    }


def _rank(rank: int, folder: Path, out: Any = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    found = _step(folder, rank, 2, dist.group.WORLD)
    if out is not None:
        out.put(found)
    dist.destroy_process_group()
    return found


def test_ranks_refill_together_and_learn_what_one_rank_learns(tmp_path: Path) -> None:
    rest = GRPO.replace("optimizer = adamw(lr = 1e-2)", "optimizer = adamw(lr = 1e-6), minibatch = 8 samples")
    plan = prepare(tmp_path, "mixed_groups(samples, points, refill = 5)", rest)
    (tmp_path / "plan.json").write_text(plan.to_json(), "utf-8")
    context = mp.get_context("spawn")
    results = context.Queue()
    other = context.Process(target=_rank, args=(1, tmp_path, results))
    other.start()
    first = _rank(0, tmp_path)
    try:
        second = results.get(timeout=60)
    except queues.Empty:
        pytest.fail("the other rank ended without a result")
    other.join(60)
    whole = _step(tmp_path, 0, 1, None)
    assert whole["uids"] == [3, 4, 8, 9]
    # A rank has the halves 0 1 | 4 5 | 8 9, the other 2 3 | 6 7 | 10 11; 10 is one too many.
    assert (first["uids"], second["uids"]) == ([4, 8, 9], [3])
    assert first["cursors"] == second["cursors"] == whole["cursors"] == {"questions": 12}
    assert first["learned"] == pytest.approx(whole["learned"], rel=1e-4, abs=1e-6)
    assert first["learned"] == second["learned"]
    for name, value in whole["filter"].items():
        assert first["filter"][name] + second["filter"][name] == value, name

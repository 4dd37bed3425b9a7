"""Whole steps in which two and three connected ranks share groups, against one rank."""

from __future__ import annotations

import queue as queues
from datetime import timedelta
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
from rlflow.backends.ray_runtime.rewards import Attempt, Scored, Scores
from rlflow.backends.ray_runtime.state import RankState
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.driver import compile
from rlflow.plan import Plan

# 5 prompts x 6 samples: 15 on each of two ranks, 10 on each of three.
FLOW = """\
flow shared {
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, intermediate = 64)
  model  reference = frozen(actor)
  reward longest   = python("rewards:score")
  reward exact     = python("rewards:score", on_error = drop)
  step {
    batch   = questions.take(5 prompts)
    samples = actor.generate(batch, n = 6, max_new = 4 tokens)
    ref     = reference.logprobs(samples)
    ranks   = longest(samples)
    points  = exact(samples)
    adv     = group_normalize(points + ranks)
    actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + 0.01 * kl(k3),
                minibatch = 10 samples, optimizer = adamw(lr = 1e-4))
  }
  stop after 2 steps
}
"""


class Pool:
    """Scores in this process. `from_` and `to`: the range of samples of the step that cannot be scored."""

    ended = 0.0  # when a function returned: these run none

    def __init__(self, batched: bool, from_: int = 0, to: int = 0) -> None:
        self.batched = batched
        self.range = range(from_, to)
        self.calls: list[Batch] = []

    def start(self, samples: Batch) -> Handle:
        self.calls.append(samples)
        return Handle((), ())

    def collect(self, handle: Handle) -> Scores:
        samples = self.calls[-1]
        uids, texts = samples.array("uid").tolist(), samples.items("text")
        done = Attempt()
        for row, (uid, sample) in enumerate(zip(uids, samples.array("sample").tolist(), strict=True)):
            mates = [len(set(text)) for other, text in zip(uids, texts, strict=True) if other == uid]
            if uid % 5 * 6 + sample in self.range:
                done.dropped[row] = RunFailure("RLF5003", "raised", notes=("ValueError: no",))
            else:
                best = float(sum(mate <= len(set(texts[row])) for mate in mates))
                own: Scored = (best + 100 * len(mates), {"mates": len(mates)}) if self.batched else (
                    None if sample == 5 else float(len(set(texts[row]))), {"note": "x"}
                )  # fmt: skip
                done.scored[row] = own
        return done.scores(samples.rows)

    def close(self) -> None:
        pass


def steps(folder: Path, rank: int, world: int, group: dist.ProcessGroup | None, lost: int) -> dict[str, Any]:
    """Two steps of one rank: what it samples and learns from. `lost` samples of every step cannot be scored."""
    plan = Plan.from_json((folder / "plan.json").read_text("utf-8"))
    state = RankState(plan, "main", rank, world, folder, seed=0, group=group)
    state.load_models()
    state.load_data()
    whole: Any = Pool(batched=True)
    single: Any = Pool(batched=False, to=lost)
    state.rewards = {"longest": whole, "exact": single}
    trained: list[tuple[Batch, Any]] = []
    train = Trainer.train

    def spy(self: Trainer, samples: Batch, advantages: Any, *rest: Any, **options: Any) -> dict[str, float]:
        trained.append((samples, advantages))
        return train(self, samples, advantages, *rest, **options)

    metrics, tokens = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", spy)
        interpreter = Interpreter(state, lambda _: None)
        for step in (1, 2):
            measured = StepMetrics(plan, "main", rank)
            interpreter.run(plan.programs[0].step, step, measured)
            metrics.append(measured.parts())
            tokens += [event["tokens"] for event in measured.events if event["kind"] == "take"]
    batches = [batch for batch, _ in trained]
    return {
        "metrics": metrics,
        "tokens": tokens,
        "rows": [batch.rows for batch in batches],
        "scored": [batch.rows for batch in whole.calls],
        "samples": [
            list(zip(b.array("uid").tolist(), b.array("sample").tolist(), b.items("text"), strict=True))
            for b in batches
        ],
        "advantages": [np.asarray(advantages).tolist() for _, advantages in trained],
        "cursors": state.cursors,
    }


def lost_steps(folder: Path, rank: int, world: int, group: dist.ProcessGroup | None) -> str:
    try:
        steps(folder, rank, world, group, 30)
    except RunFailure as failure:
        return failure.notes[-1]
    return "nothing failed"


def both_sizes(rank: int, folder: Path, out: Any = None) -> dict[str, Any]:
    """What rank `rank` of three does, and of two (rank 2 does not take part)."""
    torch.set_num_threads(1)
    store, limit = f"file://{folder / 'store'}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=limit)
    pair = dist.new_group([0, 1])
    found: dict[str, Any] = {"3": steps(folder, rank, 3, dist.group.WORLD, 10)}
    found["lost"] = lost_steps(folder, rank, 3, dist.group.WORLD)
    if rank < 2:
        found["2"] = steps(folder, rank, 2, pair, 10)
    if out is not None:
        out.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each of the ranks found, and what one rank finds."""
    folder = tmp_path_factory.mktemp("shared")
    rows = [f'{{"question": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(7) for b in range(2)]
    (folder / "data.jsonl").write_text("".join(rows), "utf-8")
    (folder / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")
    (folder / "shared.rlflow").write_text(FLOW, "utf-8")
    (folder / "plan.json").write_text(compile(folder / "shared.rlflow").to_json(), "utf-8")
    context = mp.get_context("spawn")
    out = context.Queue()
    others = [context.Process(target=both_sizes, args=(rank, folder, out), daemon=True) for rank in (1, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3]))  # the others import this module by its name
        for process in others:
            process.start()
    found = {0: both_sizes_of_first(folder, out)}
    try:
        found |= dict(out.get(timeout=60) for _ in others)
    except queues.Empty:
        pytest.fail("another rank ended without a result")
    for process in others:
        process.join(60)
    return [found[rank] for rank in range(3)], steps(folder, 0, 1, None, 10)


def both_sizes_of_first(folder: Path, out: Any) -> dict[str, Any]:
    before = torch.get_num_threads()
    try:
        return both_sizes(0, folder)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("world", [2, 3])
def test_steps_are_those_of_one_rank(results: tuple[list[dict[str, Any]], dict[str, Any]], world: int) -> None:
    found, whole = results
    ranks = [each[str(world)] for each in found[:world]]
    for step in (0, 1):
        assert {rank["rows"][step] for rank in ranks} == {30 // world}
        assert [row for rank in ranks for row in rank["samples"][step]] == whole["samples"][step]
        advantages = [number for rank in ranks for number in rank["advantages"][step]]
        np.testing.assert_array_equal(advantages, whole["advantages"][step])
        assert sum(rank["scored"][step] for rank in ranks) == 30
        assert all(rank["scored"][step] % 6 == 0 for rank in ranks), "a function of lists gets whole groups"
        metrics = reduce_parts([rank["metrics"][step] for rank in ranks])
        expected = reduce_parts([whole["metrics"][step]])
        clocks = {name for name in expected if name.startswith("timing_s/")}
        assert metrics.keys() == expected.keys()
        for name in expected.keys() - clocks:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert sum(rank["tokens"][step] for rank in ranks) == whole["tokens"][step], "every prompt is counted once"
    assert {rank["cursors"]["questions"] for rank in ranks} == {whole["cursors"]["questions"]} == {10}


def test_what_the_steps_are_about(results: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    """The one rank that the others are compared with: groups that learn, dropped samples, rewards of None."""
    _, whole = results
    first = np.array(whole["advantages"][0])
    assert np.isnan(first[:10]).all()
    assert np.isnan(first[5::6]).all()
    assert (np.abs(first[~np.isnan(first)]) > 0).any()
    metrics = reduce_parts([whole["metrics"][0]])
    assert metrics["reward_extra/ranks/mates/mean"] == 6
    assert metrics["reward_extra/points/reward_dropped/mean"] == pytest.approx(10 / 30)
    assert metrics["reward_extra/points/reward_na/mean"] == pytest.approx(4 / 30)


def test_a_step_without_any_score_is_a_failure_on_every_rank(
    results: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    """Rank 0 of three could score none of its samples in the steps above, which is no failure."""
    found, _ = results
    assert {each["lost"] for each in found} == {"none of the 30 samples of this step could be scored"}

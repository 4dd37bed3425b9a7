"""A rank's state without Ray: a small compiled plan, its model and data, and a reward that is a Python function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.reward_worker import Handle
from rlflow.backends.ray_runtime.state import RankState
from rlflow.driver import compile
from rlflow.plan import Plan

FLOW = """\
flow sums {
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, intermediate = 64)
  model  reference = frozen(actor)
  reward exact     = python("rewards:score")
  step {
    batch   = questions.take(3 prompts)
    samples = actor.generate(batch, n = 4, max_new = 3 tokens)
    ref     = reference.logprobs(samples)
    points  = exact(samples)
    adv     = group_normalize(points)
    actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + 0.01 * kl(k3),
                optimizer = adamw(lr = 1e-2))
  }
  evaluate held every 2 steps {
    tests   = questions.all()
    answers = actor.generate(tests, max_new = 3 tokens, temperature = 0)
    right   = exact(answers)
  }
  save every 2 steps
  stop after 5 steps
}
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small lose by a second thread, most of all when other processes want the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class FakeReward:
    """Scores with a function from response to score, in this process."""

    ended = 0.0  # when a function returned: these run none

    def __init__(self, function: Callable[[str], float]) -> None:
        self.function = function
        self.batches: list[Any] = []

    def start(self, samples: Any) -> Handle:
        self.batches.append(samples)
        return Handle((), ())

    def collect(self, handle: Handle) -> tuple[np.ndarray, dict[str, list[Any]]]:
        texts = self.batches[-1].items("text")
        scores = np.array([self.function(text) for text in texts], dtype=np.float32)
        return scores, {"short": [len(text) < 3 for text in texts], "note": ["words"] * len(texts)}

    def close(self) -> None:
        pass


@pytest.fixture
def small_plan(tmp_path: Path) -> Plan:
    rows = [f'{{"question": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(2) for b in range(2)]
    (tmp_path / "data.jsonl").write_text("".join(rows), "utf-8")
    (tmp_path / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")
    (tmp_path / "sums.rlflow").write_text(FLOW, "utf-8")
    return compile(tmp_path / "sums.rlflow")


@pytest.fixture
def new_state(small_plan: Plan, tmp_path: Path) -> Callable[..., RankState]:
    """`new_state()` is a rank that has loaded everything."""

    def build(rank: int = 0, world: int = 1, score: Callable[[str], float] = lambda text: len(set(text))) -> RankState:
        state = RankState(small_plan, "main", rank, world, tmp_path, seed=0)
        state.load_models()
        state.load_data()
        state.rewards = {"exact": FakeReward(score)}  # type: ignore[dict-item]
        return state

    return build

"""Run by test_software_npu.py in a process of its own: a frozen model's log-probabilities with its weights cast and
without, on the software NPU. Prints one JSON line: of both, how many weights were cast, and the answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from rlflow.backends.ray_runtime.devices.npu import Npu
from rlflow.backends.ray_runtime.forward import response_log_probs
from rlflow.backends.ray_runtime.state import RankState
from rlflow.driver import compile
from tests.npu.software_npu import activate
from tests.npu.test_models import micro_batch

FROZEN = """\
flow sums {
  data   questions = jsonl("sums.jsonl", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=-*/ abcdefghijk", hidden = 64, layers = 2, intermediate = 128,
                          compute = bf16)
  model  reference = frozen(actor)
  reward exact     = python("rewards:score")
  step {
    batch   = questions.take(1 prompts)
    samples = actor.generate(batch, n = 2, max_new = 2 tokens)
    ref     = reference.logprobs(samples)
    actor.train(samples, advantages = group_normalize(exact(samples)), reference = ref,
                loss = ppo_clip(0.2) + 0.01 * kl(k3), optimizer = adamw(lr = 1e-3))
  }
  stop after 1 steps
}
"""


def frozen_flow(folder: Path) -> Path:
    """A file with a policy in bf16 and a frozen copy of it, and what it names beside it."""
    (folder / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n', "utf-8")
    (folder / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")
    file = folder / "sums.rlflow"
    file.write_text(FROZEN, "utf-8")
    return file


def loaded(file: Path) -> RankState:
    """The models of its one rank on an NPU."""
    state = RankState(compile(file), "main", 0, 1, file.parent, seed=0)
    state.device = Npu(0)
    state.load_models()
    return state


def answer(file: Path) -> tuple[int, list[float]]:
    state = loaded(file)
    model = state.models["reference"].loaded.model
    with torch.no_grad():
        logp, _ = response_log_probs(model, "bf16", micro_batch(), 1.0, "none", limit=1 << 20)
    cast = [weight for weight in model.parameters() if weight.dtype == torch.bfloat16]
    assert {weight.dtype for weight in state.models["actor"].loaded.model.parameters()} == {torch.float32}
    return len(cast), logp.tolist()


def main() -> None:
    activate()
    torch.set_num_threads(1)
    found = answer(Path(sys.argv[1]))
    os.environ["RLFLOW_KERNELS"] = "format_cast=torch"
    print(json.dumps({"cast": found, "plain": answer(Path(sys.argv[1]))}))


if __name__ == "__main__":
    main()

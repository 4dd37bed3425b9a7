"""A project with a flow, its data and its Python modules, compiled for a pod or for this machine, and emitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.backends.codegen.render import Files, render_files
from rlflow.backends.codegen.settings import EmitSettings

FLOW = """\
flow Async_GRPO(group = 16) {
  data   questions = jsonl("data/sums.jsonl", prompt = "question", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", context = 32 tokens)
  model  reference = frozen(actor)
  reward digits    = python("rewards:digits", timeout = 5 s)

  step {
    batch   = questions.take(32 prompts)
    samples = actor.generate(batch, n = group, max_new = 3 tokens)
    ref     = reference.logprobs(samples)
    adv     = group_normalize(digits(samples))
    actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + 0.001 * kl(k3), optimizer = adamw(lr = 1e-3))
  }
  stop after 2 steps
}
"""
SPLIT = """
schedule Async_GRPO on pod {
  pool rollout = 16 devices
  pool learner = 16 devices
  place actor.generate         on rollout with tp = 2
  place actor.train, reference on learner with tp = 2, pp = 2
  place digits                 on cpu with workers = 8
}

cluster pod {
  host  = 8 * DEVICE { memory = 1.5 TiB, cpus = 192 }
  hosts = 4 * host
}
"""
REWARDS = """\
from scoring import shared


def digits(prompt, response, answer):
    return shared(response, answer)
"""

Project = Callable[..., Path]
Emitted = Callable[..., Files]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Makes `flow/grpo.rlflow` and what it names in an empty working folder. `device` None: for this machine."""
    monkeypatch.chdir(tmp_path)

    def make(device: str | None = "ascend_910b", flow: str = FLOW, schedule: str = SPLIT) -> Path:
        for name, text in {
            "grpo.rlflow": flow + ("" if device is None else schedule.replace("DEVICE", device)),
            "data/sums.jsonl": "".join(f'{{"question": "{a}+1=", "answer": "{a + 1}"}}\n' for a in range(64)),
            "rewards.py": REWARDS,
            "scoring.py": "def shared(response, answer):\n    return float(response == answer)\n",
            "unrelated.py": "",
        }.items():
            path = Path("flow", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        return Path("flow/grpo.rlflow")

    return make


@pytest.fixture
def emitted() -> Emitted:
    """The launch files of a flow, not written."""

    def render(path: Path, target: str, **settings: Any) -> Files:
        checked = driver.check(path)
        plan = driver.plan_of(checked, driver.Options())
        if target == "kuberay":
            settings.setdefault("image", "registry.example/rlflow:1")
        return render_files(plan, checked.lowered.cluster, path.parent, EmitSettings(target, **settings))

    return render


def text_of(files: Files, name: str) -> str:
    content = files[name]
    return (content if isinstance(content, bytes) else content.read_bytes()).decode()

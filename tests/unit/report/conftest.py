"""What the tests of the report share: a flow on two pools that can be simulated, and a page taken apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlflow.reports import Simulation, gather, page

FLOW = """\
# two pools, one step of staleness
flow two(group = 4) {
  data   tests     = reasoning_gym("chain_sum", size = 512)
  model  actor     = preset("qwen2_5_7b")
  model  reference = frozen(actor)
  model  spare     = preset("qwen2_5_7b")
  reward exact     = scorer(tests)

  step {
    batch   = tests.take(32 prompts)
    samples = actor.generate(batch, n = group, max_new = 1024 tokens)
    ref     = reference.logprobs(samples)
    adv     = group_normalize(exact(samples))
    actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + 0.001 * kl(k3),
                optimizer = adamw(lr = 1e-6))
  }
  allow actor staleness <= 2 steps with truncated_is(2.0)
}

schedule two on pod {
  pool rollout = 8 devices
  pool learner = 8 devices
  place actor.generate         on rollout with tp = 2
  place actor.train, reference on learner with tp = 2
  place exact                  on cpu with workers = 4
  staleness actor = 1 step
}

cluster pod {
  host  = 8 * ascend_910b { memory = 1.5 TiB, cpus = 192 }
  hosts = 2 * host
}
"""


class Page(HTMLParser):
    """The elements of a page: (tag, attributes), and the text of scripts by their place."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.words.append(data)

    @property
    def ids(self) -> set[str]:
        return {attributes["id"] or "" for _, attributes in self.elements if "id" in attributes}

    @property
    def data(self) -> Any:
        """What the scripts draw."""
        return json.loads(self.scripts[0])

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def flow_file(tmp_path: Path) -> Path:
    path = tmp_path / "two.rlflow"
    path.write_text(FLOW, "utf-8")
    return path


@pytest.fixture
def make() -> Callable[..., tuple[Page, str]]:
    """Paths to the page and its text; few steps are simulated."""

    def made(*paths: Path, seed: int | None = None) -> tuple[Page, str]:
        text = page(gather(paths, simulation=Simulation(4, seed)))
        return Page(text), text

    return made

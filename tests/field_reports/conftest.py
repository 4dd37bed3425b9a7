"""A small flow with the sizes of a report filled in, and what the compiler says about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlflow.backends.visualizers.summary import summary_text
from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.driver import context_of
from rlflow.freeze import Provenance, freeze
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse
from rlflow.ir.flow import Flow
from rlflow.passes.pipeline import DEFAULT_PIPELINE, run_pipeline
from rlflow.plan import Plan

TEMPLATE = """\
flow f {{
  data sums = reasoning_gym("chain_sum", size = 1000)
  model actor = tiny(qwen3, alphabet = "0123456789+-=. ", context = {context} tokens)
  model first = frozen(actor)
  reward exact = scorer(sums)
  {declare}
  step {{
    batch = sums.take({prompts} prompts)
    samples = actor.generate(batch, n = {n}, max_new = {max_new} tokens)
    score = exact(samples)
    {before}
    actor.train({rows}, advantages = {advantages}, loss = {loss}, optimizer = adamw(lr = 1e-4){more})
    {after}
  }}
  {items}
}}
schedule f on pod {{
  pool main = {devices} devices
  {schedule}
}}
cluster pod {{
  host = 8 * ascend_910b {{ memory = 1.5 TiB, cpus = 64 }}
  hosts = {hosts} * host
}}
"""


def program(
    *,
    prompts: int = 8,
    n: int = 4,
    devices: int = 1,
    hosts: int = 16,
    context: int = 256,
    max_new: int = 16,
    advantages: str = "group_normalize(score)",
    loss: str = "ppo_clip(0.2)",
    rows: str = "samples",
    declare: str = "",
    before: str = "",
    after: str = "",
    more: str = "",
    items: str = "",
    schedule: str = "",
) -> str:
    """The text of a flow; `reference` and `critic` models are declared only where a test does."""
    text = TEMPLATE.format(**locals())
    return (
        text if "first" in f"{before} {after} {more} {items}" else text.replace("  model first = frozen(actor)\n", "")
    )


PRESET = """\
flow f {{
  data sums = reasoning_gym("chain_sum", size = 1000)
  model actor = {model}
  reward exact = scorer(sums)
  {declare}
  step {{
    batch = sums.take({prompts} prompts)
    samples = actor.generate(batch, n = {n}, max_new = {max_new} tokens{sampling})
    {before}
    actor.train(samples, advantages = group_normalize(exact(samples)), loss = ppo_clip(0.2),
                optimizer = adamw(lr = 1e-6){more})
  }}
  allow actor staleness <= {allowed} steps{correction}
}}
schedule f on pod {{
  {schedule}
}}
cluster pod {{
  {cluster}
}}
"""

HOST = "host = 8 * ascend_910b { memory = 1.5 TiB, cpus = 192 }"


def placed(
    schedule: str,
    *,
    model: str = 'preset("qwen3_8b")',
    cluster: str = f"{HOST} hosts = 8 * host",
    prompts: int = 64,
    n: int = 4,
    max_new: int = 512,
    allowed: int = 3,
    correction: str = " with truncated_is(2.0)",
    declare: str = "",
    before: str = "",
    sampling: str = "",
    more: str = "",
) -> str:
    """The text of a flow of a model whose sizes are known, with its pools and places in `schedule`."""
    return PRESET.format(**locals())


@dataclass(frozen=True)
class Result:
    """The SCHEDULED flow, None when it was refused; and what was found."""

    text: str
    flow: Flow | None
    found: tuple[Diagnostic, ...]

    @property
    def plan(self) -> Plan:
        assert self.flow is not None, self.words
        return freeze(self.flow, Provenance("test", "pod", (), (), DEFAULT_PIPELINE))

    @property
    def shown(self) -> str:
        """What `rlflow show` prints on a very wide terminal, with every line break and run of spaces made one space."""
        return " ".join(summary_text(self.plan, 1000).split())

    @property
    def codes(self) -> list[str]:
        return [diagnostic.code for diagnostic in self.found]

    @property
    def words(self) -> str:
        """Everything that is said: messages, what stands at the places, notes and help."""
        parts: list[str] = []
        for d in self.found:
            parts += [d.message, *(label.text for label in d.labels), *d.notes, *d.help]
        return "\n".join(parts)

    @property
    def places(self) -> list[str]:
        """The text at the main place of every diagnostic."""
        return ["" if d.span is None else d.span.text for d in self.found]


def compiled(text: str, *, base_dir: Path | None = None, overrides: Sequence[str] = ()) -> Result:
    try:
        start = lower(parse(SourceFile("f.rlflow", text)), base_dir, overrides=overrides)
        context = context_of(start)
        flow = run_pipeline(start.flow, context)
    except CompileError as error:
        return Result(text, None, error.diagnostics)
    return Result(text, flow, (*start.warnings, *context.diagnostics))


@pytest.fixture
def compile_() -> Callable[..., Result]:
    """`compile_(prompts = 100, ...)`: the flow of these sizes, compiled; `compile_(text)`: another text; `edit`: a text replaced."""

    def run(
        text: str | None = None,
        *,
        edit: tuple[str, str] = ("", ""),
        base_dir: Path | None = None,
        overrides: Sequence[str] = (),
        **sizes: Any,
    ) -> Result:
        text = program(**sizes) if text is None else text
        assert edit == ("", "") or text.count(edit[0]) == 1, (
            f"{edit[0]!r} stands {text.count(edit[0])} times in the flow"
        )
        return compiled(text.replace(*edit) if edit[0] else text, base_dir=base_dir, overrides=overrides)

    return run


@pytest.fixture
def place_(tmp_path: Path) -> Callable[..., Result]:
    """`place_("pool main = 8 devices", model = ..., ...)`: a flow of a model whose sizes are known, compiled."""

    def run(schedule: str, **sizes: Any) -> Result:
        return compiled(placed(schedule, **sizes), base_dir=tmp_path)

    return run


@pytest.fixture
def hf_model(tmp_path: Path) -> Callable[..., str]:
    """`hf_model(hidden_size = 5120)`: the expression of a model that is a folder with such a config.json."""

    def make(**changed: Any) -> str:
        config = {
            "model_type": "qwen3",
            "num_hidden_layers": 8,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        } | changed
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        return f'hf("{folder.name}", compute = bf16)'

    return make

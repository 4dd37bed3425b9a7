"""A small flow with the sizes of a report filled in, and what the compiler says about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse
from rlflow.ir.flow import Flow
from rlflow.passes.base import PassContext
from rlflow.passes.pipeline import run_pipeline

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


@dataclass(frozen=True)
class Result:
    """The SCHEDULED flow, None when it was refused; and what was found."""

    text: str
    flow: Flow | None
    found: tuple[Diagnostic, ...]

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
        context = PassContext(start.schedule, start.cluster)
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

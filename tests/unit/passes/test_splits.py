"""Which batches divide over ranks, against trying every size."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse
from rlflow.passes.base import PassContext
from rlflow.passes.pipeline import run_pipeline

FLOW = """\
flow f {{
  data sums = reasoning_gym("chain_sum", size = 1000)
  model actor = tiny(qwen3, alphabet = "0123456789+-=. ", heads = 12, hidden = 96, kv_heads = 12, context = 256 tokens)
  model reference = frozen(actor)
  reward exact = scorer(sums)
  step {{
    batch = sums.take({prompts} prompts)
    samples = actor.generate(batch, n = {n}, max_new = 16 tokens)
    {select}
    ref = reference.logprobs({rows})
    adv = {advantages}
    actor.train({rows}, advantages = adv, reference = ref, loss = ppo_clip() + 0.1 * kl(), optimizer = adamw(1e-4))
  }}
}}
schedule f on pod {{
  pool main = {devices} devices
  place actor.generate on main with tp = {tp}
  place actor.train, reference on main with tp = 1
}}
cluster pod {{ host = {devices} * h200 {{ cpus = 64 }} }}
"""


@cache
def found(prompts: int, n: int, devices: int, tp: int, select: str = "") -> tuple[Diagnostic, ...]:
    """The errors of the splits of a flow with these sizes; none = legal."""
    rows, advantages = ("kept", "reinforce_pp(kept.score)") if select else ("samples", "reinforce_pp(exact(samples))")
    kept = f"kept = {select}(samples, exact(samples){', keep = 2' if select == 'best_of' else ''})" if select else ""
    sizes = {"prompts": prompts, "n": n, "devices": devices, "tp": tp}
    text = FLOW.format(select=kept, rows=rows, advantages=advantages, **sizes)
    start = lower(parse(SourceFile("f.rlflow", text)), None)
    try:
        run_pipeline(start.flow, PassContext(start.schedule, start.cluster), ("place", "parallelize"))
    except CompileError as error:
        return error.diagnostics
    return ()


def legal(prompts: int, n: int, devices: int, tp: int) -> bool:
    return prompts * n % devices == 0 and prompts * n % (devices // tp) == 0


@given(
    st.integers(1, 24), st.integers(1, 9), st.sampled_from([(1, 1), (4, 1), (6, 1), (6, 2), (12, 4), (8, 2), (9, 3)])
)
@settings(max_examples=60, deadline=None)
def test_the_sizes_that_are_said_are_the_nearest(prompts: int, n: int, pool: tuple[int, int]) -> None:
    devices, tp = pool
    errors = found(prompts, n, devices, tp)
    assert (not errors) == legal(prompts, n, devices, tp)
    broken = [dp for dp in (devices // tp, devices) if prompts * n % dp]
    told = [int(re.findall(r"over the (\d+) data-parallel ranks", error.message)[0]) for error in errors]
    assert told == list(dict.fromkeys(broken))
    for error in errors:
        (help_,) = error.help
        counts, _, ns = help_.removeprefix("nearest that divide: ").partition("; or n = ")
        said = [int(number) for number in re.findall(r"\d+", counts)]
        below = max((p for p in range(1, prompts) if legal(p, n, devices, tp)), default=None)
        above = next(p for p in range(prompts, 1000) if legal(p, n, devices, tp))
        assert said == [p for p in (below, above) if p is not None]
        below = max((m for m in range(1, n) if legal(prompts, m, devices, tp)), default=None)
        above = next(m for m in range(n, 1000) if legal(prompts, m, devices, tp))
        assert [int(number) for number in re.findall(r"\d+", ns)] == [m for m in (below, above) if m is not None]


def test_every_stage_has_its_own_ranks() -> None:
    """24 samples fit the 12 replicas of the rollout, not the 48 ranks of what follows, which is told once."""
    (error,) = found(24, 1, 48, 4)
    assert error.message == "24 samples do not divide over the 48 data-parallel ranks of `ref`"
    assert error.span is not None
    assert error.span.text.startswith("reference.logprobs")


@pytest.mark.parametrize("select", ["best_of", "best_worst", "mixed_groups"])
def test_a_selection_keeps_groups_whole(select: str) -> None:
    assert found(3, 4, 6, 1) == ()
    (error,) = found(3, 4, 6, 1, select)
    words = "3 prompts do not divide over 6 data-parallel ranks of pool `main`, and `kept` needs whole groups on a rank"
    assert error.message == words
    assert error.help == ("nearest that divide: 6 prompts",)
    assert found(6, 4, 6, 1, select) == ()
    assert found(4, 4, 8, 2, "best_worst") == (), "the 4 replicas that sample hold the groups"

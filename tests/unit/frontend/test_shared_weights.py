"""`value(model, shared = true)`: a head on the model's own body, and what makes no sense with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.diagnostics import CompileError, SourceFile
from rlflow.driver import compile, context_of
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse
from rlflow.ir.flow import EdgeKind, Flow
from rlflow.passes.pipeline import run_pipeline
from rlflow.plan import Plan

FLOW = """\
flow f {
  data d = reasoning_gym("chain_sum", size = 9)
  model m = tiny(qwen3, alphabet = "0123456789")
  model c = CRITIC
  reward e = scorer(d)
  step {
    s = m.generate(d.take(4 prompts), n = 2, max_new = 4 tokens)
    points = e(s)
    v = c.values(s)
    STEP
  }
}
"""
JOINT = """m.train(s, advantages = gae(points, v), returns = returns(points, v), values = v,
            loss = ppo_clip(0.2) + 0.5 * value_clip(0.2), optimizer = adamw(1e-3))"""
APART = """c.train(s, returns = returns(points, v), values = v, loss = value_clip(0.2), optimizer = adamw(1e-3))
    m.train(s, advantages = gae(points, v), loss = ppo_clip(0.2), optimizer = adamw(1e-3))"""


def text(step: str = JOINT, critic: str = "value(m, shared = true)") -> str:
    return FLOW.replace("STEP", step).replace("CRITIC", critic)


def codes(source: str) -> list[str]:
    try:
        lowered = lower(parse(SourceFile("f.rlflow", source)), None)
        context = context_of(lowered)
        run_pipeline(lowered.flow, context)
    except CompileError as error:
        return [d.code for d in error.diagnostics]
    return [d.code for d in (*lowered.warnings, *context.diagnostics)]


def flow_of(source: str) -> Flow:
    lowered = lower(parse(SourceFile("f.rlflow", source)), None)
    return run_pipeline(lowered.flow, context_of(lowered))


def test_one_loss_for_both_is_sound() -> None:
    assert codes(text()) == []


def test_a_critic_of_its_own_is_as_before() -> None:
    assert codes(text(APART, "value(m)")) == []
    assert codes(text(JOINT, "value(m)")) == ["RLF1007"]


def test_the_head_is_no_model_with_a_train_of_its_own() -> None:
    assert codes(text(APART)) == ["RLF1021", "RLF1021"]


def test_a_loss_that_forgets_the_head() -> None:
    forgetful = "m.train(s, advantages = gae(points, v), loss = ppo_clip(0.2), optimizer = adamw(1e-3))"
    assert codes(text(forgetful)) == ["RLF1021"]
    assert codes(text(JOINT.replace("0.5", "0"))) == ["RLF1021"]


def test_the_loss_needs_returns_and_values() -> None:
    assert codes(text(JOINT.replace("returns = returns(points, v), ", ""))) == ["RLF1004"]


@pytest.mark.parametrize(
    "more",
    [
        ("model r = frozen(m)\n  model c2 = value(r, shared = true)", ["RLF1021"]),
        ("model c2 = value(m, shared = true)", ["RLF1021"]),
        ("model c2 = value(c, shared = true)", ["RLF1007"]),
    ],
)
def test_what_cannot_be_shared(more: tuple[str, list[str]]) -> None:
    source = text().replace("  reward e", f"  {more[0]}\n  reward e")
    used = "w = c2.values(s)\n    q = gae(points, w)\n    " + JOINT.replace("gae(points, v)", "gae(points, v) + 0 * q")
    assert codes(source.replace(JOINT, used)) == more[1]


def test_a_head_on_a_model_that_nothing_trains() -> None:
    source = text().replace("  reward e", '  model b = tiny(qwen3, alphabet = "0123456789")\n  reward e')
    source = source.replace("value(m, shared = true)", "value(b, shared = true)")
    plain = "m.train(s, advantages = gae(points, v), loss = ppo_clip(0.2), optimizer = adamw(1e-3))"
    assert codes(source.replace(JOINT, plain)) == ["RLF1021"]


def test_values_of_another_head() -> None:
    source = text().replace("  reward e", "  model other = value(m)\n  reward e")
    source = source.replace(JOINT, "w = other.values(s)\n    " + JOINT.replace("values = v", "values = w"))
    assert codes(source) == ["RLF1021"]


def test_the_critic_reads_what_the_actor_trains() -> None:
    flow = flow_of(text())
    channels = {(e.src, e.dst) for e in flow.edges if e.kind is EdgeKind.WEIGHTS}
    assert channels == {("m.train", "s"), ("m.train", "v")}
    assert [name for name, model in flow.models.items() if model.trainable] == ["m"]
    assert (flow.owner_of("c"), flow.owner_of("m"), flow.owner_of("nobody")) == ("m", "m", "nobody")


SCHEDULE = """\
schedule f on pod {
  pool one = 2 devices
  pool two = 2 devices
  place m, c on one
}
cluster pod {
  host = 4 * cpu
}
"""


def test_one_body_is_in_one_place() -> None:
    alone = SCHEDULE.replace("  pool two = 2 devices\n", "")
    assert codes(text() + alone) == []
    assert codes(text() + SCHEDULE.replace("place m, c on one", "place m on one\n  place c on two")) == ["RLF4003"]


def test_the_plan_reads_back(tmp_path: Path) -> None:
    (tmp_path / "f.rlflow").write_text(text(), "utf-8")
    plan = compile(tmp_path / "f.rlflow")
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.channels[0].readers == ("s", "v")

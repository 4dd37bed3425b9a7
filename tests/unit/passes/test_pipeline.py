"""The runner: it verifies, observes, names whose fault it is; and why each inserted instruction is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from rlflow.diagnostics import CompileError
from rlflow.driver import compile as compile_flow
from rlflow.ir.flow import Flow, Stage
from rlflow.ir.parser import parse_flow
from rlflow.ir.printer import print_flow
from rlflow.passes import pipeline
from rlflow.passes.base import Pass, PassContext
from rlflow.passes.pipeline import DEFAULT_PIPELINE, PASSES, InternalError, load_pass, run_pipeline
from rlflow.plan import Because, Plan

ROOT = Path(__file__).parents[3]

FLOW = """\
flow f {
  data d = reasoning_gym("chain_sum", size = 9)
  model m = hf("m")
  reward e = scorer(d)
  step {
    s = m.generate(d.take(4 prompts), n = 2, max_new = 4 tokens)
    score = e(s)
    adv = group_normalize(score)
    m.train(s, advantages = adv, loss = ppo_clip(), optimizer = adamw(1e-3), minibatch = 4 samples)
  }
  evaluate held every 2 steps { a = m.generate(d.all(), max_new = 1 token) g = e(a) }
}
"""
SOUND = parse_flow("""\
flow @f stage=logical {} {
  data @d = reasoning_gym {size=9, task="t"}
  %b = take() {count=2, data="d"} : rows<prompt 2 of b; uid:i64>
}
""")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    file = tmp_path / "f.rlflow"
    file.write_text(FLOW, "utf-8")
    return compile_flow(file)


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_pass_is_in_the_pipeline_and_named_like_its_file() -> None:
    assert set(PASSES) == set(DEFAULT_PIPELINE)
    for name, (module, _) in PASSES.items():
        assert load_pass(name).name == name
        assert module.rpartition(".")[2].replace("_", "-") == name


def test_stages_of_neighbours_meet() -> None:
    stage = Stage.LOGICAL
    for name in DEFAULT_PIPELINE:
        assert load_pass(name).requires is stage
        stage = load_pass(name).ensures
    assert stage is Stage.SCHEDULED


@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_has_a_positive_a_negative_and_where_it_can_fail_an_error_case(name: str) -> None:
    folder = ROOT / "tests" / "filecheck" / "passes" / name.replace("-", "_")
    kinds = {file.stem.partition("_")[0] for file in folder.iterdir()}
    assert {"positive", "negative"} <= kinds
    source = (ROOT / "passes" / f"{name.replace('-', '_')}.py").read_text("utf-8")
    assert ("error" in kinds) == ("context.error(" in source)


# --- the runner ------------------------------------------------------------------------------------------------------


class Fake(Pass):
    name: ClassVar[str] = "fake"
    requires: ClassVar[Stage] = Stage.LOGICAL
    ensures: ClassVar[Stage] = Stage.LOGICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        return flow


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fake]]:
    monkeypatch.setattr(pipeline, "load_pass", lambda name: Fake)
    original = Fake.run
    yield Fake
    Fake.run = original  # type: ignore[method-assign]


def test_observer_sees_before_and_after(fake: type[Fake]) -> None:
    changed = replace(SOUND, seed=5)
    fake.run = lambda self, flow, context: changed  # type: ignore[method-assign]
    seen: list[tuple[str, Flow, Flow]] = []
    assert run_pipeline(SOUND, PassContext(), ["fake"], lambda *args: seen.append(args)) is changed
    assert seen == [("fake", SOUND, changed)]


def test_a_raising_pass_is_our_fault_and_keeps_the_last_flow(fake: type[Fake]) -> None:
    def run(self: Pass, flow: Flow, context: PassContext) -> Flow:
        raise ZeroDivisionError("oh")

    fake.run = run  # type: ignore[method-assign]
    with pytest.raises(InternalError) as caught:
        run_pipeline(SOUND, PassContext(), ["fake"])
    assert str(caught.value) == "pass fake: ZeroDivisionError: oh"
    assert caught.value.flow_text == print_flow(SOUND)


def test_a_pass_that_breaks_the_flow_is_our_fault(fake: type[Fake]) -> None:
    fake.run = lambda self, flow, context: replace(flow, data={})  # type: ignore[method-assign]
    with pytest.raises(InternalError, match="pass fake: b takes from the unknown data d"):
        run_pipeline(SOUND, PassContext(), ["fake"])


def test_a_pass_that_leaves_another_stage_is_our_fault(fake: type[Fake]) -> None:
    fake.run = lambda self, flow, context: replace(flow, stage=Stage.PLACED, nodes={})  # type: ignore[method-assign]
    with pytest.raises(InternalError, match="left a flow of stage PLACED"):
        run_pipeline(SOUND, PassContext(), ["fake"])


def test_an_error_that_a_pass_reports_is_the_users(fake: type[Fake]) -> None:
    def run(self: Pass, flow: Flow, context: PassContext) -> Flow:
        context.error("RLF2003", "too small")
        return flow

    fake.run = run  # type: ignore[method-assign]
    with pytest.raises(CompileError, match="too small"):
        run_pipeline(SOUND, PassContext(), ["fake"])


def test_wrong_stage_and_broken_input_are_refused() -> None:
    with pytest.raises(InternalError, match="pass schedule: needs a flow of stage PHYSICAL, got LOGICAL"):
        run_pipeline(SOUND, PassContext(), ["schedule"])
    with pytest.raises(InternalError, match="unknown data d"):
        run_pipeline(replace(SOUND, data={}), PassContext(), [])


# --- why it is there -------------------------------------------------------------------------------------------------


def places(plan: Plan) -> dict[str, tuple[Because, str]]:
    """Of every instruction of the step and stage: why, and the text it points at."""
    lines = FLOW.splitlines()
    (program,) = plan.programs
    found: dict[str, tuple[Because, str]] = {}
    for item in (*program.step, *plan.stages):
        span = item.because.span
        end = span.end_column - 1 if span.end_line == span.line else None
        found[item.id] = (item.because, lines[span.line - 1][span.column - 1 : end])
    return found


@pytest.mark.parametrize(
    ("item", "reason", "inserted_by", "text"),
    [
        ("run:m.train.old", "old-logprobs", "insert-old-logprobs", "m.train("),
        ("m.train.old", "old-logprobs", "insert-old-logprobs", "m.train("),
        ("publish:m", "weights-changed", "insert-weight-edges", "m.train("),
        ("wait:score", "asynchronous-call", "schedule", "group_normalize(score)"),
        ("checkpoint", "keep-progress", "freeze", "flow f {"),
        ("run:m.train", "written", "", "m.train("),
        ("take:d.take", "written", "", "d.take(4 prompts)"),
        ("run:score", "written", "", "e(s)"),
    ],
)
def test_because(item: str, reason: str, inserted_by: str, text: str, plan: Plan) -> None:
    because, place = places(plan)[item]
    assert (because.reason, because.inserted_by) == (reason, inserted_by)
    assert place.startswith(text)
    assert Path(because.span.file).name == "f.rlflow"


def test_everything_points_somewhere(plan: Plan) -> None:
    assert all(because.span.line > 0 for because, _ in places(plan).values())

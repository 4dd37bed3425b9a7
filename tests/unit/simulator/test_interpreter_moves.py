"""When copies from the host begin, by hand-worked lists."""

from __future__ import annotations

from rlflow.backends.simulator.interpreter_moves import Start, starts_of
from rlflow.plan import Because, Instruction, MoveObject, RunStage
from rlflow.plan_parts import SpanRef

WHY = Because(reason="memory", span=SpanRef(file="f", line=1, column=1, end_line=1, end_column=2))
TIMES = {"a": 10, "b": 20, "c": 5, "nothing": 0}


def run(stage: str) -> RunStage:
    return RunStage(id=f"run:{stage}", stage=stage, because=WHY)


def move(kind: str, name: str, us: int = 0, exposed: int = 0) -> MoveObject:
    return MoveObject.model_validate(
        {
            "kind": kind,
            "id": f"{kind}:{name}",
            "object": name,
            "bytes": us,
            "us": us,
            "exposed_us": exposed,
            "because": WHY,
        }
    )


def starts(instructions: list[Instruction]) -> dict[int, list[Start]]:
    return starts_of(instructions, TIMES.__getitem__)


def test_a_copy_begins_with_the_last_stage_that_is_long_enough() -> None:
    onload = move("onload", "x", 15)
    assert starts([move("drop", "x"), run("a"), run("b"), onload, run("c")]) == {2: [Start(onload, 0)]}


def test_a_longer_copy_begins_earlier() -> None:
    onload = move("onload", "x", 25)
    assert starts([move("drop", "x"), run("a"), run("nothing"), run("b"), onload, run("c")]) == {1: [Start(onload, 0)]}


def test_only_the_hidden_part_begins_ahead() -> None:
    onload = move("onload", "x", 25, exposed=8)
    assert starts([move("drop", "x"), run("a"), run("b"), onload, run("c")]) == {2: [Start(onload, 0)]}
    waited = move("onload", "x", 25, exposed=25)
    assert starts([move("drop", "x"), run("a"), run("b"), waited, run("c")]) == {}


def test_two_copies_share_the_link() -> None:
    """The later one has the stage just before it, so the other one has what is left of it and the stage before."""
    first, second = move("onload", "x", 15), move("onload", "y", 12)
    gone = [move("drop", "x"), move("drop", "y")]
    found = starts([*gone, run("a"), run("b"), first, second, run("c")])
    assert found == {3: [Start(second, 0)], 2: [Start(first, 0)]}


def test_a_copy_around_the_end_belongs_to_the_next_step() -> None:
    onload = move("onload", "x", 15)
    assert starts([onload, run("a"), move("offload", "x", 3), run("b"), run("c")]) == {3: [Start(onload, 1)]}


def test_no_copy_begins_before_its_object_has_left() -> None:
    onload = move("onload", "x", 100)
    assert starts([run("a"), move("drop", "x"), run("b"), onload, run("c")]) == {2: [Start(onload, 0)]}

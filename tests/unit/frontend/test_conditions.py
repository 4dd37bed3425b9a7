"""Conditions over parameters: which branch is lowered, what is said about the other, and what `--set` does to both."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from typing import Any

import pytest

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.diagnostics.render import FORMATS, render
from rlflow.frontend.lower import Lowered, lower
from rlflow.grammar.parse import parse
from rlflow.ir import ops

FLOW = """\
flow f(kl = 0.1, mode = "plain", judged = false, limit = 8 tokens, n = 4) {
  data   sums  = reasoning_gym("chain_sum", size = 64)
  model  actor = tiny(qwen3, alphabet = "0123456789+-=. ")
  reward exact = scorer(sums)
  if kl > 0 {
    model first = frozen(actor)
  }
  step {
    batch = sums.take(4 prompts)
    samples = actor.generate(batch, n = n, max_new = 16 tokens if mode == "long" else limit)
    score = exact(samples)
    adv = group_normalize(score)
    if kl > 0 {
      ref = first.logprobs(samples)
      actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + kl * kl(k3),
                  optimizer = adamw(lr = 1e-4))
    } else {
      actor.train(samples, advantages = adv, loss = ppo_clip(0.3), optimizer = adamw(lr = 1e-4))
    }
  }
  if judged and not (mode == "plain") {
    evaluate heldout every 5 steps {
      rows = sums.all()
      answers = actor.generate(rows, max_new = 8 tokens)
      grade = exact(answers)
    }
  } else if n >= 8 {
    stop after 3 steps
  }
}
"""


def run(*edits: tuple[str, str], overrides: tuple[str, ...] = ()) -> Lowered:
    text = FLOW
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return lower(parse(SourceFile("f.rlflow", text)), None, overrides=overrides)


def problems(*edits: tuple[str, str], overrides: tuple[str, ...] = ()) -> list[Any]:
    with pytest.raises(CompileError) as caught:
        run(*edits, overrides=overrides)
    return list(caught.value.diagnostics)


def clip(lowered: Lowered) -> float:
    op = lowered.flow.nodes["actor.train"].op
    assert isinstance(op, ops.Train)
    term = op.loss[0]
    assert isinstance(term, ops.PpoClip)
    return term.clip_low


def test_the_branch_that_is_taken_is_lowered() -> None:
    lowered = run()
    assert list(lowered.flow.nodes) == ["batch", "samples", "score", "adv", "ref", "actor.train"]
    assert list(lowered.flow.models) == ["actor", "first"]
    assert lowered.warnings == ()
    assert clip(lowered) == 0.2


def test_an_override_takes_the_other_branch() -> None:
    lowered = run(overrides=("kl=0",))
    assert list(lowered.flow.nodes) == ["batch", "samples", "score", "adv", "actor.train"]
    assert list(lowered.flow.models) == ["actor"]
    assert clip(lowered) == 0.3
    assert lowered.warnings == ()


@pytest.mark.parametrize(
    ("overrides", "max_new", "evaluations", "stop"),
    [
        ((), 8, 0, None),
        (("mode=long",), 16, 0, None),
        (('mode="long"', "judged=true"), 16, 1, None),
        (("judged=true",), 8, 0, None),
        (("n=8",), 8, 0, 3),
        (("n=8", "judged=true", "mode=x"), 8, 1, None),
        (("limit=9 tokens",), 9, 0, None),
    ],
)
def test_conditions(overrides: tuple[str, ...], max_new: int, evaluations: int, stop: int | None) -> None:
    flow = run(overrides=overrides).flow
    op = flow.nodes["samples"].op
    assert isinstance(op, ops.Generate)
    assert op.max_new == max_new
    assert len(flow.evaluations) == evaluations
    assert flow.stop_steps == stop


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("1 < 2", True), ("2 <= 1", False), ("1 == 1.0", True), ("1 != 1", False), ("2 > 1", True), ("1 >= 2", False),
        ("5 s == 5000 ms", True), ("1 GiB > 1 GB", True), ("50% < 75%", True), ('"a" == "a"', True),
        ('"a" != "b"', True), ("true == true", True), ("none == none", True), ('"a" == none', False),
        ("not false", True), ("true and false", False), ("true or false", True), ("false and 1 / 0 > 1", False),
        ("true or 1 / 0 > 1", True), ("not (1 < 2) or 3 > 2", True), ("(1 < 2) == (3 < 4)", True),
        ("[1, 2] == [1, 2]", True), ("(true if 1 < 2 else false)", True),
    ],
)  # fmt: skip
def test_values_of_conditions(condition: str, holds: bool) -> None:
    lowered = run(("if kl > 0 {\n      ref", f"if ({condition}) {{\n      ref"))
    assert ("ref" in lowered.flow.nodes) == holds


@pytest.mark.parametrize(
    ("condition", "code", "says", "place"),
    [
        ("kl", "RLF1007", "a condition is true or false", "kl"),
        ("kl > 0 s", "RLF1005", "cannot compare", "kl > 0 s"),
        ('kl == "x"', "RLF1007", "cannot compare", 'kl == "x"'),
        ('mode > "a"', "RLF1007", "`>` needs numbers", "mode"),
        ("kl > 0 and mode", "RLF1007", "a condition is true or false", "mode"),
        ("not 1", "RLF1007", "a condition is true or false", "1"),
        ("score > 0", "RLF1007", "`score` is known only in the run", "score"),
        ("actor == 1", "RLF1007", "`actor` is known only in the run", "actor"),
        ("exact(samples) > 0", "RLF1007", "a call is known only in the run", "exact(samples)"),
        ("kk > 0", "RLF1001", "unknown parameter `kk`", "kk"),
        ("1 / 0 > 1", "RLF1010", "division by zero", "0"),
        ("kl > 1 stepz", "RLF1006", "unknown unit `stepz`", "1 stepz"),
    ],
)
def test_wrong_condition_is_one_error(condition: str, code: str, says: str, place: str) -> None:
    (error,) = problems(("if kl > 0 {\n      ref", f"if {condition} {{\n      ref"))
    assert (error.code, error.span.text) == (code, place)
    assert says in error.message
    (error,) = problems(('if mode == "long" else', f"if {condition} else"))
    assert (error.code, error.span.text) == (code, place)


def test_every_wrong_condition_is_reported() -> None:
    found = problems(("if kl > 0 {\n    model", "if x {\n    model"), ("else if n >= 8", "else if y"))
    assert [d.message for d in found] == ["unknown parameter `x`", "unknown parameter `y`"]


def test_names_of_the_branch_that_is_not_taken_are_explained() -> None:
    """`first` exists only with kl > 0."""
    (error,) = problems(("if kl > 0 {\n      ref", "if true {\n      ref"), overrides=("kl=0",))
    assert error.code == "RLF1001"
    assert "first" in error.message
    assert error.labels[-1].text == "defined only here, in a branch that is not taken"
    assert error.labels[-1].span.text == "first"
    run(("if kl > 0 {\n      ref", "if true {\n      ref"))


def test_what_only_the_other_branch_uses_is_no_warning() -> None:
    edit = ("  if kl > 0 {\n    model first = frozen(actor)\n  }\n", "  model first = frozen(actor)\n")
    assert run(edit, overrides=("kl=0",)).warnings == ()
    unused = ("  if kl > 0 {\n    model first", "  model second = frozen(actor)\n  if kl > 0 {\n    model first")
    assert [w.message for w in run(unused, overrides=("kl=0",)).warnings] == ["model `second` is never used"]


def test_the_other_branch_must_be_text_of_the_language_with_units_and_parameters_that_exist() -> None:
    (error,) = problems(("ppo_clip(0.3)", "ppo_clip(3 stepz)"))
    assert error.code == "RLF1006"
    (error,) = problems(("} else if n >= 8 {\n    stop", "} else if n >= 8 {\n if nn > 1 { seed 3 }\n    stop"))
    assert error.message == "unknown parameter `nn`"
    run(("ppo_clip(0.3)", "no_such_loss(0.3)"))
    (error,) = problems(("ppo_clip(0.3)", "no_such_loss(0.3)"), overrides=("kl=0",))
    assert error.code == "RLF1001"


def test_values_are_visible_after_the_branch() -> None:
    lowered = run(
        ("    adv = group_normalize(score)\n", "    if n > 2 { adv = group_normalize(score) } else { adv = score }\n")
    )
    assert "adv" in lowered.flow.nodes


def test_values_of_the_step_may_be_chosen() -> None:
    edit = ("advantages = adv, loss = ppo_clip(0.3)", "advantages = adv if n > 2 else score, loss = ppo_clip(0.3)")
    flow = run(edit, overrides=("kl=0",)).flow
    assert "adv" in flow.inputs("actor.train").values()
    flow = run(edit, overrides=("kl=0", "n=2")).flow
    assert "adv" not in flow.inputs("actor.train").values()


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (("kl=0", "ref.samples=x"), "ref"),
        (("kl=0", "first.of=actor"), "first"),
        (("heldout.every=3",), "heldout"),
        (("heldout.answers.max_new=3",), "heldout"),
    ],
)
def test_override_into_a_branch_that_is_not_taken(overrides: tuple[str, ...], path: str) -> None:
    (error,) = problems(overrides=overrides)
    assert error.code == "RLF1011"
    assert "in a branch that is not taken" in error.message
    assert error.labels[1].span.text == path


def test_override_into_the_branch_that_is_taken() -> None:
    assert clip(run(overrides=("actor.train.loss=ppo_clip(0.5)",))) == 0.5
    assert clip(run(overrides=("kl=0", "actor.train.loss.low=0.5"))) == 0.5
    flow = run(overrides=("judged=true", "mode=x", "heldout.answers.max_new=3", "heldout.every=2")).flow
    assert flow.evaluations[0].every == 2


def test_a_value_that_is_set_may_be_conditional() -> None:
    op = run(overrides=("samples.top_k=5 if n > 2 else 7",)).flow.nodes["samples"].op
    assert isinstance(op, ops.Generate)
    assert op.top_k == 5
    assert clip(run(overrides=("actor.train.loss=ppo_clip(0.4) if n > 9 else ppo_clip(0.6)",))) == 0.6


def test_defaults_of_parameters_may_be_conditional() -> None:
    edit = ("n = 4)", "n = 8 if kl > 0.05 else 2)")
    assert run(edit).flow.stop_steps == 3
    assert run(edit, overrides=("kl=0",)).flow.stop_steps is None


def test_schedules_may_choose_constants() -> None:
    text = FLOW + "schedule f { pool main = 4 devices if n == 4 else 2 devices }\n"
    assert lower(parse(SourceFile("f", text)), None).schedule.pools[0].devices == 4
    assert lower(parse(SourceFile("f", text)), None, overrides=("n=8",)).schedule.pools[0].devices == 2


@pytest.mark.parametrize(
    "after",
    ["(score + score).foo()", "(score)", "(1 - score).x"],
)
def test_a_statement_cannot_begin_with_a_bracket(after: str) -> None:
    found = problems(("score = exact(samples)\n", f"score = exact(samples)\n    {after}\n"))
    assert found[0].code == "RLF1007"
    assert "the `(` on line 12 goes on with the line before" in found[0].help[-1]
    run(("score = exact(samples)\n", "score = exact\n    (samples)\n"))


def test_the_same_under_every_hash_seed() -> None:
    code = (
        "from rlflow.diagnostics import CompileError, Diagnostic, SourceFile, render\n"
        "from rlflow.frontend.lower import lower\n"
        "from rlflow.grammar.parse import parse\n"
        "from rlflow.ir.printer import print_flow\n"
        "text = open(0).read()\n"
        "print(print_flow(lower(parse(SourceFile('f', text)), None).flow))\n"
        "for o in (['kl=0', 'ref.x=1'], ['kl=y'], ['kl=0', 'first.of=1', 'bach.n=1']):\n"
        "    try: lower(parse(SourceFile('f', text)), None, overrides=o)\n"
        "    except CompileError as e: print([(d.message, d.notes, d.help) for d in e.diagnostics])\n"
    )
    outputs = set()
    for seed in ("0", "1", "77"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], input=FLOW, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


# --- errors, not crashes ---------------------------------------------------------------------------------------------

TOKEN = re.compile(r'"[^"\n]*"|[\d.]+(?:e-?\d+)?(?: ?(?:%|[A-Za-z]+\b))?|[A-Za-z_]\w*|[<>=!]=|\S')
ODD = [
    "if", "else", "and", "or", "not", "import", "environment", "{", "}", "(", ")", "==", "<", "0", "1 / 0", '"x"',
    "true", "none", "kl", "mode", "actor", "score", "1 step", "1 stepz", "[1]", "1e400", "actor.generate",
    "exact(samples)", "if kl > 0 {", "} else {", "1 if kl > 0 else 2",
]  # fmt: skip


def check_answer(text: str, overrides: tuple[str, ...] = ()) -> None:
    """Lowered, or diagnostics that say something once."""
    found: tuple[Diagnostic, ...] = ()
    try:
        lower(parse(SourceFile("x.rlflow", text)), None, overrides=overrides)
    except CompileError as error:
        found = error.diagnostics or (Diagnostic("RLF9001", "an error without diagnostics: Token("),)
    for format in FORMATS:
        render(found, format)
    for diagnostic in found:
        assert diagnostic.labels
        assert not re.search(r"Token\(|object at 0x|nodes\.|Qty\(", diagnostic.message)
    assert len(found) == len(set(found)), "nothing is said twice"


@pytest.mark.parametrize("seed", range(6))
def test_any_mutation_is_answered(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        text = FLOW
        for _ in range(chance.choice((1, 1, 2))):
            tokens = list(TOKEN.finditer(text))
            target = chance.choice(tokens)
            new = chance.choice((chance.choice(ODD), chance.choice(tokens)[0], ""))
            text = f"{text[: target.start()]}{new} {text[target.end() :]}"
        check_answer(text, chance.choice(((), ("kl=0",), ("n=9", "judged=true"), ("first.of=x",), ("mode=if",))))


@pytest.mark.parametrize("levels", [30, 60, 190, 800])
@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("if n > 3 {\n", "}"),
        ("if n < 3 { } else {\n", "}"),
        ("if n < 3 { x = y } else\n", ""),
    ],
)
def test_deep_conditions(start: str, end: str, levels: int) -> None:
    inner = "if true { z = group_normalize(score) } " if not end else "z = group_normalize(score) "
    text = FLOW.replace(
        "    if kl > 0 {\n      ref", start * levels + inner + end * levels + "\n    if kl > 0 {\n      ref"
    )
    check_answer(text)
    check_answer(text, ("n=1",))


@pytest.mark.parametrize("levels", [30, 90, 190, 800])
@pytest.mark.parametrize(
    ("start", "end"), [("not ", ""), ("(", ")"), ("1 if kl > 0 else ", ""), ("f(", ")"), ("kl > 0 and ", "")]
)
def test_deep_expressions(start: str, end: str, levels: int) -> None:
    value = start * levels + "true" + end * levels
    check_answer(FLOW.replace("n = n,", f"n = {value},"))
    check_answer(FLOW.replace("if judged and", f"if {value} and"))
    check_answer(FLOW, (f"kl={value}", f"samples.n={value}"))

"""For any tree: it prints to text that parses back. For any text: formatting keeps tree and comments, and is final."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.diagnostics import SourceFile
from rlflow.grammar import nodes
from rlflow.grammar.comments import comments_of
from rlflow.grammar.format import format_text, shape
from rlflow.grammar.generate import lark_parser
from rlflow.grammar.parse import parse, parse_expression
from rlflow.grammar.printer import print_tree

ROOT = Path(__file__).parents[3]


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made = _load("rlflow_strategies", ROOT / "tests" / "strategies.py")
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

DESIGN = (Path(__file__).with_name("design.rlflow")).read_text("utf-8")
EXAMPLES = {"design": DESIGN} | {p.name: p.read_text("utf-8") for p in sorted((ROOT / "examples").glob("*.rlflow"))}


@relaxed
@given(made.expressions)
def test_expression_prints_and_parses_back(tree: nodes.Expr) -> None:
    assert shape(parse_expression(SourceFile("x", print_tree(tree)))) == shape(tree)


@relaxed
@given(made.programs)
def test_program_prints_and_parses_back(tree: nodes.Program) -> None:
    text = print_tree(tree)
    assert shape(parse(SourceFile("x", text))) == shape(tree)
    assert format_text(SourceFile("x", text)) == text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


def tokens(text: str) -> list[tuple[str, str]]:
    """The tokens of a text that parses, each with the white space and comments before it; at last the end.

    An `if` between two values goes with the token before it: a new line there would make it a statement.
    """
    found: list[tuple[str, str]] = []
    at = 0
    for token in lark_parser("start").parse_interactive(text).iter_parse():
        if token.type == "_INLINE_IF":
            gap, before = found.pop()
            found.append((gap, before + str(token)))
        else:
            found.append((text[at : token.start_pos], str(token)))
        at = token.end_pos or 0
    return [*found, (text[at:], "")]


NOISE = ("", "", " ", "\n", "\n\n\n", "\t ", "\r\n", "\f", " #{}\n", '#  ü \\" {}  \n', "\n\n # {}\n\n\n", "\n#{}\n#\n")


@st.composite
def noisy(draw: st.DrawFn, text: str) -> str:
    """The same program with comments, blank lines and odd white space between its tokens."""
    parts: list[str] = []
    for number, (gap, token) in enumerate(tokens(text)):
        noise = draw(st.sampled_from(NOISE)).format(number)
        parts += [gap, noise, token]
    return "".join(parts)


def check_formatting(text: str, clean: str) -> None:
    program = parse(SourceFile("x", text))
    assert shape(program) == shape(parse(SourceFile("x", clean))), "the noise changed the program"
    once = format_text(SourceFile("x", text))
    assert shape(parse(SourceFile("x", once))) == shape(program)
    assert comments_of(once) == comments_of(text)
    assert format_text(SourceFile("x", once)) == once
    assert "\n\n\n" not in once
    assert not re.search(r"[ \t\r\f]$|\A\n|\n\n\Z", once, re.MULTILINE)


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_noisy_example(name: str, data: st.DataObject) -> None:
    check_formatting(data.draw(noisy(EXAMPLES[name])), EXAMPLES[name])


@relaxed
@given(data=st.data())
def test_noisy_random_program(data: st.DataObject) -> None:
    clean = print_tree(data.draw(made.programs))
    check_formatting(data.draw(noisy(clean)), clean)


@relaxed
@given(made.programs, st.data())
def test_line_length_does_not_matter_for_the_tree(tree: nodes.Program, data: st.DataObject) -> None:
    """Every layout decision the other way round still gives the same program."""
    from rlflow.grammar import layout

    width, layout.WIDTH = layout.WIDTH, data.draw(st.integers(1, 40))
    try:
        assert shape(parse(SourceFile("x", print_tree(tree)))) == shape(tree)
    finally:
        layout.WIDTH = width

"""`if`, conditions, `a if c else b`, `environment` and `import` as text and tree."""

from __future__ import annotations

import pytest

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.grammar import nodes
from rlflow.grammar.format import format_text, shape
from rlflow.grammar.parse import parse, parse_expression
from rlflow.grammar.printer import print_tree
from rlflow.grammar.words import ITEM_WORDS, UNIT_WORDS


def expression(text: str) -> nodes.Expr:
    return parse_expression(SourceFile("x", text))


def step(text: str) -> tuple[nodes.Statement | nodes.If, ...]:
    (flow,) = parse(SourceFile("x", f"flow f {{ step {{\n{text}\n}} }}")).flows
    (block,) = flow.items
    assert isinstance(block, nodes.Step)
    return block.body


def problem(text: str) -> Diagnostic:
    with pytest.raises(CompileError) as caught:
        parse(SourceFile("x", text))
    return caught.value.diagnostics[0]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a or b and c", "a or (b and c)"),
        ("a and b or c and d", "(a and b) or (c and d)"),
        ("not a and b", "(not a) and b"),
        ("not a == b", "not (a == b)"),
        ("a + 1 < b * 2", "(a + 1) < (b * 2)"),
        ("a if b else c if d else e", "a if b else (c if d else e)"),
        ("a + b if c or d else e", "(a + b) if (c or d) else e"),
        ("a or b or c", "(a or b) or c"),
        ("not not a", "not (not a)"),
        ("-a < -b", "(-a) < (-b)"),
    ],
)
def test_precedence(text: str, same: str) -> None:
    assert shape(expression(text)) == shape(expression(same))
    assert print_tree(expression(same)) == text


@pytest.mark.parametrize("text", ["a < b < c", "a == b == c", "a if b", "not", "a and", "if a else b", "a else b"])
def test_no_expression(text: str) -> None:
    with pytest.raises(CompileError):
        expression(text)


def test_parentheses_stay_where_they_matter() -> None:
    for text in (
        "(a if b else c) + 1",
        "(a or b) and c",
        "not (a and b)",
        "(a < b) == c",
        "(a if b else c) if d else e",
    ):
        assert print_tree(expression(text)) == text


def test_if_at_the_start_of_a_line_is_a_statement() -> None:
    assign, branch = step("a = b\nif c { d() }")
    assert isinstance(assign, nodes.Assign)
    assert isinstance(assign.value, nodes.Name)
    assert isinstance(branch, nodes.If)
    (assign,) = step("a = b if c else d")
    assert isinstance(assign, nodes.Assign)
    assert isinstance(assign.value, nodes.Conditional)
    (assign,) = step("a = f(\n)if c\n  else\n  d")
    assert isinstance(assign, nodes.Assign)
    assert isinstance(assign.value, nodes.Conditional)
    _, branch, _ = step("a = b # c if d\n if c {} else { }\n x()")
    assert isinstance(branch, nodes.If)
    assert branch.otherwise == ()


def test_else_if_is_a_chain() -> None:
    (branch,) = step("if a { x() } else if b { y() } else { z() }")
    assert isinstance(branch, nodes.If)
    assert isinstance(branch.otherwise, nodes.If)
    assert isinstance(branch.otherwise.otherwise, tuple)
    (nested,) = step("if a { x() } else { if b { y() } }")
    assert isinstance(nested, nodes.If)
    assert isinstance(nested.otherwise, tuple)


def test_flow_items_and_statements_have_their_own_blocks() -> None:
    parse(SourceFile("x", "flow f { if a { model m = hf() step { } } else { stop after 3 steps } }"))
    assert problem("flow f { if a { x = 1 } }").span is not None
    assert problem("flow f { step { if a { step { } } } }").span is not None
    assert problem("schedule f { if a { auto } }").message == "unexpected `if`"


def test_one_equals_sign_in_a_condition() -> None:
    found = problem("flow f { step { if a = 0 { } } }")
    assert found.message == "unexpected `=`"
    assert found.help == ("`==` compares two values",)


def test_if_between_two_values_on_a_new_line() -> None:
    found = problem("flow f { step { a = f(b\n if c else d) } }")
    assert found.message == "unexpected `if`"
    assert found.help == ("the `if` of `a if c else b` stands on the line of `a`",)


def test_else_on_the_same_line_is_missed_by_name() -> None:
    found = problem("flow f { step { a = 1 if c { b = 2 } } }")
    assert "`else`" in found.labels[0].text


@pytest.mark.parametrize("word", [w for w in ITEM_WORDS if w not in UNIT_WORDS])
def test_no_keyword_is_a_unit(word: str) -> None:
    """One table: whatever is a keyword is none of a number's units."""
    with pytest.raises(CompileError) as caught:
        parse(SourceFile("x", f"flow f {{ step {{ a = f(1 {word}, 2) }} }}"))
    (found,) = caught.value.diagnostics
    assert found.code in ("RLF0001", "RLF0005")


def test_step_is_a_unit() -> None:
    assert isinstance(expression("1 step"), nodes.Quantity)


def test_numbers_before_words() -> None:
    for text in ("1 if a else 2", "a > 1 and b < 2 or c", "2 steps if a == 3 steps else 4 steps"):
        assert print_tree(expression(text)) == text


@pytest.mark.parametrize("word", ["if", "else", "and", "or", "not", "import", "environment"])
def test_new_words_are_reserved(word: str) -> None:
    assert problem(f"flow f {{ model {word} = hf() }}").code == "RLF0005"


@pytest.mark.parametrize("word", ["if", "else", "import", "environment", "data"])
def test_words_may_name_arguments_and_fields(word: str) -> None:
    call = expression(f"f({word} = 1, x.{word})")
    assert isinstance(call, nodes.Call)
    assert len(call.arguments) == 2


def test_environment_is_a_declaration() -> None:
    text = 'flow f {\n  environment calc = python("environments:Calculator", timeout = 5 s)\n}\n'
    program = parse(SourceFile("x", text))
    (item,) = program.flows[0].items
    assert isinstance(item, nodes.Declaration)
    assert item.kind == "environment"
    assert format_text(SourceFile("x", text)) == text


def test_imports_stand_first() -> None:
    text = 'import "a.rlflow"\n\nimport "rlflow:clusters"\n\nschedule f { auto }\n'
    program = parse(SourceFile("x", text))
    assert [item.path.value for item in program.imports] == ["a.rlflow", "rlflow:clusters"]
    assert format_text(SourceFile("x", text)) == text
    assert problem('schedule f { auto }\nimport "a"').message == "unexpected `import`"
    assert problem("import a").labels[0].text == "expected a text in quotes"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if a{b()}", "if a {\n  b()\n}"),
        ("if a{}else{}", "if a {} else {}"),
        ("if a { # why\nb() } # then\nelse { c() }", "if a {  # why\n  b()\n} else {  # then\n  c()\n}"),
        ("if (a) {x = 1\nlong = 2}", "if a {\n  x    = 1\n  long = 2\n}"),
        ("x = (a) if (b) else (c)", "x = a if b else c"),
        (
            "x = first_of_the_long_names_here if a_condition_that_is_long > 0 else second_of_the_long_names_here_",
            "x = first_of_the_long_names_here if a_condition_that_is_long > 0\n  else second_of_the_long_names_here_",
        ),
    ],
)
def test_style(text: str, expected: str) -> None:
    out = format_text(SourceFile("x", f"flow f {{ step {{\n{text}\n}} }}"))
    lines = [line.removeprefix("    ") for line in out.splitlines()[2:-2]]
    assert "\n".join(lines) == expected

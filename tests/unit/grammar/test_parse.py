"""Text to tree: what is written comes out, with exact places."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.diagnostics import CompileError, SourceFile, Span
from rlflow.grammar import nodes
from rlflow.grammar.parse import MAX_DEPTH, parse, parse_expression

DESIGN = (Path(__file__).parents[2] / "data" / "design_example.rlflow").read_text("utf-8")


def program(text: str) -> nodes.Program:
    return parse(SourceFile("x.rlflow", text))


def expression(text: str) -> nodes.Expr:
    return parse_expression(SourceFile("x.rlflow", text))


def without_spans(node: Any) -> Any:
    """The tree as plain tuples, to compare trees of texts that differ in layout only."""
    if isinstance(node, tuple):
        return tuple(without_spans(item) for item in node)
    if dataclasses.is_dataclass(node) and not isinstance(node, (SourceFile, Span)):
        fields = [f.name for f in dataclasses.fields(node) if f.name not in ("span", "file")]
        return (type(node).__name__, *((name, without_spans(getattr(node, name))) for name in fields))
    return node


def walk(node: Any) -> Iterator[Any]:
    if isinstance(node, tuple):
        for item in node:
            yield from walk(item)
    elif dataclasses.is_dataclass(node) and not isinstance(node, (SourceFile, Span)):
        if hasattr(node, "span"):
            yield node
        for field in dataclasses.fields(node):
            yield from walk(getattr(node, field.name))


# --- the design's example --------------------------------------------------------------------------------------------


def test_design_example_has_its_parts() -> None:
    tree = program(DESIGN)
    (flow,), (schedule,), (cluster,) = tree.flows, tree.schedules, tree.clusters
    assert (flow.name.text, schedule.flow.text, cluster.name.text) == ("grpo", "grpo", "pod")
    assert schedule.cluster is not None
    assert schedule.cluster.text == "pod"
    assert [item.name.text for item in flow.items if isinstance(item, nodes.Declaration)] == [
        "questions",
        "actor",
        "reference",
        "exact",
    ]
    (step,) = (item for item in flow.items if isinstance(item, nodes.Step))
    assert len(step.body) == 6
    assert [type(item).__name__ for item in schedule.items] == ["Pool"] * 2 + ["Place"] * 3 + ["Staleness", "Trigger"]
    host, hosts = cluster.entries
    assert [setting.name.text for setting in host.settings] == ["memory", "cpus"]
    assert hosts.settings == ()


def test_newlines_and_comments_do_not_matter() -> None:
    one_line = " ".join(re.sub(r"#.*", "", DESIGN).split())
    assert "\n" not in one_line
    assert without_spans(program(one_line).items) == without_spans(program(DESIGN).items)


def test_windows_newlines_and_tabs_do_not_matter() -> None:
    other = DESIGN.replace("\n", "\r\n").replace("    ", "\t")
    assert without_spans(program(other).items) == without_spans(program(DESIGN).items)


def test_every_span_is_the_text_of_its_node() -> None:
    for node in walk(program(DESIGN).items):
        text = node.span.text
        assert text == text.strip(), node
        match node:
            case nodes.Ident():
                assert text == node.text
            case nodes.Name():
                assert text == node.id
            case nodes.Quantity():
                assert re.fullmatch(r"[\d.]+ ?" + node.unit, text)
            case nodes.Number():
                assert float(text) == node.value
            case nodes.String():
                assert text == f'"{node.value}"'
            case nodes.Call():
                assert text.startswith(node.function.span.text + "(")
                assert text.endswith(")")
            case nodes.Declaration():
                assert text.startswith(node.kind)
            case nodes.Step() | nodes.Flow() | nodes.Cluster():
                assert text.startswith(type(node).__name__.lower())
                assert text.endswith("}")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (nodes.Assign, "batch   = questions.take(64 prompts)"),
        (nodes.Argument, "on_error = retry(2)"),
        (nodes.Binary, "ppo_clip(0.2) + 0.001 * kl(k3)"),
        (nodes.Allow, "allow actor staleness <= 2 steps with truncated_is(2.0)"),
        (nodes.Place, "place actor.train, reference   on learner with tp = 4, pp = 2"),
        (nodes.Staleness, "staleness actor = 1 step, admit in_order"),
        (nodes.Trigger, "trigger samples at 75%, carry partial"),
        (nodes.Entry, "hosts = 4 * host"),
        (nodes.Param, "group = 8"),
    ],
)
def test_span_of(kind: type, text: str) -> None:
    assert text in [node.span.text for node in walk(program(DESIGN).items) if isinstance(node, kind)]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1E+6", 1e6), ("1e5", 1e5), ("0.001", 0.001), ("1_000", 1000), ("0", 0), ("007", 7)],
)
def test_number(text: str, value: float) -> None:
    node = expression(text)
    assert isinstance(node, nodes.Number)
    assert node.value == value
    assert type(node.value) is type(value)
    assert node.span.text == text


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("64 prompts", 64, "prompts"),
        ("75%", 75, "%"),
        ("75 %", 75, "%"),
        ("1.5 TiB", 1.5, "TiB"),
        ("200 GB/s", 200, "GB/s"),
        ("5s", 5, "s"),
        ("1e5 s", 1e5, "s"),
        ("1e-3s", 1e-3, "s"),
        ("1\tstep", 1, "step"),
        ("1_000 tokens", 1000, "tokens"),
        ("3 bananas", 3, "bananas"),
    ],
)
def test_quantity(text: str, value: float, unit: str) -> None:
    node = expression(text)
    assert isinstance(node, nodes.Quantity)
    assert (node.value, node.unit, node.span.text) == (value, unit, text)


@pytest.mark.parametrize("text", ["5 s-2 s", "5 s - 2 s", "5 s+2 s", "3 prompts*2", "1e-3*2 s"])
def test_units_in_arithmetic(text: str) -> None:
    node = expression(text)
    assert isinstance(node, nodes.Binary)
    assert node.span.text == text


def test_unit_stands_on_the_line_of_its_number() -> None:
    tree = program("flow f { step { a = g(1\nb) } }".replace("1\nb", "1,\nb"))
    assert len(list(walk(tree.items))) > 5
    with pytest.raises(CompileError):
        program("flow f { step { a = g(1\nprompts) } }")


def test_next_key_is_no_unit() -> None:
    """`a = 1 b = 2` on one line are two entries."""
    (cluster,) = program("cluster c { a = 8 * x { cpus = 1 memory = 2 GiB } b = 2 * a }").clusters
    settings = [(s.name.text, s.value.value) for s in cluster.entries[0].settings if hasattr(s.value, "value")]
    assert settings == [("cpus", 1), ("memory", 2)]
    assert [entry.name.text for entry in cluster.entries] == ["a", "b"]


def test_next_item_is_no_unit() -> None:
    text = "flow f { seed 7 step { a = b.c() } stop after 3 steps save every 1 step evaluate e every 1 step { } }"
    (flow,) = program(text).flows
    assert [type(item).__name__ for item in flow.items] == ["Seed", "Step", "Stop", "Save", "Evaluate"]
    (schedule,) = program(
        "schedule f { place a on p with tp = 2 place b on p with pp = 1 trigger a at 5% auto }"
    ).schedules
    assert [type(item).__name__ for item in schedule.items] == ["Place", "Place", "Trigger", "Auto"]


def test_words_of_the_language_name_arguments_and_settings() -> None:
    (flow,) = program('flow f { data d = gym("x", seed = 3, stop = 4, data = 5, step = 6 s, flow = true) }').flows
    (declaration,) = flow.items
    assert isinstance(declaration, nodes.Declaration)
    call = declaration.value
    assert isinstance(call, nodes.Call)
    names = [argument.name.text for argument in call.arguments if argument.name]
    assert names == ["seed", "stop", "data", "step", "flow"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"a\"b"', 'a"b'),
        (r'"a\\"', "a\\"),
        (r'"a\nb"', "a\nb"),
        (r'"\d"', r"\d"),
        ('"# no"', "# no"),
        ('"模型🙂"', "模型🙂"),
    ],
)
def test_string(text: str, value: str) -> None:
    node = expression(text)
    assert isinstance(node, nodes.String)
    assert node.value == value
    assert node.span.text == text


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1 + 2 * 3", ("+", 1, ("*", 2, 3))),
        ("(1 + 2) * 3", ("*", ("+", 1, 2), 3)),
        ("1 - 2 - 3", ("-", ("-", 1, 2), 3)),
        ("8 / 2 / 2", ("/", ("/", 8, 2), 2)),
        ("-1 + 2", ("+", ("neg", 1), 2)),
        ("2 * -1", ("*", 2, ("neg", 1))),
    ],
)
def test_precedence(text: str, shape: Any) -> None:
    def shape_of(node: nodes.Expr) -> Any:
        match node:
            case nodes.Binary():
                return (node.operator, shape_of(node.left), shape_of(node.right))
            case nodes.Negate():
                return ("neg", shape_of(node.operand))
            case nodes.Number():
                return node.value
        raise AssertionError(node)

    assert shape_of(expression(text)) == shape


def test_trailing_commas_are_allowed() -> None:
    (flow,) = program("flow f(a = 1,) { step { x = f(a, b = [1, 2,],) } }").flows
    assert [param.name.text for param in flow.params] == ["a"]


def test_same_name_twice_in_one_file_is_left_to_the_frontend() -> None:
    assert len(program("flow a { } flow a { }").flows) == 2


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "# comment\r\n\t"])
def test_empty_file_is_a_program(text: str) -> None:
    assert program(text).items == ()


# --- depth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "+".join(["1"] * 5000),
        "-" * 5000 + "1",
        "[" * 5000 + "]" * 5000,
        "f(" * 3000 + "1" + ")" * 3000,
        "a" + ".b" * 5000,
        "a" + "()" * 5000,
    ],
    ids=["sum", "minus", "lists", "calls", "attributes", "called"],
)
def test_too_deep_is_a_diagnostic(text: str) -> None:
    with pytest.raises(CompileError) as caught:
        expression(text)
    (found,) = caught.value.diagnostics
    assert found.code == "RLF0001"
    assert f"more than {MAX_DEPTH} levels" in found.message
    assert found.span is not None


def test_many_parentheses_cost_nothing() -> None:
    assert isinstance(expression("(" * 3000 + "1" + ")" * 3000), nodes.Number)


def test_depth_within_the_limit_is_fine() -> None:
    assert isinstance(expression("+".join(["1"] * (MAX_DEPTH // 2))), nodes.Binary)


@pytest.mark.parametrize("text", ["(" * 3000, "f(" * 3000, "[" * 3000, '"' + "x" * 100_000, "9" * 100_000 + "("])
def test_long_broken_text_is_a_diagnostic(text: str) -> None:
    with pytest.raises(CompileError):
        expression(text)

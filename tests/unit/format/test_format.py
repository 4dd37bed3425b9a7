"""The one style, case by case; and what the formatter does when it finds itself wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rlflow.diagnostics import CompileError, SourceFile, Span
from rlflow.grammar import format as format_module
from rlflow.grammar import nodes
from rlflow.grammar.format import FormatError, format_text
from rlflow.grammar.parse import parse
from rlflow.grammar.printer import Printer, print_tree

HERE = Path(__file__).parent


def formatted(text: str) -> str:
    return format_text(SourceFile("x.rlflow", text))


def in_step(text: str) -> str:
    """The formatted statements of a step block, at the left margin."""
    lines = formatted(f"flow f {{ step {{\n{text}\n}} }}").splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines[2:-2])


def test_design_example() -> None:
    """Only the long call is laid out otherwise, and two columns are narrower."""
    text = (HERE / "design.rlflow").read_text("utf-8")
    old, new = text.splitlines(), formatted(text).splitlines()
    assert [line for line in new if line not in old] == [
        "    actor.train(",
        "      samples,",
        "      advantages = adv,",
        "      reference = ref,",
        "      loss = ppo_clip(0.2) + 0.001 * kl(k3),",
        "      minibatch = 128 samples,",
        "      optimizer = adamw(lr = 1e-6),",
        "    )",
        "  place actor.generate         on rollout with tp = 2",
        "  place actor.train, reference on learner with tp = 4, pp = 2",
        "  place exact                  on cpu with workers = 8",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1 b.c()", "a = 1\nb.c()"),
        ("a = 1e-6\nbb = 1_000\nc = 2.50\nd = 1E6", "a  = 1e-6\nbb = 1_000\nc  = 2.50\nd  = 1E6"),
        ("a = 64prompts\nb = 75 %\nc = 2.0GiB", "a = 64 prompts\nb = 75%\nc = 2.0 GiB"),
        (r'a = "x\"y\\z\n\t"', r'a = "x\"y\\z\n\t"'),
        (r'a = "\d é"', r'a = "\\d é"'),
        ("a = ((1 + 2)) * ((3))", "a = (1 + 2) * 3"),
        ("a = 1 - (2 - 3) - (4 * 5)", "a = 1 - (2 - 3) - 4 * 5"),
        ("a = - (b + 1) * -2", "a = -(b + 1) * -2"),
        ("a = (5 s).x", "a = (5 s).x"),
        ("a = f(b, c=1,)", "a = f(b, c = 1)"),
        ("a = [1,2,\n3,]", "a = [1, 2, 3]"),
        ("a = [true,false , none,[]]", "a = [true, false, none, []]"),
        ("a = 1\n\n\n\nbb = 2", "a = 1\n\nbb = 2"),
        ("\n\na = 1\n\n", "a = 1"),
    ],
)
def test_statement(text: str, expected: str) -> None:
    assert in_step(text) == expected


def test_columns_end_at_empty_lines_and_other_statements() -> None:
    assert in_step("a = 1\nbbb = 2\n\ncc = 3\nx.y()\ndddd = 4") == "a   = 1\nbbb = 2\n\ncc = 3\nx.y()\ndddd = 4"


def test_columns_go_on_across_comments() -> None:
    assert in_step("a = 1\n# why\nbbb = 2  # so") == "a   = 1\n# why\nbbb = 2  # so"


def test_a_very_wide_name_does_not_push_its_neighbours() -> None:
    wide = "w" * 51
    assert in_step(f"a = 1\n{wide} = 2\nbbb = 3") == f"a   = 1\n{wide} = 2\nbbb = 3"


def test_lines_break_above_100_characters() -> None:
    value = "v" * 100
    fits = f"a = f({value[:80]}, b)"
    assert in_step(fits) == fits
    for text in (f"a = f({value[:88]}, b)", f"a = f({value}, b)"):
        inside = text[6:-4]
        assert in_step(text) == f"a = f(\n  {inside},\n  b,\n)"


def test_exactly_100_characters_stay() -> None:
    text = f"flow f {{\n  model m = h({'a' * 85})\n}}\n"
    assert max(map(len, text.splitlines())) == 100
    assert formatted(text) == text
    assert "h(\n" in formatted(text.replace("a)", "ab)"))


def test_the_outer_call_breaks_first_and_the_last_of_a_chain() -> None:
    arguments = ", ".join(f"argument{i} = {i}" for i in range(6))
    broken = "".join(f"  argument{i} = {i},\n" for i in range(6))
    assert in_step(f"a = x.first(1).second({arguments})") == f"a = x.first(1).second(\n{broken})"


def test_a_long_sum_breaks_before_its_operators() -> None:
    terms = [f"term_number_{i} * weight_{i}" for i in range(6)]
    assert in_step("a = " + " + ".join(terms)) == f"a = {terms[0]}\n  + " + "\n  + ".join(terms[1:])


def test_long_settings_and_places() -> None:
    settings = ", ".join(f"setting_{i} = {i}" for i in range(8))
    text = formatted(f"schedule f on c {{ pool p = 8 devices {{ {settings} }} place a.b, c on p with {settings} }}")
    assert text.splitlines()[1:3] == ["  pool p = 8 devices {", "    setting_0 = 0,"]
    place = text.splitlines().index("  place a.b, c on p")
    assert text.splitlines()[place + 1] == "    with setting_0 = 0,"
    assert max(map(len, text.splitlines())) <= 100


def test_items_have_one_empty_line_between_them() -> None:
    text = formatted("flow f{} schedule f on c{auto}\n\n\n\ncluster c{}\n# about d\ncluster d { }")
    assert text == "flow f {}\n\nschedule f on c { auto }\n\ncluster c {}\n\n# about d\ncluster d {}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        (" \n\n\t", ""),
        ("# only", "# only\n"),
        ("#!/usr/bin/env rlflow\n\n\n# b  \n\nflow f {}", "#!/usr/bin/env rlflow\n\n# b\n\nflow f {}\n"),
        ("flow f {} # tail\n# end", "flow f {}  # tail\n# end\n"),
        ("flow f {}\n\n\n# end\n\n\n", "flow f {}\n\n# end\n"),
        ("flow f { # a\n\n # b\n\n\n # c\n\n}", "flow f {  # a\n  # b\n\n  # c\n}\n"),
        ("flow f\r\n{\r\n# a\r\n}\r\n", "flow f {\n  # a\n}\n"),
        ("flow f # a\n{}", "flow f {  # a\n}\n"),
        ("schedule f on c { # a\n auto }", "schedule f on c {  # a\n  auto\n}\n"),
    ],
)
def test_file_and_its_comments(text: str, expected: str) -> None:
    assert formatted(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(a, # one\n b)", "f(\n  a,  # one\n  b,\n)"),
        ("f(a # one\n , b # two\n )", "f(\n  a,  # one\n  b,  # two\n)"),
        ("f(a,\n # over b\n b\n # end\n)", "f(\n  a,\n  # over b\n  b,\n  # end\n)"),
        ("f( # none\n)", "f(  # none\n)"),
        ("f(\n# none\n)", "f(\n  # none\n)"),
        ('a = f("# no comment") # but this', 'a = f("# no comment")  # but this'),
        ("a = b + # plus\n c", "a = b  # plus\n  + c"),
        ("a # name\n = 1", "a =  # name\n  1"),
        ("a = [1, # one\n\n2]", "a = [\n  1,  # one\n  2,\n]"),
        ("a = 1 # x\n#y\n\n# z\nb = 2", "a = 1  # x\n#y\n\n# z\nb = 2"),
    ],
)
def test_comment_inside_a_statement(text: str, expected: str) -> None:
    assert in_step(text) == expected


def test_a_comment_for_rlflow_keeps_its_line() -> None:
    text = f"a = f({'v' * 88}, b)  # rlflow: ignore[RLF1013] wanted"
    assert in_step(text) == text


def test_syntax_errors_are_diagnostics() -> None:
    with pytest.raises(CompileError):
        formatted("flow f { step {")


@dataclass(frozen=True)
class Strange:
    span: Span


def test_unknown_node_fails_loudly() -> None:
    file = SourceFile("x", "")
    strange = nodes.Flow(nodes.Ident("f", Span(file, 0, 0)), (), (Strange(Span(file, 0, 0)),), Span(file, 0, 0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no method for Strange"):
        print_tree(nodes.Program(file, (strange,)))


def test_every_node_class_has_a_method() -> None:
    classes = [c.__name__ for c in vars(nodes).values() if isinstance(c, type) and c.__module__ == nodes.__name__]
    assert [name for name in classes if not hasattr(Printer, name)] == []


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("flow f {", "would give a text that does not parse"),
        ("flow g {}  # a\n", "would change the program"),
        ("flow f {}\n", "would lose or move a comment"),
        ("flow f {} # a\n", "twice would give another text than once"),
    ],
)
def test_wrong_results_are_refused(printed: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([printed, "flow f {}  # a\n"])
    monkeypatch.setattr(format_module, "print_source", lambda program: next(calls))
    with pytest.raises(FormatError, match=rf"formatting `x.rlflow` {reason}, so it was left as it is"):
        formatted("flow f {} # a")


def test_other_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Printer, "Ident", lambda self, node: node.text + "x")
    with pytest.raises(FormatError, match="would change its words"):
        formatted("flow f {} # a")


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[", "]"), ("f(", ")"), ("-", ""), ("1 - (", ")"), ("f(a = [1, ", "])"), ("", ".b"), ("", "(1)"), ("", " + 1")],
)
def test_deep_trees(opening: str, closing: str) -> None:
    """Whatever is not too deep for the parser can be formatted."""

    def text(depth: int) -> str:
        return f"flow f {{ data d = {opening * depth}x{closing * depth} }}"

    depth = 10
    while _parses(text(depth + 1)):
        depth += 1
    assert depth > 20
    assert formatted(text(depth))


def _parses(text: str) -> bool:
    try:
        parse(SourceFile("x", text))
    except CompileError:
        return False
    return True

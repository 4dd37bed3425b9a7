"""Suppression comments: what they silence, and what is said about those that are wrong."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.diagnostics import CODES, Diagnostic, Label, Severity, SourceFile, Span
from rlflow.diagnostics.suppress import apply_suppressions


def source(text: str) -> SourceFile:
    return SourceFile("a.rlflow", text)


def at(file: SourceFile, word: str, code: str = "RLF1013", severity: Severity = Severity.WARNING) -> Diagnostic:
    start = file.text.index(word)
    return Diagnostic(code, "m", (Label(Span(file, start, start + len(word))),), severity=severity)


def codes(found: list[Diagnostic]) -> list[str]:
    return [diagnostic.code for diagnostic in found]


@pytest.mark.parametrize(
    "text",
    [
        "x = f()  # rlflow: ignore[RLF1013]",
        "x = f()  #rlflow:ignore[ RLF1013 ] kept for later",
        "x = f()  # kept for later # rlflow: ignore[RLF1013]",
        "# rlflow: ignore[RLF1013]\nx = f()",
        "  # rlflow: ignore[RLF1013]\n  # and why\n  x = f()",
        'x = g("# not a comment")  # rlflow: ignore[RLF1013]',
        'x = g("\\"")  # rlflow: ignore[RLF1013]',
        "x = f(  # rlflow: ignore[RLF1013]\n  1)",
    ],
)
def test_a_warning_is_silenced(text: str) -> None:
    file = source(text)
    assert apply_suppressions(file, [at(file, "x =")]) == []


@pytest.mark.parametrize(
    ("text", "looked"),
    [
        ("x = f()\n# rlflow: ignore[RLF1013]\n", 3),
        ("# rlflow: ignore[RLF1013]\n\nx = f()", 2),
        ("y = f() # rlflow: ignore[RLF1013]\nx = f()", 1),
    ],
)
def test_a_comment_elsewhere_silences_nothing_and_is_reported(text: str, looked: int) -> None:
    file = source(text)
    kept, unused = apply_suppressions(file, [at(file, "x =")])
    assert (kept.code, unused.code, unused.severity) == ("RLF1013", "RLF0006", Severity.WARNING)
    assert unused.span is not None
    assert unused.span.text == "RLF1013"
    assert unused.labels[0].text == f"looked on line {looked}"


def test_text_in_a_string_is_no_comment() -> None:
    file = source('x = g("# rlflow: ignore[RLF1013]")')
    assert codes(apply_suppressions(file, [at(file, "x =")])) == ["RLF1013"]


def test_an_error_is_never_silenced_and_the_comment_is_reported() -> None:
    file = source("x = f()  # rlflow: ignore[RLF1001]")
    found = apply_suppressions(file, [at(file, "f", "RLF1001", Severity.ERROR)])
    assert codes(found) == ["RLF1001", "RLF0007"]
    assert found[1].message == "`RLF1001` is an error, and only warnings can be suppressed"


def test_a_code_that_is_always_an_error_is_reported_where_there_is_none() -> None:
    assert codes(apply_suppressions(source("x # rlflow: ignore[RLF1001]"), [])) == ["RLF0007"]


@pytest.mark.parametrize(
    ("comment", "message", "help"),
    [
        ("ignore[RLF1031]", "unknown code `RLF1031`", "did you mean `RLF1017`?"),
        ("ignore[rlf1013]", "unknown code `rlf1013`", "did you mean `RLF1013`?"),
        ("ignore[unused-value]", "unknown code `unused-value`", "did you mean `RLF1013`?"),
        ("ignore[F401]", "unknown code `F401`", None),
        ("ignore[]", "this suppression names no code", "write `# rlflow: ignore[RLF1013]`"),
        ("ignore", "this suppression names no code", "write `# rlflow: ignore[RLF1013]`"),
        ("ignore[RLF1013", "this suppression has no closing `]`", "write `# rlflow: ignore[RLF1013]`"),
        ("ingore[RLF1013]", "unknown instruction `ingore` in a comment for rlflow", "did you mean `ignore`?"),
        (
            "ignore[RLF0006]",
            "`RLF0006` is about suppressions and cannot be suppressed",
            "remove the unused suppression",
        ),
    ],
)
def test_a_wrong_comment_is_reported(comment: str, message: str, help: str | None) -> None:
    found = apply_suppressions(source(f"x  # rlflow: {comment}"), [])
    assert codes(found) == ["RLF0007"]
    assert found[0].message == message
    assert found[0].help == (() if help is None else (help,))
    assert found[0].severity is Severity.WARNING


def test_prose_about_rlflow_is_no_instruction() -> None:
    assert apply_suppressions(source("# rlflow: see the guide\n# grpo.rlflow: ignore[RLF1013]\n"), []) == []


def test_several_codes_and_doubles() -> None:
    file = source("x = f()  # rlflow: ignore[RLF1013, RLF1013,]")
    found = apply_suppressions(file, [at(file, "x ="), at(file, "f")])
    assert codes(found) == ["RLF0006"]
    assert found[0].span is not None
    assert found[0].span.start == file.text.rindex("RLF1013")


def test_unused_is_not_reported_beside_errors() -> None:
    file = source("x = f()  # rlflow: ignore[RLF1013]")
    assert codes(apply_suppressions(file, [at(file, "f", "RLF1001", Severity.ERROR)])) == ["RLF1001"]


def test_unused_is_reported_only_in_the_parts_that_were_checked() -> None:
    file = source("a # rlflow: ignore[RLF1013]\n# rlflow: ignore[RLF1013]\nb\n")
    first = Span(file, 0, 1)
    assert [d.span.line for d in apply_suppressions(file, [], within=[first]) if d.span] == [1]
    assert apply_suppressions(file, [], within=[]) == []
    second = Span(file, file.text.index("b\n"), file.text.index("b\n") + 1)
    assert [d.span.line for d in apply_suppressions(file, [], within=[second]) if d.span] == [2]


def test_places_outside_the_file_are_left_alone() -> None:
    file, other = source("x # rlflow: ignore[RLF1013]"), SourceFile("--set x=1", "x=1")
    found = [at(other, "x"), Diagnostic("RLF1013", "nowhere", severity=Severity.WARNING)]
    assert apply_suppressions(file, found)[:2] == found


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.sampled_from(["#", " rlflow:", " ignore", "[", "RLF1013", ",", "]", '"', "\\", "\n", "x", "é"]))
    .map("".join)
    .filter(lambda text: len(text) < 80)
    | st.text(string.printable, max_size=40)
)
def test_any_text_gives_diagnostics_with_places_and_silences_no_error(text: str) -> None:
    file = source(text)
    error = Diagnostic("RLF1001", "m", (Label(Span(file, 0, len(text))),))
    found = apply_suppressions(file, [error])
    assert found[0] == error
    for diagnostic in found[1:]:
        assert diagnostic.code in CODES
        assert diagnostic.span is not None
        assert 0 <= diagnostic.span.start <= diagnostic.span.end <= len(text)

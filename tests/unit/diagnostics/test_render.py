"""Places, and diagnostics as text: carets under the right characters, whatever the line holds."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.diagnostics import Diagnostic, Label, RunFailure, Severity, SourceFile, Span, did_you_mean, one_of
from rlflow.diagnostics.render import render, summary_line


def place(text: str, part: str) -> Span:
    start = text.index(part)
    return Span(SourceFile("dir/f.rlflow", text), start, start + len(part))


def full(*labels: Label, **rest: tuple[str, ...]) -> list[str]:
    return render([Diagnostic("RLF1001", "unknown name `x`", labels, **rest)], "full").splitlines()


# --- places ----------------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab\n\r\té", max_size=30), st.integers(0, 40))
def test_position_and_line_agree(text: str, offset: int) -> None:
    file = SourceFile("f", text)
    line, column = file.position(offset)
    lines = text.split("\n")
    assert 1 <= line <= len(lines)
    assert sum(len(part) + 1 for part in lines[: line - 1]) + column - 1 == min(offset, len(text))
    assert file.line(line) == lines[line - 1].rstrip("\r")


def test_lines_that_are_not_there_are_empty() -> None:
    assert [SourceFile("f", "a").line(n) for n in (0, 1, 2)] == ["", "a", ""]


def test_span_as_text() -> None:
    span = place("ab\ncd ef", "ef")
    assert (str(span), span.text, span.end_position) == ("dir/f.rlflow:2:4", "ef", (2, 6))
    assert place("ab cd", "ab").to(place("ab cd", "cd")).text == "ab cd"


# --- full ------------------------------------------------------------------------------------------------------------


def test_excerpt_with_notes_and_help() -> None:
    text = "a = b\nc = x\n"
    lines = full(
        Label(place(text, "x"), "here"), Label(place(text, "b"), "there", primary=False), notes=("n",), help=("h1\nh2",)
    )
    assert lines == [
        "error[RLF1001]: unknown name `x`",
        " --> dir/f.rlflow:2:5",
        "2 | c = x",
        "  |     ^ here",
        " ::: dir/f.rlflow:1:5",
        "1 | a = b",
        "  |     - there",
        "  = note: n",
        "  = help: h1",
        "          h2",
    ]


def test_primary_place_comes_first() -> None:
    text = "a b"
    assert "1:3" in full(Label(place(text, "a"), primary=False), Label(place(text, "b")))[1]


@pytest.mark.parametrize(
    ("text", "part", "mark"),
    [
        ("\tx\ty", "y", "\t \t^"),
        ("a\n", "\n", " ^"),
        ("abc", "", "^"),
        ("ab {\n}", "{\n}", "   ^"),
        ("模型 x", "x", "   ^"),
    ],
)
def test_mark(text: str, part: str, mark: str) -> None:
    assert full(Label(place(text, part)))[3] == f"  | {mark}"


@pytest.mark.parametrize("at", [0, 30, 119, 121, 5000, 9990])
def test_long_line_shows_the_place_only(at: int) -> None:
    text = "-" * at + "here" + "-" * (10_000 - at)
    lines = full(Label(place(text, "here")))
    _, _, source, mark = lines
    assert len(source) < 140
    assert source[mark.index("^") : mark.rindex("^") + 1] == "here"
    assert source.endswith("...") or at > 9900


def test_place_longer_than_the_excerpt() -> None:
    text = "x" * 10_000
    *_, source, mark = full(Label(place(text, text)))
    assert len(mark) <= len(source)


def test_characters_that_a_terminal_would_obey_are_not_shown() -> None:
    text = "a \x1b[31m \x00 b"
    assert "\x1b" not in "\n".join(full(Label(place(text, "b"))))


def test_diagnostic_without_a_place() -> None:
    assert full(notes=("n",)) == ["error[RLF1001]: unknown name `x`", "  = note: n"]


def test_color_only_when_asked() -> None:
    found = [Diagnostic("RLF1001", "m", (Label(place("x", "x")),), ("n",))]
    assert "\x1b[" not in render(found, "full")
    assert "\x1b[1;31m" in render(found, "full", color=True)


# --- other forms -----------------------------------------------------------------------------------------------------


def test_concise_and_json() -> None:
    found = [Diagnostic("RLF1013", "unused", (Label(place("a\nbc", "bc"), "t"),), ("n",), ("h",), Severity.WARNING)]
    assert render(found, "concise") == "dir/f.rlflow:2:1: warning[RLF1013] unused"
    (item,) = json.loads(render(found, "json"))
    assert item == {
        "code": "RLF1013",
        "name": "unused-value",
        "severity": "warning",
        "message": "unused",
        "labels": [
            {
                "file": "dir/f.rlflow",
                "line": 2,
                "column": 1,
                "end_line": 2,
                "end_column": 3,
                "text": "t",
                "primary": True,
            }
        ],
        "notes": ["n"],
        "help": ["h"],
    }
    assert json.loads(render([], "json")) == []


@pytest.mark.parametrize(
    ("errors", "warnings", "text"),
    [(0, 0, ""), (1, 0, "1 error"), (2, 1, "2 errors, 1 warning"), (0, 3, "3 warnings")],
)
def test_summary(errors: int, warnings: int, text: str) -> None:
    found = [Diagnostic("RLF1001", "m")] * errors + [Diagnostic("RLF1013", "m", severity=Severity.WARNING)] * warnings
    assert summary_line(found) == text


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "guess"),
    [("actr", "actor"), ("ACTOR", "actor"), ("max_stalness", "max_staleness"), ("zzz", None), ("", None)],
)
def test_did_you_mean(word: str, guess: str | None) -> None:
    assert did_you_mean(word, ["max_staleness", "actor", "critic"]) == guess


def test_did_you_mean_does_not_depend_on_order() -> None:
    assert did_you_mean("ab", ["abd", "abc"]) == did_you_mean("ab", ["abc", "abd"])


def test_one_of() -> None:
    assert [one_of(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "`a`",
        "`a` or `b`",
        "`a`, `b` or `c`",
    ]


def test_code_must_be_in_the_table() -> None:
    with pytest.raises(AssertionError, match="RLF1999"):
        Diagnostic("RLF1999", "m")


def test_run_failure_travels_between_processes() -> None:
    failure = RunFailure("RLF5003", "raised", stage="score", notes=["n"], help=["h"], trace="t")
    again = pickle.loads(pickle.dumps(failure))
    assert vars(again) == vars(failure)
    assert again.at("other").stage == "score"
    assert RunFailure("RLF5003", "raised").at("other").to_diagnostic().message == "stage `other`: raised"

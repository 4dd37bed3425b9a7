"""Texts that are no program: the code, the place, and the user's own words."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.diagnostics.render import FORMATS, render
from rlflow.grammar.parse import parse
from rlflow.grammar.words import ITEM_WORDS, enclosing_block

DESIGN = (Path(__file__).parents[2] / "data" / "design_example.rlflow").read_text("utf-8")
TOKENS = list(re.finditer(r'#[^\n]*|"[^"\n]*"|[A-Za-z_]\w*|[\d.]+(?:e-?\d+)?|<=|\S', DESIGN))


def problem(text: str) -> Diagnostic:
    with pytest.raises(CompileError) as caught:
        parse(SourceFile("x.rlflow", text))
    assert len(caught.value.diagnostics) == 1, "one mistake, one error"
    return caught.value.diagnostics[0]


@pytest.mark.parametrize(
    ("text", "code", "place", "message", "label", "help"),
    [
        ("flow { }", "RLF0001", "{", "unexpected `{`", "expected a name", ()),
        ("flwo f { }", "RLF0001", "flwo", "unexpected `flwo`", "expected `cluster`, `flow`, `import` or", "flow"),
        ("flow f { } }", "RLF0001", "}", "unexpected `}`", None, ()),
        ("flow f { stepp { } }", "RLF0001", "stepp", "unexpected `stepp`", None, "step"),
        ("flow f { step { a = } }", "RLF0001", "}", "unexpected `}`", "expected a value", ()),
        ("flow f { step { f(a b) } }", "RLF0001", "b", "unexpected `b`", None, ()),
        ("flow f { step { f(a,,b) } }", "RLF0001", ",", "unexpected `,`", None, ()),
        ("flow f { seed 3 prompts }", "RLF0001", "prompts", "unexpected `prompts`", None, ()),
        ("flow f { allow a staleness < 2 steps }", "RLF0001", "<", "unexpected `<`", "expected `<=`", ()),
        ("flow f { step { a = 1 ; } }", "RLF0003", ";", "unexpected character `;`", None, ()),
        ("flow f { model für = hf() }", "RLF0003", "ü", "unexpected character `ü`", "expected `=`", ()),
        ("flow f {\u00a0}", "RLF0003", "\u00a0", "unexpected character U+00A0 (no-break space)", None, ()),
        ("flow f {\0}", "RLF0003", "\0", "unexpected character U+0000", None, ()),
        ('flow f { model m = hf("abc) }\n }', "RLF0004", '"abc) }', "this string has no closing quote", 'add `"`', ()),
        ("flow f { step { seed = 1 } }", "RLF0005", "seed", "`seed` is a word of the language", None, "seed_"),
        ("flow f { model reward = hf() }", "RLF0005", "reward", "`reward` is a word of the language", None, "reward_"),
        ("flow f(step = 1) { }", "RLF0005", "step", "`step` is a word of the language", None, "step_"),
        ("flow f { evaluate stop { } }", "RLF0005", "stop", "`stop` is a word of the language", None, "stop_"),
    ],
)
def test_mistake(text: str, code: str, place: str, message: str, label: str | None, help: str | tuple[()]) -> None:
    found = problem(text)
    assert found.code == code
    assert found.message.startswith(message)
    assert found.span is not None
    assert found.span.text == place
    if label is not None:
        assert found.labels[0].text.startswith(label)
    assert (f"`{help}`" in found.help[0]) if help else found.help == ()


@pytest.mark.parametrize(
    ("text", "line", "column", "note"),
    [
        ("flow f {", 1, 9, "line 1"),
        ("flow f {\n  step {\n    a = b", 3, 10, "line 2"),
        ("flow f {\n  step {\n    a = b\n\n\n", 3, 10, "line 2"),
        ('flow f {\n  data a = b("}", "\\"{")\n', 2, 25, "line 1"),
        ("flow f { # }\n  step { }", 2, 11, "line 1"),
        ("flow", 1, 5, None),
        ("schedule f on", 1, 14, None),
    ],
)
def test_end_of_file_is_the_place_after_the_last_character(text: str, line: int, column: int, note: str | None) -> None:
    found = problem(text)
    assert found.code == "RLF0002"
    assert found.span is not None
    assert (found.span.line, found.span.column) == (line, column)
    assert found.span.end_position == (line, column)
    assert found.notes == (() if note is None else (f"the `{{` on {note} is not closed",))


def test_enclosing_block_skips_strings_and_comments() -> None:
    text = 'a { "}" # }\n { } "\\"}" '
    assert enclosing_block(text, len(text)) == 2
    assert enclosing_block("{ }", 3) is None


def test_long_word_is_shortened() -> None:
    assert len(problem("flow f { " + "x" * 10_000 + " }").message) < 80


# --- Q6: every broken text gives a program or one diagnostic in plain words ------------------------------------------

INTERNAL = re.compile(r"__ANON|\$END|[A-Z]{2,}[A-Z_]*\b(?!\+)|\{'|Token\(|<lark|Traceback")


def check_answer(text: str) -> None:
    """A program, or a diagnostic of the syntax with a place inside the text and no word of the parser."""
    file = SourceFile("x.rlflow", text)
    diagnostics: tuple[Diagnostic, ...] = ()
    try:
        parse(file)
    except CompileError as error:
        diagnostics = error.diagnostics
        assert diagnostics
    if diagnostics:
        (found, *more) = diagnostics
        assert all(d.code == "RLF0005" for d in more), "one syntax error at a time"
        assert found.code.startswith("RLF0")
        assert found.span is not None
        assert 0 <= found.span.start <= found.span.end <= len(text)
        assert found.span.start < len(text) or found.code == "RLF0002"
        words = [found.message, *(label.text for label in found.labels), *found.notes, *found.help]
        unquoted = re.sub(r"`[^`]*`|U\+[0-9A-F]{4,6}", "", " ".join(words))
        assert not INTERNAL.search(unquoted), words
        for terminal in {*ITEM_WORDS.values(), "LBRACE", "RPAR", "QUANTITY", "NUMBER"}:
            assert f"`{terminal}`" not in " ".join(words) or terminal in text
        for format in FORMATS:
            assert render(diagnostics, format)


@pytest.mark.parametrize("part", range(8))
def test_truncated_example(part: int) -> None:
    for end in range(part, len(DESIGN), 8):
        check_answer(DESIGN[:end])


@pytest.mark.parametrize("part", range(4))
def test_example_without_one_token(part: int) -> None:
    for token in TOKENS[part::4]:
        check_answer(DESIGN[: token.start()] + DESIGN[token.end() :])


@pytest.mark.parametrize("seed", range(4))
def test_example_with_one_token_more(seed: int) -> None:
    chance = random.Random(seed)
    extra = [
        *ITEM_WORDS,
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        ",",
        "=",
        "<=",
        "+",
        "1",
        "2 prompts",
        '"',
        '"x"',
        "\\",
        "é",
        "#",
    ]
    for _ in range(100):
        at = chance.choice(TOKENS).start()
        check_answer(f"{DESIGN[:at]} {chance.choice(extra)} {DESIGN[at:]}")


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text(text: str) -> None:
    check_answer(text)


PIECES = [
    *ITEM_WORDS,
    "x",
    "y",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    ".",
    "=",
    "<=",
    "+",
    "-",
    "*",
    "/",
    "1",
    "2.5",
    "3 s",
    '"t"',
]


@given(st.lists(st.sampled_from(PIECES), max_size=25))
@settings(max_examples=300, deadline=None)
def test_any_words(words: list[str]) -> None:
    check_answer("flow f { step { " + " ".join(words))
    check_answer(" ".join(words))

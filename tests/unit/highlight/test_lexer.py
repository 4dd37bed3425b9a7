"""The Pygments lexer: found by name and file name, no text lost, every word of the language coloured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Token

from rlflow.grammar.words import ITEM_WORDS
from rlflow.highlight import BUILTINS, CONSTANTS, RlflowLexer

ROOT = Path(__file__).parents[3]
DESIGN = (ROOT / "tests" / "unit" / "format" / "design.rlflow").read_text("utf-8")


def tokens(text: str) -> list[tuple[object, str]]:
    found = list(RlflowLexer(stripnl=False, ensurenl=False).get_tokens(text))
    return [(kind, value) for kind, value in found if value.strip()]


def test_entry_points() -> None:
    assert isinstance(get_lexer_by_name("rlflow"), RlflowLexer)
    assert isinstance(get_lexer_for_filename("a/b.rlflow"), RlflowLexer)


@pytest.mark.parametrize(
    "text", [DESIGN, *(p.read_text("utf-8") for p in sorted((ROOT / "examples").glob("*.rlflow")))]
)
def test_examples_have_no_errors(text: str) -> None:
    assert [value for kind, value in tokens(text) if kind is Error] == []
    assert "".join(value for _, value in RlflowLexer(stripnl=False, ensurenl=False).get_tokens(text)) == text


def test_design_example() -> None:
    found = tokens(DESIGN)
    assert found[0] == (Comment.Single, DESIGN.splitlines()[0])
    of = {kind: [value for k, value in found if k is kind] for kind in {kind for kind, _ in found}}
    assert of[Keyword.Declaration] == ["flow", "data", "model", "model", "reward", "schedule", "cluster"]
    assert (
        of[Keyword]
        == (
            "step allow staleness with on pool pool place on with place on with place on with "
            "staleness admit trigger at carry"
        ).split()
    )
    assert of[Keyword.Type] == "s prompts tokens samples steps devices devices step % TiB".split()
    assert of[Number.Float] == ["1.0", "0.2", "0.001", "1e-6", "2.0", "1.5"]
    assert of[Number.Integer][:4] == ["8", "5", "2", "64"]
    assert of[Name.Builtin] == "jsonl hf frozen python retry group_normalize ppo_clip kl adamw".split()
    assert of[Name.Function] == ["grpo", "take", "generate", "logprobs", "exact", "train", "truncated_is"]
    assert {"<=", "+", "*"} <= set(of[Operator])


@pytest.mark.parametrize("word", ITEM_WORDS)
def test_every_word_of_the_grammar_is_a_keyword(word: str) -> None:
    ((kind, value),) = tokens(word)
    assert value == word
    assert kind in Keyword
    assert (kind is Keyword.Constant) == (word in CONSTANTS)


@pytest.mark.parametrize("word", ITEM_WORDS)
def test_keywords_may_name_arguments_and_fields(word: str) -> None:
    assert tokens(f"{word} = 1")[0] == (Name.Variable, word)
    assert tokens(f"a.{word}")[2] == (Name.Attribute, word)
    assert tokens(f"{word}s") == [(Name, f"{word}s")]


@pytest.mark.parametrize("word", BUILTINS)
def test_builtins(word: str) -> None:
    assert tokens(f"{word}(") == [(Name.Builtin, word), (Punctuation, "(")]
    assert tokens(word) == [(Name, word)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64 prompts", [(Number.Integer, "64"), (Keyword.Type, "prompts")]),
        ("64prompts", [(Number.Integer, "64"), (Keyword.Type, "prompts")]),
        ("75%", [(Number.Integer, "75"), (Keyword.Type, "%")]),
        ("2.5e3 GB/s", [(Number.Float, "2.5e3"), (Keyword.Type, "GB/s")]),
        ("1_000", [(Number.Integer, "1_000")]),
        ("1 s = 2", [(Number.Integer, "1"), (Name.Variable, "s"), (Operator, "="), (Number.Integer, "2")]),
        ("7 step {", [(Number.Integer, "7"), (Keyword, "step"), (Punctuation, "{")]),
        ("2 steps", [(Number.Integer, "2"), (Keyword.Type, "steps")]),
        ("8 * x", [(Number.Integer, "8"), (Operator, "*"), (Name, "x")]),
        ('"a # b"', [(String.Double, '"'), (String.Double, "a # b"), (String.Double, '"')]),
        (
            r'"\n\d"',
            [(String.Double, '"'), (String.Escape, r"\n"), (String.Double, r"\d"), (String.Double, '"')],
        ),
        ('"open', [(String.Double, '"'), (String.Double, "open")]),
        ("?", [(Error, "?")]),
    ],
)
def test_pieces(text: str, expected: list[tuple[object, str]]) -> None:
    assert tokens(text) == expected


@settings(max_examples=100, deadline=None)
@given(st.text() | st.text('ab1 ."\\#\n{}()=%<'))
def test_any_text_comes_back(text: str) -> None:
    text = text.replace("\r", "")  # Pygments makes newlines of them before lexing
    found = list(RlflowLexer(stripnl=False, ensurenl=False).get_tokens(text))
    assert "".join(value for _, value in found) == text.removeprefix("\ufeff")
    assert all(kind in Token for kind, _ in found)

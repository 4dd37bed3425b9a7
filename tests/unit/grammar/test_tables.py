"""The parser and its tables, against lark's own parser of the same grammar: the same trees and the same errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lark import Token as LarkToken
from lark import Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from rlflow.grammar import lalr, tables
from rlflow.grammar.generate import lark_parser, make_tables, module_text
from rlflow.grammar.scanner import Token
from rlflow.grammar.words import ITEM_WORDS

ROOT = Path(__file__).parents[3]
FILES = sorted(
    file for folder in ("examples", "tests/filecheck", "tests/fuzz/seeds") for file in (ROOT / folder).rglob("*.rlflow")
)
TEXTS = [file.read_text("utf-8") for file in FILES]
EXPRESSIONS = [
    "1", "a.b(c, d = 2)[", "8 prompts / 2", "a if b else c", "a  if b and not c or d <= 2 else [1, 2,]", "-(1 + x) * 3", "f(if)",
    "a\nif b else c", "a <= b <= c", "x == 75%", '"a" + ', "(((1)))", "((a))(b)", "f(on = 1, data = 2, 3)", "1e-6 * 1.5 GiB", "",
]  # fmt: skip
PIECES = [*ITEM_WORDS, *"{}()[],.=+-*/%<>#\"é½ \n\t\f;@\\", "==", "<=", "!=", " if ", "1", "1e-6", "8 prompts", "2 step {", "x", "_a9", '"s"', "stepé"]  # fmt: skip


def ours(text: str, start: str) -> Any:
    """The tree as nested lists, or what the error says."""

    def action_of(name: str) -> lalr.Action:
        return lambda extent, children: [name, extent, *children]

    try:
        tree, levels = lalr.parse(tables.load(start), text, action_of)
    except lalr.UnexpectedTokenError as error:
        return "token", error.token.kind, error.token.text, error.token.start, error.token.end, error.accepts
    except lalr.UnexpectedCharacterError as error:
        return "character", error.at, error.allowed
    return plain(tree), levels


def plain(root: Any) -> list[Any]:
    """The tree in one row, in the order of the text, so that no comparison recurses."""
    row, stack = [], [root]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            row.append((part[0], part[1], len(part)))
            stack.extend(reversed(part[2:]))
        else:
            row.append(tuple(part) if isinstance(part, Token) else part)
    return row


def larks(text: str, start: str) -> Any:
    try:
        tree = lark_parser(start).parse(text)
    except UnexpectedCharacters as error:
        return "character", error.pos_in_stream, frozenset(error.allowed)
    except UnexpectedToken as error:
        token = error.token
        # Its END stands where the token before it does.
        place = (len(text), len(text)) if token.type == "$END" else (token.start_pos, token.end_pos)
        return "token", token.type, str(token), *place, frozenset(error.accepts)
    except UnexpectedInput as error:  # pragma: no cover
        raise AssertionError(repr(error)) from error
    row, stack, deepest = [], [(tree, 1)], 0
    while stack:
        part, level = stack.pop()
        if isinstance(part, Tree):
            deepest = max(deepest, level)
            extent = (0, 0) if part.meta.empty else (part.meta.start_pos, part.meta.end_pos)
            row.append((str(part.data), extent, len(part.children) + 2))
            stack.extend((child, level + 1) for child in reversed(part.children))
        elif isinstance(part, LarkToken):
            row.append((part.type, str(part), part.start_pos, part.end_pos))
        else:
            row.append(part)
    return row, deepest


@pytest.mark.parametrize("start", tables.MODULES)
def test_the_modules_are_made_from_the_grammar(start: str) -> None:
    """Otherwise: `python -m rlflow.grammar.generate`."""
    module = tables.GRAMMAR.with_name(f"{tables.MODULES[start]}.py")
    assert module.read_text("utf-8") == module_text(start), "run `python -m rlflow.grammar.generate`"


def test_all_files_parse_as_with_lark() -> None:
    assert len(TEXTS) > 30
    for file, text in zip(FILES, TEXTS, strict=True):
        assert ours(text, "start") == larks(text, "start"), file


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_parse_as_with_lark(text: str) -> None:
    assert ours(text, "expr") == larks(text, "expr")


@pytest.mark.parametrize(
    "text",
    [
        "", "  # nothing\n", "flow", "flow f", "flow f {", "flow f { x", "flow step {}", "flow f { seed 7 step { } }",
        "flow f { seed 8 prompts }", "flow f { if a { stop after 1 steps } }", "flow f {if a { } else if b { } else { } }",
        "flow f { step { x = a if b } }", "flow f { step { x = a\nif b { } } }", "flow f { step { x = 1 y = 2 step } }",
        "flow f { allow a staleness <= 2 with b }", "flow f { allow a staleness == 2 }", "flow é { }", "flowé f { }",
        "flow f { data a = \"x }\n", "flow f { step { a(data = 1, every = 2 steps) } } schedule f { auto }", "é", "\"", "flow\u00e9",
        "flow f { step { data\u00e9 = 1 } }", "flow f { step { x = y <= 2 } }", "schedule f on c { place a.b, c on d with dp = 2, tp = 2 }",
    ],
)  # fmt: skip
def test_texts_that_are_decided_by_what_stands_before(text: str) -> None:
    assert ours(text, "start") == larks(text, "start")


SHORT = [text for text in TEXTS if len(text) < 1500]


@st.composite
def changed(draw: st.DrawFn) -> str:
    """A program with some of its words left out, doubled or replaced."""
    words = re.findall(r"\w+|\s+|.", draw(st.sampled_from(SHORT)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(words) - 1))
        words[at : at + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from(PIECES), max_size=2))
        words = words or [""]
    return "".join(words)


@settings(max_examples=150, deadline=None)
@given(changed())
def test_changed_programs_parse_as_with_lark(text: str) -> None:
    assert ours(text, "start") == larks(text, "start")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, "a", "b(", "f.g"]), max_size=12).map("".join))
def test_any_expression_parses_as_with_lark(text: str) -> None:
    assert ours(text, "expr") == larks(text, "expr")


def test_a_grammar_that_was_changed_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables of another grammar are never used: a new word works before anybody has written the modules."""
    text = tables.GRAMMAR.read_text("utf-8")
    assert "auto: _AUTO" in text
    other = tmp_path / "rlflow.lark"
    other.write_text(text.replace("auto: _AUTO", 'auto: _AUTO "!"'), "utf-8")
    for module in ("rlflow.grammar.tables", "rlflow.grammar.generate"):
        monkeypatch.setattr(f"{module}.GRAMMAR", other)
    lark_parser.cache_clear()
    tables.load.cache_clear()
    try:
        assert ours("schedule a { auto! }", "start")[1] > 1
        assert ours("schedule a { auto }", "start")[:2] == ("token", "RBRACE")
    finally:
        lark_parser.cache_clear()
        tables.load.cache_clear()


def test_deep_texts_need_no_stack() -> None:
    _, levels = ours("(" * 20000 + "1" + ")" * 20000, "expr")
    assert levels == 1
    _, levels = ours("-" * 20000 + "1", "expr")
    assert levels == 20001


def test_a_long_list_takes_time_in_proportion() -> None:
    """Repetitions grow one list. A copy for every item would take minutes here."""
    tree, _ = lalr.parse(
        tables.load("expr"), "[" + "1," * 60000 + "]", lambda name: lambda extent, children: len(children)
    )
    assert tree >= 60000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import_file: _IMPORT STRING", "!import_file: _IMPORT STRING", "not supported"),
        ("STRING: /", "SHOUT: /im?port/\nSTRING: /", "must begin a NAME and no other terminal"),
        ("?seed_value: NUMBER -> number", "?seed_value: NUMBER", "needs a name"),
    ],
)
def test_what_tables_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = tables.GRAMMAR.read_text("utf-8")
    assert old in text
    text = text.replace(old, new)
    if "SHOUT" in new:
        text = text.replace("import_file: _IMPORT STRING", "import_file: _IMPORT (STRING | SHOUT)")
    other = tmp_path / "rlflow.lark"
    other.write_text(text, "utf-8")
    monkeypatch.setattr("rlflow.grammar.generate.GRAMMAR", other)
    lark_parser.cache_clear()
    try:
        with pytest.raises(ValueError, match=message):
            make_tables("start")
    finally:
        lark_parser.cache_clear()

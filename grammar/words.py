"""The words of the language: the one table of keywords, and the grammar's terminals in the user's words.

The parser's keyword terminals, the words that are no unit after a number, the messages and the colours all come from
ITEM_WORDS. No terminal name of the parser reaches a user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlflow.diagnostics import one_of

# keyword -> terminal
ITEM_WORDS: dict[str, str] = {
    "import": "_IMPORT",
    "flow": "_FLOW",
    "step": "_STEP",
    "evaluate": "_EVALUATE",
    "every": "_EVERY",
    "allow": "_ALLOW",
    "staleness": "_STALENESS",
    "with": "_WITH",
    "stop": "_STOP",
    "after": "_AFTER",
    "save": "_SAVE",
    "seed": "_SEED",
    "schedule": "_SCHEDULE",
    "on": "_ON",
    "pool": "_POOL",
    "place": "_PLACE",
    "admit": "_ADMIT",
    "trigger": "_TRIGGER",
    "at": "_AT",
    "carry": "_CARRY",
    "auto": "_AUTO",
    "cluster": "_CLUSTER",
    "if": "_IF",
    "else": "_ELSE",
    "and": "_AND",
    "or": "_OR",
    "not": "_NOT",
    "true": "_TRUE",
    "false": "_FALSE",
    "none": "_NONE",
    "data": "DECLARED",
    "model": "DECLARED",
    "reward": "DECLARED",
    "environment": "DECLARED",
}

UNIT_WORDS = frozenset({"step"})
"""Keywords that are units as well: `1 step`."""

_SIGNS = {
    "LBRACE": "{",
    "RBRACE": "}",
    "LPAR": "(",
    "RPAR": ")",
    "LSQB": "[",
    "RSQB": "]",
    "COMMA": ",",
    "DOT": ".",
    "EQUAL": "=",
    "PLUS": "+",
    "MINUS": "-",
    "STAR": "*",
    "SLASH": "/",
    "_AT_MOST": "<=",
}
_BRACES = re.compile(r'#[^\n]*|"(?:\\.|[^"\\\n])*"|[{}]')
_VALUES = {"QUANTITY", "NUMBER", "STRING", "NAME", "_TRUE", "_FALSE", "_NONE", "MINUS", "LPAR", "LSQB", "_NOT"}
_OPERATORS = {"COMPARE", "_AND", "_OR", "_INLINE_IF"}
"""Terminals that could follow any value: naming them says nothing."""


def grammar_text(text: str) -> str:
    """The grammar file with the keywords of the table in it."""
    words: dict[str, list[str]] = {}
    for word, terminal in ITEM_WORDS.items():
        words.setdefault(terminal, []).append(word)
    lines = [f"{terminal}.1: /({'|'.join(several)})\\b/" for terminal, several in words.items()]
    no_units = "|".join(word for word in ITEM_WORDS if word not in UNIT_WORDS)
    return text.replace("(KEYWORD_AFTER_NUMBER)", f"({no_units})") + "\n" + "\n".join(lines) + "\n"


def describe_expected(terminals: Iterable[str]) -> str:
    """What could stand here, such as "expected `{` or a value"; empty when nothing useful can be said."""
    left = {t for t in terminals if t != "$END"} - _OPERATORS
    words: list[str] = []
    tail: list[str] = []
    if "NUMBER" in left:
        tail.append("a value")
        left -= _VALUES
    elif "NAME" in left:
        tail.append("a name")
        left.discard("NAME")
    elif "STRING" in left:
        tail.append("a text in quotes")
    by_terminal: dict[str, list[str]] = {}
    for word, terminal in ITEM_WORDS.items():
        by_terminal.setdefault(terminal, []).append(word)
    for terminal in sorted(left):
        words.extend(by_terminal.get(terminal, []))
        if terminal in _SIGNS:
            words.append(_SIGNS[terminal])
    # operators could follow any value; naming them all says nothing
    if len(words) > 4:
        words = [word for word in words if word not in "+-*/.(["]
    if len(words) > 8 or not (words or tail):
        return ""
    listed = one_of(sorted(words, key=lambda w: (not w[0].isalpha(), w)))
    if listed and tail:
        return f"expected {listed}, or {tail[0]}"
    return f"expected {listed or tail[0]}"


def enclosing_block(text: str, end: int) -> int | None:
    """Offset of the innermost `{` still open at `end`, or None. Strings and comments are skipped."""
    stack: list[int] = []
    for found in _BRACES.finditer(text, 0, end):
        if found[0] == "{":
            stack.append(found.start())
        elif found[0] == "}" and stack:
            stack.pop()
    return stack[-1] if stack else None

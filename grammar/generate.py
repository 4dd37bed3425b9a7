"""From the grammar to the parser's tables: `python -m rlflow.grammar.generate` writes them after rlflow.lark changed.

lark reads the grammar and makes the LALR(1) tables, which takes longer than checking a program; so they are kept as
modules. States and rules are numbered anew, in the order in which they are reached, so that the same grammar gives
the same text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark
from lark.parsers.lalr_analysis import Shift

from rlflow.grammar.tables import GRAMMAR, MODULES, Tables, fingerprint
from rlflow.grammar.words import ITEM_WORDS, grammar_text


@cache
def lark_parser(start: str) -> Lark:
    """lark's own parser of the grammar, from a start rule."""
    grammar = grammar_text(GRAMMAR.read_text("utf-8"))
    return Lark(grammar, parser="lalr", start=start, propagate_positions=True, maybe_placeholders=True)


def make_tables(start: str) -> Tables:
    """The tables of the grammar from a start rule. Raises ValueError for a grammar they cannot hold."""
    lark = lark_parser(start)
    parser: Any = lark.parser
    table = parser.parser._parse_table
    lexer = parser.lexer.root_lexer
    lexer.scanner  # noqa: B018  (finds the texts that are terminals of their own)
    states, rules, symbols = _numbered(table, start)
    lookaheads: dict[tuple[str, ...], int] = {}
    rows, gotos = [], []
    for state in states:
        terminals: dict[int, list[str]] = {}
        targets = []
        for symbol, (action, argument) in table.states[state].items():
            if symbol in symbols:
                targets.append((symbols[symbol], states[argument]))
            else:
                value = states[argument] if action is Shift else ~list(rules).index(argument)
                terminals.setdefault(value, []).append(symbol)
        row = sorted((value, tuple(sorted(names))) for value, names in terminals.items())
        rows.append(tuple((value, lookaheads.setdefault(names, len(lookaheads))) for value, names in row))
        gotos.append(tuple(sorted(targets)))
    return Tables(
        source=fingerprint(),
        terminals=tuple((t.name, t.pattern.to_regexp()) for t in lexer.terminals),
        ignored=tuple(sorted(lexer.ignore_types)),
        literals=tuple(_literals(lexer)),
        rules=tuple((symbols[rule.origin.name], *_shape(rule)) for rule in rules),
        lookaheads=tuple(map(" ".join, lookaheads)),
        actions=tuple(rows),
        gotos=tuple(gotos),
        start=states[table.start_states[start]],
        end=states[table.end_states[start]],
    )


def _numbered(table: Any, start: str) -> tuple[dict[int, int], dict[Any, int], dict[str, int]]:
    """States, rules and nonterminals with their new numbers."""
    states: dict[int, int] = {table.start_states[start]: 0}
    rules: dict[Any, int] = {}
    symbols: dict[str, int] = {}
    waiting = [table.start_states[start]]
    for state in waiting:
        for _, (action, argument) in sorted(table.states[state].items()):
            if action is Shift and argument not in states:
                states[argument] = len(states)
                waiting.append(argument)
            elif action is not Shift and argument not in rules:
                rules[argument] = len(rules)
                symbols.setdefault(argument.origin.name, len(symbols))
    return states, rules, symbols


def _shape(rule: Any) -> tuple[int, str, bool, tuple[tuple[int, bool, int], ...], int]:
    """Size, name, single, children and nones of a rule, as in `lalr.Rule`."""
    helper = rule.origin.name.startswith("_")
    single = bool(rule.options.expand1 and not rule.alias)
    if rule.options.keep_all_tokens or rule.options.template_source:
        raise ValueError(f"{rule.origin.name}: `!` and templates are not supported")
    gaps = [False] * len(rule.expansion)
    if rule.options.empty_indices:
        gaps = list(rule.options.empty_indices)
    # lark marks each left-out symbol by True among a False for each one that is there
    runs = [len(run) for run in "".join("1" if gap else "0" for gap in gaps).split("0")]
    children, nones = [], 0
    for index, symbol in enumerate(rule.expansion):
        nones += runs[index]
        if symbol.is_term and symbol.filter_out:
            continue
        children.append((index, not symbol.is_term and symbol.name.startswith("_"), nones))
        nones = 0
    nones += runs[-1]
    if single and len(children) == 1 and rule.expansion[children[0][0]].is_term:
        # lark gives such a part the place of its token, not that of the part around it
        raise ValueError(f"{rule.origin.name}: a terminal alone in a `?` rule needs a name (`->`)")
    always_single = single and len(children) == 1 and not children[0][1] and not any(runs)
    name = "" if helper or always_single else str(rule.alias or rule.origin.name)
    return len(rule.expansion), name, single, tuple(children), nones


def _literals(lexer: Any) -> Iterator[tuple[str, bool, tuple[tuple[str, str], ...]]]:
    """The terminals that are texts of another, by that one: keywords of names, and what lark finds itself."""
    keywords = {word: terminal for word, terminal in ITEM_WORDS.items() if terminal in lexer.terminals_by_name}
    others = [t for t in lexer.terminals if t.name not in ITEM_WORDS.values()]
    begun = {word: [t.name for t in others if re.match(t.pattern.to_regexp(), word)] for word in keywords}
    for word, names in begun.items():
        if names != ["NAME"]:
            raise ValueError(f"`{word}` must begin a NAME and no other terminal, but begins {names}")
    if keywords:
        yield "NAME", True, tuple(keywords.items())
    for terminal, callback in sorted(lexer.callback.items()):
        texts = tuple(sorted((t.pattern.value, t.name) for t in callback.scanner.terminals))
        yield terminal, False, texts


# --- writing ----------------------------------------------------------------------------------------------------------


def module_text(start: str) -> str:
    """The module that holds the tables of a start rule."""
    tables = make_tables(start)
    lines = [
        f'"""The parser\'s tables from `{start}`. Made by `python -m rlflow.grammar.generate`; do not edit."""',
        "",
        "# ruff: noqa: E501",
        "",
        "from rlflow.grammar.tables import Tables",
        "",
        "# fmt: off",
        "TABLES = Tables(",
    ]
    for name, value in zip(Tables._fields, tables, strict=True):
        lines += [f"    {name}={_written(value)},"]
    return "\n".join([*lines, ")", ""])


def _written(value: object) -> str:
    """A value as Python text in lines of at most 120 characters."""
    if not isinstance(value, tuple):
        return repr(value)
    pieces = [_atom(part) + "," for part in value]
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + 1 + len(piece) <= 110:
            lines[-1] += " " + piece
        else:
            lines.append(piece)
    return "(\n" + textwrap.indent("\n".join(lines), " " * 8) + "\n    )"


def _atom(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_atom, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def _quoted(text: str) -> str:
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def main() -> None:
    """Write the modules of all start rules."""
    for start, module in MODULES.items():
        Path(__file__).with_name(f"{module}.py").write_text(module_text(start), "utf-8")


if __name__ == "__main__":
    main()

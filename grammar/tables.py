"""The parser's tables as plain values, and the way from them to a parser."""

from __future__ import annotations

import zlib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from rlflow.grammar.lalr import Rule, Table
from rlflow.grammar.scanner import Literals, Scanner
from rlflow.grammar.words import grammar_text

GRAMMAR = Path(__file__).with_name("rlflow.lark")
MODULES = {"start": "table_program", "expr": "table_expression"}
"""Start rule to the module of its tables."""


class Tables(NamedTuple):
    """What a module of tables holds; the fields are those of `lalr.Table` and `scanner.Scanner` in short."""

    source: int
    """The fingerprint of the grammar that they were made from."""
    terminals: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]
    literals: tuple[tuple[str, bool, tuple[tuple[str, str], ...]], ...]
    rules: tuple[tuple[int, int, str, bool, tuple[tuple[int, bool, int], ...], int], ...]
    lookaheads: tuple[str, ...]
    """Sets of terminals, with blanks between them."""
    actions: tuple[tuple[tuple[int, int], ...], ...]
    """Of every state pairs of an action and the index of its lookaheads."""
    gotos: tuple[tuple[tuple[int, int], ...], ...]
    """Of every state pairs of a nonterminal and the next state."""
    start: int
    end: int


def fingerprint() -> int:
    """Of the grammar's text, keywords included: tells whether tables are those of the grammar beside them."""
    return zlib.crc32(grammar_text(GRAMMAR.read_text("utf-8")).encode())


@cache
def load(start: str) -> Table:
    """The parser's table from a start rule.

    It comes from the module of that rule; while the grammar is being changed, and the module is an old one's, it is
    made from the grammar, which takes long.
    """
    tables: Tables = import_module(f"rlflow.grammar.{MODULES[start]}").TABLES
    if tables.source != fingerprint():
        from rlflow.grammar.generate import make_tables

        tables = make_tables(start)
    return table_of(tables)


def table_of(tables: Tables) -> Table:
    """The table and its scanner."""
    literals = {kind: Literals(dict(texts), bounded) for kind, bounded, texts in tables.literals}
    ahead = [terminals.split() for terminals in tables.lookaheads]
    return Table(
        Scanner(tables.terminals, frozenset(tables.ignored), literals),
        tuple(Rule(*rule) for rule in tables.rules),
        tuple({kind: action for action, index in row for kind in ahead[index]} for row in tables.actions),
        tuple(map(dict, tables.gotos)),
        tables.start,
        tables.end,
    )

"""An LALR(1) parser that runs on ready tables (DeRemer and Pennello 1982 make them; here lark does, ahead of time).

Values are made while the text is read, bottom up and from left to right, so nothing recurses, however deep the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlflow.grammar.scanner import END, Scanner, Token
from rlflow.values import dataclass

Extent = tuple[int, int]
"""Offsets of the first character of a part and behind its last; (0, 0) for a part without text."""
Action = Callable[[Extent, list[Any]], Any]
"""Makes the value of a part from its extent and children: tokens, values of parts, None for what was left out."""


class Rule(NamedTuple):
    """One way to make a nonterminal of `size` symbols."""

    symbol: int
    size: int
    name: str
    """Of the action; empty where there is none: for a part that its only child stands for, and for a helper of
    repetitions, whose children go into the part it stands in."""
    single: bool
    """An only child stands for the part."""
    children: tuple[tuple[int, bool, int], ...]
    """Of every child its index among the symbols, whether it is a helper, and how many None stand before it."""
    nones: int
    """How many None stand after the last child."""


@dataclass(frozen=True)
class Table:
    """`actions` of every state: the next state, or for a reduction ~ the index of the rule; by terminal."""

    scanner: Scanner
    rules: tuple[Rule, ...]
    actions: tuple[Mapping[str, int], ...]
    gotos: tuple[Mapping[int, int], ...]
    start: int
    end: int
    """The state behind a whole text."""


class UnexpectedTokenError(Exception):
    """A token, END included, that cannot stand where it does; `accepts` could."""

    def __init__(self, token: Token, accepts: frozenset[str]) -> None:
        super().__init__(f"unexpected {token.kind}")
        self.token = token
        self.accepts = accepts


class UnexpectedCharacterError(Exception):
    """A character with which no token begins; `allowed` are the terminals that the parser looked for."""

    def __init__(self, at: int, allowed: frozenset[str]) -> None:
        super().__init__(f"unexpected character at {at}")
        self.at = at
        self.allowed = allowed


def parse(table: Table, text: str, action_of: Callable[[str], Action]) -> tuple[Any, int]:
    """The value of a text, and the levels of its tree: 1 for a part whose children are tokens.

    `action_of` gives the action of a rule's name. Raises UnexpectedTokenError and UnexpectedCharacterError.
    """
    rules, actions, gotos, end = table.rules, table.actions, table.gotos, table.end
    scan = table.scanner.scan
    makers = [action_of(rule.name) if rule.name else None for rule in rules]
    passes = [rule.single and rule.size == 1 and rule.children == ((0, False, 0),) for rule in rules]
    states = [table.start]
    # One entry each for every symbol on the stack.
    values: list[Any] = []
    extents: list[Extent] = []
    levels: list[int] = []
    at = 0
    while True:
        row = actions[states[-1]]
        token = scan(text, at, row)
        if not isinstance(token, Token):
            raise _nothing_taken(table, states, text, token)
        kind, _, begin, at = token
        while True:
            action = row.get(kind)
            if action is None:
                raise UnexpectedTokenError(token, accepts(table, states))
            if action >= 0:
                states.append(action)
                values.append(token)
                extents.append((begin, at))
                levels.append(0)
                break
            rule = rules[~action]
            size = rule.size
            if passes[~action]:
                states[-1] = gotos[states[-2]][rule.symbol]
            else:
                part, extent, level = [], (0, 0), 0
                if size:
                    part = values[-size:]
                    first, last = extents[-size], extents[-1]
                    extent = (first[0], last[1]) if first[1] and last[1] else _filled(extents[-size:])
                    level = max(levels[-size:])
                    del states[-size:], values[-size:], extents[-size:], levels[-size:]
                children = _children(rule, part)
                maker = makers[~action]
                if rule.single and len(children) == 1:
                    values.append(children[0])
                elif maker is None:
                    values.append(children)
                else:
                    values.append(maker(extent, children))
                    level += 1
                extents.append(extent)
                levels.append(level)
                states.append(gotos[states[-1]][rule.symbol])
            if kind == END and states[-1] == end:
                return values[-1], levels[-1]
            row = actions[states[-1]]


def accepts(table: Table, states: list[int]) -> frozenset[str]:
    """The terminals that could come next, reductions before them included."""
    return frozenset(kind for kind in table.actions[states[-1]] if _accepts(table, list(states), kind))


def _accepts(table: Table, states: list[int], kind: str) -> bool:
    while True:
        action = table.actions[states[-1]].get(kind)
        if action is None or action >= 0:
            return action is not None
        rule = table.rules[~action]
        if rule.size:
            del states[-rule.size :]
        states.append(table.gotos[states[-1]][rule.symbol])
        if kind == END and states[-1] == table.end:
            return True


def _nothing_taken(table: Table, states: list[int], text: str, at: int) -> Exception:
    token = table.scanner.any_token(text, at)
    if token is None:
        return UnexpectedCharacterError(at, table.scanner.allowed(table.actions[states[-1]]))
    return UnexpectedTokenError(token, accepts(table, states))


def _filled(extents: list[Extent]) -> Extent:
    """From the first to the last symbol that has text, where some have none."""
    filled = [extent for extent in extents if extent[1]]
    return (filled[0][0], filled[-1][1]) if filled else (0, 0)


def _children(rule: Rule, part: list[Any]) -> list[Any]:
    children: list[Any] = []
    for index, helper, nones in rule.children:
        if nones:
            children.extend([None] * nones)
        if not helper:
            children.append(part[index])
        elif children:
            children.extend(part[index])
        else:
            children = part[index]  # grown, not copied: a list of n items costs n
    if rule.nones:
        children.extend([None] * rule.nones)
    return children

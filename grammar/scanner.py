"""Text to tokens, knowing what the parser can take next: a contextual lexer (Van Wyk and Schwerdfeger 2007).

The terminal of a token is the first in the order of the table that matches among those the parser's state takes. One
expression for all terminals answers nearly always: when its first match is taken here, no other comes before it. Only
otherwise the expression of the state's own terminals is made.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import NamedTuple

END = "$END"
"""The terminal after the last token."""
END_OF_FILE = "<END-OF-FILE>"
"""Said to be allowed where no terminal is."""


class Token(NamedTuple):
    """A terminal with its text; `start` and `end` are offsets."""

    kind: str
    text: str
    start: int
    end: int


class Literals(NamedTuple):
    """Texts of one terminal that are terminals of their own where the parser takes those: keywords among names."""

    terminals: Mapping[str, str]
    """Text to terminal."""
    bounded: bool
    """Whether no letter, digit or underscore of any alphabet may follow."""


class Scanner:
    """`terminals` are names and expressions in order, those in `literals` included; `ignored` ones make no tokens."""

    def __init__(
        self, terminals: tuple[tuple[str, str], ...], ignored: frozenset[str], literals: Mapping[str, Literals]
    ) -> None:
        self._terminals = terminals
        self._ignored = ignored
        self._literals = literals
        special = {name for held in literals.values() for name in held.terminals.values()}
        self._match = _matcher([pair for pair in terminals if pair[0] not in special])
        self._own: dict[frozenset[str], re.Pattern[str]] = {}

    def scan(self, text: str, at: int, taken: Container[str]) -> Token | int:
        """The next token among the terminals taken; where there is none, the offset of what is no such token.

        At the end of the text it is the token END, without text.
        """
        match, ignored, literals, length = self._match.match, self._ignored, self._literals, len(text)
        while at < length:
            found = match(text, at)
            if found is None:
                return at
            kind: str = found.lastgroup  # type: ignore[assignment]
            end = found.end()
            if kind in ignored:
                at = end
                continue
            word = found[0]
            if kind in literals:
                literal = self._literal(kind, word, text, end)
                if literal is not None and literal in taken:
                    return Token(literal, word, at, end)
            if kind in taken:
                return Token(kind, word, at, end)
            own = self._pattern_of(taken).match(text, at)
            if own is None:
                return at
            kind = own.lastgroup  # type: ignore[assignment]
            if kind not in ignored:
                literal = self._literal(kind, own[0], text, own.end())
                return Token(literal if literal and literal in taken else kind, own[0], at, own.end())
            at = own.end()
        return Token(END, "", length, length)

    def any_token(self, text: str, at: int) -> Token | None:
        """The token at an offset whatever the parser takes; None where none begins."""
        found = self._match.match(text, at)
        if found is None:
            return None
        kind: str = found.lastgroup  # type: ignore[assignment]
        literal = self._literal(kind, found[0], text, found.end())
        return Token(literal or kind, found[0], at, found.end())

    def allowed(self, taken: Container[str]) -> frozenset[str]:
        """The terminals that a state looks for."""
        return frozenset(name for name, _ in self._looked_for(taken) if name not in self._ignored) or frozenset(
            {END_OF_FILE}
        )

    def _literal(self, kind: str, word: str, text: str, end: int) -> str | None:
        held = self._literals.get(kind)
        literal = held and held.terminals.get(word)
        if not held or not literal:
            return None
        if held.bounded and end < len(text) and (text[end].isalnum() or text[end] == "_"):
            return None
        return literal

    def _looked_for(self, taken: Container[str]) -> list[tuple[str, str]]:
        """The state's terminals in order. A text that is a terminal beside the one it is a case of is found as that."""
        found = [pair for pair in self._terminals if pair[0] in taken or pair[0] in self._ignored]
        inner = {
            name
            for kind, held in self._literals.items()
            if kind in taken and not held.bounded
            for name in held.terminals.values()
        }
        return [pair for pair in found if pair[0] not in inner]

    def _pattern_of(self, taken: Container[str]) -> re.Pattern[str]:
        looked_for = self._looked_for(taken)
        key = frozenset(name for name, _ in looked_for)
        if key not in self._own:
            self._own[key] = _matcher(looked_for)
        return self._own[key]


def _matcher(terminals: list[tuple[str, str]]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in terminals))

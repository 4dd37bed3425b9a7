"""Comments and blank lines of a text, and their places between the tokens that a printer writes.

A comment belongs to a gap between two tokens, never to a node of the tree: so every comment has a place, whatever the
node classes are, and stays in order. Comments are found by a scanner that knows strings; it needs a text that parses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

_PIECE = re.compile(r'(?P<string>"(?:\\.|[^"\\\n])*")|(?P<comment>#[^\n]*)|(?P<space>\s+)|(?P<sign>.)')
_OPTIONAL = frozenset("(),{}")
"""What the printer may leave out or add: redundant parentheses, separating and trailing commas, empty braces."""


@dataclass(slots=True)
class Comment:
    """`text` starts with `#`. `trailing`: on the line of the token before it. `blank`: a blank line stands above it."""

    text: str
    trailing: bool = False
    blank: bool = False


@dataclass(slots=True)
class Gap:
    """What stands between two tokens; `blank`: a blank line stands directly above the second one."""

    comments: list[Comment] = field(default_factory=list)
    blank: bool = False

    def join(self, other: Gap) -> Gap:
        """This gap and the next one, when the token between them goes away."""
        alone = not self.comments  # only then the first comment still stands on the line of the token before
        later = [Comment(c.text, c.trailing and alone, c.blank) for c in other.comments]
        if later:
            later[0].blank |= self.blank
            return Gap([*self.comments, *later], other.blank)
        return Gap(list(self.comments), self.blank or other.blank)


class Glue(Enum):
    """Whether comments keep off one side of a token."""

    NO = auto()
    LEFT = auto()
    """No comment directly before it, as before a comma: it moves behind."""
    RIGHT = auto()
    """No comment directly after it, as after an operator: it moves before."""


@dataclass(slots=True)
class Token:
    """A piece of text that the printer writes, and the comments around it."""

    text: str
    glue: Glue = Glue.NO
    before: list[Comment] = field(default_factory=list)
    after: str = ""
    """The comment that ends the line of this token, or nothing."""
    blank: bool = False


class MismatchError(Exception):
    """The printed tokens are not the tokens of the text."""


def scan(text: str) -> tuple[list[str], list[Gap]]:
    """The visible characters of a text, a string counting as one, and the gap before each and after the last."""
    units: list[str] = []
    gaps = [Gap()]
    newlines = 0
    for piece in _PIECE.finditer(text):
        kind, found = piece.lastgroup, piece[0]
        if kind == "space":
            newlines += found.count("\n")
        elif kind == "comment":
            trailing = newlines == 0 and bool(units) and not gaps[-1].comments
            gaps[-1].comments.append(Comment(found.rstrip(), trailing, newlines > 1))
            newlines = 0
        else:
            gaps[-1].blank = newlines > 1
            newlines = 0
            units.append(found if kind == "sign" else '"')
            gaps.append(Gap())
    gaps[-1].blank = newlines > 1
    return units, gaps


def comments_of(text: str) -> list[str]:
    """Every comment of a text, in order, without white space at its end."""
    return [comment.text for gap in scan(text)[1] for comment in gap.comments]


def attach(tokens: Sequence[Token], text: str) -> None:
    """Put the comments and blank lines of `text` at the tokens; the last token is the empty end of the file.

    Raises MismatchError when the tokens are not those of the text.
    """
    gaps = _align(tokens, text)
    for i, token in enumerate(tokens[:-1]):
        if token.glue is Glue.LEFT:
            gaps[i], gaps[i + 1] = Gap(), gaps[i].join(gaps[i + 1])
    for i in range(len(tokens) - 2, -1, -1):
        if tokens[i].glue is Glue.RIGHT:
            gaps[i], gaps[i + 1] = gaps[i].join(gaps[i + 1]), Gap()
    for i, (token, gap) in enumerate(zip(tokens, gaps, strict=True)):
        comments = gap.comments
        if comments and comments[0].trailing and i > 0:
            tokens[i - 1].after = comments[0].text
            comments = comments[1:]
        token.before = comments
        token.blank = gap.blank


def _align(tokens: Sequence[Token], text: str) -> list[Gap]:
    """The gap before each token."""
    units, between = scan(text)
    at = 0
    pending = between[0]
    found: list[Gap] = []

    def advance() -> None:
        nonlocal at, pending
        at += 1
        pending = pending.join(between[at])

    for token in tokens:
        first = True
        for unit in scan(token.text)[0]:
            while at < len(units) and units[at] != unit and units[at] in _OPTIONAL:
                advance()
            if first:
                found.append(pending)
                pending = Gap()
                first = False
            if at < len(units) and units[at] == unit:
                advance()
            elif unit not in _OPTIONAL:
                raise MismatchError(f"`{token.text}` is printed where the text has other words")
        if first:  # the end of the file
            while at < len(units) and units[at] in _OPTIONAL:
                advance()
            found.append(pending)
            pending = Gap()
    if at < len(units):
        raise MismatchError(f"`{''.join(units[at : at + 20])}` is not printed")
    return found

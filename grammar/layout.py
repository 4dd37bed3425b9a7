"""Lines out of a tree of documents: where to break, how far to indent, where the comments stand.

A document is a text (blank: layout; anything else: a token), a list of documents, or one of the classes below. As in
Wadler's and Prettier's printers a group is written on one line when it fits, otherwise its lines break.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from rlflow.grammar.comments import Glue, Token, attach
from rlflow.values import dataclass

WIDTH = 100
STEP = 2
_DIRECTIVE = re.compile(r"#\s*rlflow\s*:")


class Blank(Enum):
    """What becomes of the blank lines that the user wrote at a line break."""

    DROP = auto()
    KEEP = auto()
    KEEP_LATER = auto()
    """After an opening brace: none above the first comment or token."""
    FORCE = auto()


@dataclass(frozen=True, slots=True)
class Line:
    """A line break; `flat` stands for it when its group is on one line. `hard`: always breaks."""

    flat: str = " "
    blank: Blank = Blank.DROP
    hard: bool = False


@dataclass(frozen=True, slots=True)
class IfBroken:
    """Text written only where the group is broken: a trailing comma, the padding of a column."""

    text: str


@dataclass(slots=True)
class Nest:
    """Further in by one step."""

    doc: Doc


@dataclass(slots=True)
class Group:
    """On one line if it fits. `forced`: a comment inside breaks it; set when the comments are known."""

    doc: Doc
    forced: bool = False


Doc = str | Token | Line | IfBroken | Nest | Group | list["Doc"]
_ALWAYS_GLUED = frozenset(",={")


def render(doc: Doc, text: str | None = None) -> str:
    """The document as text that ends in a newline (nothing for an empty one).

    `text` is the source whose comments and blank lines are kept. Raises MismatchError when the document's tokens are
    not those of the source.
    """
    whole: list[Doc] = [doc, Token("")]
    tokens, groups = _tokens(whole)
    if text is not None:
        attach(tokens, text)
    counts = _comment_counts(tokens)
    for group, first, end in groups:
        group.forced = first < end and counts[end - 1] > counts[first]
    return _write(whole)


def _tokens(whole: list[Doc]) -> tuple[list[Token], list[tuple[Group, int, int]]]:
    """Make tokens of the texts, in place; all tokens in order, and of each group the first and the end among them."""
    tokens: list[Token] = []
    groups: list[tuple[Group, int, int]] = []
    open_lists: list[tuple[list[Doc], int, Group | None, int]] = [(whole, 0, None, 0)]
    while open_lists:
        parts, at, group, first = open_lists.pop()
        if at == len(parts):
            if group is not None:
                groups.append((group, first, len(tokens)))
            continue
        open_lists.append((parts, at + 1, group, first))
        part = parts[at]
        if isinstance(part, str) and part.strip():
            part = parts[at] = Token(part, Glue.LEFT if part in _ALWAYS_GLUED else Glue.NO)
        if isinstance(part, Token):
            tokens.append(part)
        elif isinstance(part, list):
            open_lists.append((part, 0, None, 0))
        elif isinstance(part, Nest | Group):
            inside = part.doc = part.doc if isinstance(part.doc, list) else [part.doc]
            open_lists.append((inside, 0, part if isinstance(part, Group) else None, len(tokens)))
    return tokens, groups


def _comment_counts(tokens: list[Token]) -> list[int]:
    """At i: how many gaps before token i hold a comment, its own included."""
    counts: list[int] = []
    total = 0
    after = ""
    for token in tokens:
        total += bool(token.before or after)
        counts.append(total)
        after = token.after
    return counts


Command = tuple[int, bool, Doc]
"""Indent, whether on one line, document."""


def _write(doc: Doc) -> str:
    writer = _Writer()
    stack: list[Command] = [(0, False, doc)]
    while stack:
        indent, flat, part = stack.pop()
        if isinstance(part, Token):
            writer.token(part, indent)
        elif isinstance(part, str):
            writer.space(part)
        elif isinstance(part, list):
            stack.extend((indent, flat, child) for child in reversed(part))
        elif isinstance(part, Nest):
            stack.append((indent + STEP, flat, part.doc))
        elif isinstance(part, Group):
            room = WIDTH - writer.column()
            flat = flat or (not part.forced and _fits(room, (indent, True, part.doc), stack))
            stack.append((indent, flat, part.doc))
        elif isinstance(part, IfBroken):
            if not flat:
                writer.space(part.text)
        elif flat and not part.hard:
            writer.space(part.flat)
        else:
            writer.line(indent, part.blank)
    return writer.finish()


def _fits(room: int, start: Command, rest: list[Command]) -> bool:
    """Whether `start` and what follows it (the last of `rest` first) up to the next line break have room.

    What a comment for rlflow is about stays on its line, so such a line may be longer.
    """
    first = True
    stack = [start]
    following = len(rest)
    while stack or following:
        if not stack:
            following -= 1
            stack.append(rest[following])
        indent, flat, part = stack.pop()
        if isinstance(part, Token):
            if part.before and not first:
                break
            first = False
            room -= len(part.text)
            if part.after:
                return room >= 0 or bool(_DIRECTIVE.match(part.after))
        elif isinstance(part, str):
            room -= len(part)
        elif isinstance(part, list):
            stack.extend((indent, flat, child) for child in reversed(part))
        elif isinstance(part, Nest | Group):
            stack.append((indent, flat, part.doc))
        elif isinstance(part, IfBroken):
            room -= 0 if flat else len(part.text)
        elif flat and not part.hard:
            room -= len(part.flat)
        else:
            break
    return room >= 0


class _Writer:
    """Collects lines. A line break is kept back until the next token shows which comments stand before it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line = ""
        self._comment = ""
        """The comment that will end the current line."""
        self._break: tuple[int, Blank] | None = (0, Blank.KEEP_LATER)

    def column(self) -> int:
        return len(self._line) if self._break is None else self._break[0]

    def space(self, text: str) -> None:
        """Layout: spaces, or a trailing comma, which stands before the line's comment."""
        if self._break is None and (not self._comment or text.strip()):
            self._line += text

    def line(self, indent: int, blank: Blank) -> None:
        self._break = (indent, blank)

    def token(self, token: Token, indent: int) -> None:
        closes = token.text in (")", "]", "}")
        if self._break is None and (self._comment or token.before):
            self._break = (indent if closes else indent + STEP, Blank.DROP)
        if self._break is not None:
            column, blank = self._break
            inner = column + STEP if closes else column
            above = blank is Blank.FORCE
            for i, comment in enumerate(token.before):
                self._new_line(above or (comment.blank and _kept(blank, i)))
                self._line = " " * inner + comment.text
                above = False
            if token.text:
                self._new_line(above or (token.blank and not closes and _kept(blank, len(token.before))))
                self._line = " " * column
            self._break = None
        self._line += token.text
        self._comment = token.after

    def _new_line(self, blank: bool) -> None:
        started = bool(self._lines or self._line)
        if started:
            self._lines.append(self._line.rstrip() + (f"  {self._comment}" if self._comment else ""))
        if blank and started:
            self._lines.append("")
        self._line = self._comment = ""

    def finish(self) -> str:
        self._new_line(False)
        return "".join(f"{line}\n" for line in self._lines)


def _kept(blank: Blank, place: int) -> bool:
    return blank in (Blank.KEEP, Blank.FORCE) or (blank is Blank.KEEP_LATER and place > 0)

"""The formatter: text to text in the one style, with proof on every run that nothing but the layout changed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from rlflow.diagnostics import CompileError, SourceFile, Span
from rlflow.grammar import nodes
from rlflow.grammar.comments import MismatchError, comments_of
from rlflow.grammar.parse import parse
from rlflow.grammar.printer import print_source


class FormatError(Exception):
    """A bug of the formatter, found before anything was written."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"formatting `{file}` {reason}, so it was left as it is")


def format_text(source: SourceFile) -> str:
    """The text of a file in canonical form, its comments kept.

    Raises CompileError when the text does not parse, FormatError when the result would not be the same program with
    the same comments, or would itself be formatted differently.
    """
    program = parse(source)
    text = _printed(program)
    try:
        again = parse(SourceFile(source.name, text))
    except CompileError:
        raise FormatError(source.name, "would give a text that does not parse") from None
    if shape(again) != shape(program):
        raise FormatError(source.name, "would change the program")
    if comments_of(text) != comments_of(source.text):
        raise FormatError(source.name, "would lose or move a comment")
    if _printed(again) != text:
        raise FormatError(source.name, "twice would give another text than once")
    return text


def _printed(program: nodes.Program) -> str:
    try:
        return print_source(program)
    except MismatchError:
        raise FormatError(program.file.name, "would change its words") from None


def shape(node: object) -> list[object]:
    """A node as plain values in a row, spans and files left out: equal for trees that mean the same."""
    values: list[object] = []
    stack = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, Span | SourceFile):
            continue
        if isinstance(part, tuple):
            values.append(len(part))
            stack.extend(reversed(part))
        elif is_dataclass(part):
            values.append(type(part).__name__)
            stack.extend(getattr(part, f.name) for f in reversed(fields(part)))
        else:
            values.append((type(part), part))
    return values

"""`# rlflow: ignore[RLF1013]`: comments that silence a warning where it is meant.

The comment stands at the end of the line on which the warning's place starts, or alone on the line before it. Several
codes are separated by commas; words after the bracket are the reader's. Errors cannot be silenced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rlflow.diagnostics.codes import CODES, WARNINGS, find_code
from rlflow.diagnostics.diagnostic import Diagnostic, Label, Severity, did_you_mean
from rlflow.diagnostics.source import SourceFile, Span

# Strings are matched so that a `#` inside one starts no comment.
_COMMENTS = re.compile(r'"(?:\\.|[^"\\\n])*"|(?P<comment>#[^\n]*)')
_DIRECTIVE = re.compile(r"#\s*rlflow\s*:\s*(?P<word>[A-Za-z]+)[ \t]*(?:\[(?P<codes>[^\]]*)(?P<close>\])?)?")
_ITEM = re.compile(r"[^,\s](?:[^,]*[^,\s])?")

_SELF = ("RLF0006", "RLF0007")
"""Warnings about suppressions: not for suppressing."""


@dataclass
class _Item:
    """One code of one comment, for the diagnostics of one line."""

    code: str
    span: Span
    line: int
    used: bool = field(default=False, init=False)


def apply_suppressions(
    source: SourceFile, diagnostics: Iterable[Diagnostic], *, within: Sequence[Span] | None = None
) -> list[Diagnostic]:
    """The diagnostics without the warnings that comments of `source` silence, and with warnings about such comments.

    A comment that silences nothing is reported only when there is no error (an error may have kept the warning from
    being found) and only inside `within`, the parts of the file that were checked; None = the whole file.
    """
    found = list(diagnostics)
    items: list[_Item] = []
    problems: list[Diagnostic] = []
    for part in _read(source, found):
        if isinstance(part, Diagnostic):
            problems.append(part)
        else:
            items.append(part)
    kept = [diagnostic for diagnostic in found if not _silenced(diagnostic, source, items)]
    if not any(diagnostic.severity is Severity.ERROR for diagnostic in found):
        for item in items:
            checked = within is None or any(span.line <= item.line <= span.end_position[0] for span in within)
            if checked and not item.used:
                problems.append(_unused(item))
    problems.sort(key=lambda diagnostic: diagnostic.labels[0].span.start)
    return kept + problems


def _silenced(diagnostic: Diagnostic, source: SourceFile, items: list[_Item]) -> bool:
    span = diagnostic.span
    if diagnostic.severity is not Severity.WARNING or diagnostic.code in _SELF or span is None or span.file != source:
        return False
    for item in items:
        if item.code == diagnostic.code and item.line == span.line:
            item.used = True
            return True
    return False


def _read(source: SourceFile, found: list[Diagnostic]) -> Iterator[_Item | Diagnostic]:
    """Every code of every suppression comment, or what is wrong with it."""
    for match in _COMMENTS.finditer(source.text):
        if match["comment"] is None:
            continue
        for directive in _DIRECTIVE.finditer(source.text, match.start(), match.end()):
            whole = Span(source, *directive.span())
            if directive["word"] != "ignore":
                if directive["codes"] is not None:
                    yield _wrong(
                        f"unknown instruction `{directive['word']}` in a comment for rlflow",
                        Span(source, *directive.span("word")),
                        "did you mean `ignore`?",
                    )
                continue
            words = list(_ITEM.finditer(source.text, *directive.span("codes"))) if directive["codes"] else []
            if not words or directive["close"] is None:
                what = "names no code" if not words else "has no closing `]`"
                yield _wrong(f"this suppression {what}", whole, "write `# rlflow: ignore[RLF1013]`")
                continue
            line = _line_meant(source, match.start())
            for word in words:
                yield _item(word[0], Span(source, *word.span()), line, source, found)


def _line_meant(source: SourceFile, start: int) -> int:
    """The comment's own line, or the next line that is more than a comment when it stands alone."""
    line = source.position(start)[0]
    if source.line(line)[: source.position(start)[1] - 1].strip():
        return line
    line += 1
    while source.line(line).lstrip().startswith("#"):
        line += 1
    return line


def _item(word: str, span: Span, line: int, source: SourceFile, found: list[Diagnostic]) -> _Item | Diagnostic:
    if word not in CODES:
        guess = find_code(word) or did_you_mean(word.upper(), WARNINGS.difference(_SELF))
        return _wrong(f"unknown code `{word}`", span, *([f"did you mean `{guess}`?"] if guess else []))
    here = [d for d in found if d.code == word and d.span is not None and d.span.file == source]
    error_here = any(d.severity is Severity.ERROR and d.span is not None and d.span.line == line for d in here)
    if error_here or (word not in WARNINGS and all(d.severity is Severity.ERROR for d in here)):
        return _wrong(f"`{word}` is an error, and only warnings can be suppressed", span, "remove it and fix the cause")
    if word in _SELF:
        return _wrong(f"`{word}` is about suppressions and cannot be suppressed", span, "remove the unused suppression")
    return _Item(word, span, line)


def _unused(item: _Item) -> Diagnostic:
    return Diagnostic(
        "RLF0006",
        f"there is no `{item.code}` here to suppress",
        (Label(item.span, f"looked on line {item.line}"),),
        help=("remove it",),
        severity=Severity.WARNING,
    )


def _wrong(message: str, span: Span, *help: str) -> Diagnostic:
    return Diagnostic("RLF0007", message, (Label(span),), help=help, severity=Severity.WARNING)

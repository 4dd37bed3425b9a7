"""One `--set PATH=VALUE`: its path, its value, and the text that messages show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlflow.diagnostics import CompileError, Diagnostic, Label, SourceFile, Span, did_you_mean
from rlflow.frontend.constants import Poison, Reporter
from rlflow.frontend.parameters import Parameter, Text
from rlflow.grammar import nodes
from rlflow.grammar.parse import parse_expression
from rlflow.values import dataclass


def read_overrides(texts: Sequence[str], report: Reporter) -> list[Override]:
    """The overrides in order; what is not `path=value` is reported and left out."""
    read: list[Override] = []
    for text in texts:
        try:
            read.append(Override.read(text, report))
        except Poison:
            continue
    return read


@dataclass(frozen=True)
class Override:
    """One `--set`: the path, the value as written, and the text that messages show."""

    file: SourceFile
    path: tuple[str, ...]
    raw: str

    @classmethod
    def read(cls, text: str, report: Reporter) -> Override:
        key, equals, value = text.partition("=")
        file = SourceFile("--set " + text, text)
        if not equals or not key.strip() or not value.strip():
            raise report.error(
                "RLF1011",
                f"`--set {text}` is not `path=value`",
                Label(Span(file, 0, len(text))),
                help=("for example `--set batch.count=8`",),
            )
        return cls(file, tuple(key.strip().split(".")), value.strip())

    @property
    def key_span(self) -> Span:
        return Span(self.file, 0, self.file.text.index("="))

    def _value_span(self) -> Span:
        start = len(self.file.text) - len(self.file.text.partition("=")[2].lstrip())
        return Span(self.file, start, len(self.file.text))

    def text(self) -> nodes.String:
        """The value as a text."""
        return nodes.String(self.raw, self._value_span())

    def value(self, report: Reporter, parameter: Parameter | None) -> nodes.Expr:
        """The value as an expression; a bare word or path is a text where a text is expected."""
        span = self._value_span()
        if parameter is not None and isinstance(parameter.accepts, Text) and not self.raw.startswith('"'):
            return nodes.Constant(None, span) if self.raw == "none" else self.text()
        padded = SourceFile(self.file.name, " " * span.start + self.raw)
        try:
            return _at(parse_expression(padded), span)
        except CompileError as error:
            report.diagnostics.extend(
                Diagnostic(d.code, d.message, tuple(Label(span, x.text) for x in d.labels), d.notes, d.help)
                for d in error.diagnostics
            )
            raise Poison() from None

    def unknown(self, report: Reporter, at: int, candidates: list[str]) -> Poison:
        word = self.path[at]
        guess = did_you_mean(word, candidates)
        help_lines = (f"did you mean `{'.'.join((*self.path[:at], guess, *self.path[at + 1 :]))}`?",) if guess else ()
        notes = () if guess or not candidates else ("known here: " + ", ".join(f"`{c}`" for c in sorted(candidates)),)
        where = f" in `{'.'.join(self.path[:at])}`" if at else ""
        return report.error(
            "RLF1011", f"`--set`: there is no `{word}`{where}", Label(self.key_span), notes=notes, help=help_lines
        )


def _at(expr: nodes.Expr, span: Span) -> nodes.Expr:
    """Only the outermost span matters: it says that the value came from the command line."""
    return replace(expr, span=span)

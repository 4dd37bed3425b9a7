"""A diagnostic is a value: code, severity, message, places, notes, help. Nothing here prints."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from rlflow.diagnostics.codes import CODES
from rlflow.diagnostics.source import Span
from rlflow.values import dataclass


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Label:
    """A place with a few words beside it."""

    span: Span
    text: str = ""
    primary: bool = True


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `message` is lower case, names the user's own words in backticks and states the fact."""

    code: str
    message: str
    labels: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    help: tuple[str, ...] = ()
    severity: Severity = Severity.ERROR

    def __post_init__(self) -> None:
        assert self.code in CODES, f"code {self.code} is not in the table"

    @property
    def span(self) -> Span | None:
        """The first primary place."""
        return next((label.span for label in self.labels if label.primary), None)


class CompileError(Exception):
    """The input has errors; `diagnostics` holds all that were found, warnings included."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("; ".join(d.message for d in self.diagnostics))


class RunFailure(Exception):
    """A run cannot go on. Travels between processes, so it holds only text.

    Attributes: `code`, `message`, `stage` (its id in the plan, "" when no stage is to blame), `notes` (facts, the
    original cause last), `help` (what to do), `trace` (the original traceback, shown with --debug).
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        stage: str = "",
        notes: Iterable[str] = (),
        help: Iterable[str] = (),
        trace: str = "",
    ) -> None:
        assert code in CODES, f"code {code} is not in the table"
        self.code = code
        self.message = message
        self.stage = stage
        self.notes = tuple(notes)
        self.help = tuple(help)
        self.trace = trace
        super().__init__(message)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rebuild_run_failure, (self.code, self.message, self.stage, self.notes, self.help, self.trace)

    def at(self, stage: str) -> RunFailure:
        """The same failure, blamed on a stage unless one is named already."""
        return RunFailure(
            self.code, self.message, stage=self.stage or stage, notes=self.notes, help=self.help, trace=self.trace
        )

    def to_diagnostic(self, labels: tuple[Label, ...] = ()) -> Diagnostic:
        message = f"stage `{self.stage}`: {self.message}" if self.stage else self.message
        return Diagnostic(self.code, message, labels, self.notes, self.help)


def _rebuild_run_failure(
    code: str, message: str, stage: str, notes: tuple[str, ...], help: tuple[str, ...], trace: str
) -> RunFailure:
    return RunFailure(code, message, stage=stage, notes=notes, help=help, trace=trace)


def did_you_mean(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate closest to `word`, or None when none is close. Ties go to the alphabetically first."""
    pool = sorted(set(candidates))
    for candidate in pool:
        if candidate.lower() == word.lower():
            return candidate
    from difflib import get_close_matches

    found = get_close_matches(word, pool, n=1, cutoff=0.6)
    return found[0] if found else None


def one_of(words: Iterable[str]) -> str:
    """`a`, `b` or `c`, in the given order."""
    quoted = [f"`{word}`" for word in words]
    if len(quoted) <= 1:
        return "".join(quoted)
    return ", ".join(quoted[:-1]) + " or " + quoted[-1]

"""What every input must get: a sound flow with its plan, or diagnostics with known codes and places, in five seconds."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlflow import driver
from rlflow.diagnostics import CompileError, Diagnostic, Severity
from rlflow.diagnostics.codes import CODES
from rlflow.diagnostics.render import FORMATS, render
from rlflow.frontend.imports import read_source
from rlflow.grammar.format import format_text

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SEEDS = Path(__file__).with_name("seeds")
SECONDS = 5.0
"""Of processor time, so that a busy machine changes nothing."""

_INSIDES = re.compile(r"Token\(|object at 0x|<rlflow|nodes\.|Qty\(|__ANON|\bNone\b|Traceback|<class|dataclass")
"""What no message may show unless the user wrote it."""


class Wrong(Exception):
    """An answer that is none."""


class TooLong(BaseException):
    """Raised from outside of whatever takes too long; nothing that catches Exception may catch it."""


def workplace(folder: Path) -> Path:
    """A folder in which mutated examples find their data and their functions; gives the path of the file to write."""
    for name in ("data", "rewards.py", "environments.py", "ppo.rlflow"):
        (folder / name).symlink_to(EXAMPLES / name)
    return folder / "x.rlflow"


def answer(path: Path, raw: bytes, overrides: Sequence[str] = ()) -> str:
    """Check the text as the file `path`: `sound`, or the codes of what was found. Raises Wrong or TooLong."""
    path.write_bytes(raw)
    options = driver.Options(overrides=tuple(overrides))
    with at_most(SECONDS):
        try:
            checked = driver.check(path, options)
        except CompileError as error:
            _examine(error.diagnostics)
            if not any(d.severity is Severity.ERROR for d in error.diagnostics):
                raise Wrong("refused without an error") from None
            result = " ".join(sorted({d.code for d in error.diagnostics}))
        else:
            _examine(checked.warnings)
            if any(d.severity is Severity.ERROR for d in checked.warnings):
                raise Wrong("an error among the warnings of a sound flow")
            plan = driver.plan_of(checked, options)
            if type(plan).from_json(plan.to_json()) != plan:
                raise Wrong("the plan does not survive being written")
            result = "sound"
        try:
            format_text(read_source(path))
        except CompileError as error:
            if result == "sound":
                raise Wrong("what is sound cannot be formatted") from error
    return result


def _examine(found: Sequence[Diagnostic]) -> None:
    for diagnostic in found:
        if diagnostic.code not in CODES or diagnostic.code.startswith("RLF9"):
            raise Wrong(f"code {diagnostic.code}")
        if not diagnostic.labels and diagnostic.code != "RLF0003":  # a byte that is no text has no place in one
            raise Wrong(f"no place: {diagnostic.message}")
        for label in diagnostic.labels:
            if not 0 <= label.span.start <= label.span.end <= len(label.span.file.text):
                raise Wrong(f"a place outside of the text: {diagnostic.message}")
        words = re.sub(r"`[^`]*`|\"[^\"]*\"", "", diagnostic.message)
        if not words.strip() or _INSIDES.search(words):
            raise Wrong(f"a message that shows insides: {diagnostic.message}")
    if len(found) != len(set(found)):
        raise Wrong("something is said twice")
    for format in FORMATS:
        render(found, format)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TooLong inside of the block when it uses more processor time."""

    def stop(*_: object) -> None:
        raise TooLong(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

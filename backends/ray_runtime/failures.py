"""How the runtime's own failures are put into words. No torch here: the driver uses it too."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlflow.backends.ray_runtime.run_logs import rank_log
from rlflow.diagnostics.diagnostic import RunFailure

_LOG_LINES = 20
_PEER_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo",
    "ActorDiedError",
    "ActorUnavailableError",
    "OwnerDiedError",
    "ObjectLostError",
    "ObjectFetchTimedOutError",
)
_COLLECTIVE_WORDS = ("gloo", "collective", "ProcessGroup")
_LATE_WORDS = ("Timed out waiting", "timed out", "Timeout(ms)")
"""Of the libraries of collectives, whose waits end with the plan's limit."""


def stage_failed(stage: str, error: Exception) -> RunFailure:
    """RLF5006 with the original exception as the last note."""
    return RunFailure(
        "RLF5006",
        "the stage failed" if stage else "the step failed",
        stage=stage,
        notes=(f"{type(error).__name__}: {error}",),
        trace="".join(traceback.format_exception(error)),
    )


def guarded(part: str, action: Callable[[], None]) -> RunFailure | None:
    """Run `action`; what it raises comes back as a failure of `part`, a few words for what was going on."""
    try:
        action()
    except RunFailure as failure:
        return failure
    except ImportError as error:
        return RunFailure(
            "RLF5012",
            f"{part} needs the package `{error.name}`, which cannot be imported",
            notes=(f"{type(error).__name__}: {error}",),
            help=('pip install "rlflow-dsl[run]"',),
        )
    except Exception as error:
        return RunFailure(
            "RLF5006",
            f"{part} failed",
            notes=(f"{type(error).__name__}: {error}",),
            trace="".join(traceback.format_exception(error)),
        )
    return None


def worker_died(pool: str, rank: int, error: Exception, run_dir: Path, facts: Iterable[str] = ()) -> RunFailure:
    """RLF5011 for a rank whose process is gone: where it was, the end of its log, and what Ray says last."""
    log = rank_log(run_dir, pool, rank)
    notes = [*facts, f"its log: {log}"]
    try:
        lines = [line.rstrip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    if lines:
        notes.append("the log ends with:\n" + "\n".join(lines[-_LOG_LINES:]))
    notes.append(exit_reason(error))
    return RunFailure(
        "RLF5011",
        f"rank {rank} of pool `{pool}` died",
        notes=notes,
        help=(
            "a process that dies without a word in its log was killed, often because memory ran out",
            f"go on with: rlflow run --resume {run_dir}",
        )
        if (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").is_file()
        else ("a process that dies without a word in its log was killed, often because memory ran out",),
        trace=str(error),
    )


def actor_died(what: str, error: Exception) -> RunFailure:
    """RLF5011 for an actor that is no rank, such as "the queue `samples->learner`"."""
    return RunFailure("RLF5011", f"the process of {what} died", notes=(exit_reason(error),), trace=str(error))


def exit_reason(error: Exception) -> str:
    """What Ray says of the end of a process, without its advice."""
    cause = getattr(error, "cause", None) or error
    text = str(cause)
    for mark in ("Worker exit detail:", "The actor is dead because"):
        text = text.partition(mark)[2] or text
    return f"{type(cause).__name__}: {' '.join(text.split()).partition(' Some common causes')[0]}"


def is_echo(failure: RunFailure) -> bool:
    """Whether a rank failed only because it lost another one, or a queue."""
    if failure.code in ("RLF5064", "RLF5065", "RLF5067"):
        return True
    return failure.code == "RLF5006" and not is_late(failure) and _says(failure, _PEER_WORDS)


def is_late(failure: RunFailure) -> bool:
    """Whether a rank waited longer than the plan allows, for another one or for something of its own."""
    if failure.code != "RLF5006":
        return failure.code in ("RLF5019", "RLF5050")
    return _says(failure, _COLLECTIVE_WORDS) and _says(failure, _LATE_WORDS)


def _says(failure: RunFailure, words: tuple[str, ...]) -> bool:
    return any(word in note for note in failure.notes for word in words)


def with_notes(failure: RunFailure, *notes: str) -> RunFailure:
    """The same failure with more to say. The original cause stays the last note."""
    all_notes = (*failure.notes[:-1], *notes, *failure.notes[-1:])
    return RunFailure(
        failure.code, failure.message, stage=failure.stage, notes=all_notes, help=failure.help, trace=failure.trace
    )


def root_cause(failures: list[RunFailure]) -> RunFailure:
    """Of several ranks' failures the one that caused the others: who loses a peer, or waits for it, fails too."""

    def order(failure: RunFailure) -> int:
        if failure.code == "RLF5011":
            return 0
        return 3 if is_echo(failure) else 2 if is_late(failure) else 1

    return min(failures, key=order)


@contextmanager
def blame(stage: str) -> Iterator[None]:
    """Failures inside are those of this stage, unless they name one already."""
    try:
        yield
    except RunFailure as failure:
        raise failure.at(stage) from None

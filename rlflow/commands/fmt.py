"""`rlflow fmt`: bring .rlflow files into the one style, or say which are not in it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import click

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.diagnostics.render import render


class _Exit(IntEnum):
    OK = 0
    PROBLEMS = 1
    FILES = 2
    INTERNAL = 70


@dataclass
class _Outcome:
    """What happened so far; the worst exit code is the command's."""

    check: bool
    diff: bool
    exit: _Exit = _Exit.OK
    changed: int = 0
    unchanged: int = 0
    failed: int = 0
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def fail(self, exit: _Exit, message: str = "") -> None:
        self.failed += 1
        self.exit = max(self.exit, exit)
        if message:
            click.echo(message, err=True)

    def summary(self) -> str:
        will = "would be " if self.check or self.diff else ""
        parts = [
            f"{_files(count)} {words}"
            for count, words in (
                (self.changed, f"{will}reformatted"),
                (self.unchanged, f"{will}left unchanged"),
                (self.failed, "could not be formatted"),
            )
            if count
        ]
        return ", ".join(parts)


@click.command()
@click.argument("paths", metavar="[FILES or FOLDERS]...", nargs=-1)
@click.option("--check", is_flag=True, help="Write nothing; list files that would change and exit with 1.")
@click.option("--diff", is_flag=True, help="Write nothing; print what would change.")
@click.option("--stdin-filename", metavar="NAME", default="<stdin>", help="Name for messages when reading from `-`.")
@click.option("--debug", is_flag=True, hidden=True)
def fmt(paths: tuple[str, ...], check: bool, diff: bool, stdin_filename: str, debug: bool) -> None:
    """Format .rlflow files in place; folders are searched, `-` reads standard input. Default: this folder.

    There is one style and nothing to configure. A file that does not parse is reported and left as it is. Line ends
    become LF and a byte order mark is dropped.
    """
    outcome = _Outcome(check, diff)
    if "-" in paths:
        if len(paths) > 1:
            raise click.UsageError("`-` stands alone: standard input cannot be formatted together with files")
        _format_stdin(stdin_filename, outcome)
    else:
        files = list(_find(paths or (".",), outcome))
        for file in files:
            _format_file(file, outcome)
        if not files and not outcome.failed:
            click.echo("there are no .rlflow files here", err=True)
    if outcome.diagnostics:
        color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        click.echo(render(outcome.diagnostics, "full", color=color), err=True)
    if outcome.summary() and "-" not in paths:
        click.echo(outcome.summary(), err=True)
    if outcome.exit is not _Exit.OK:
        raise SystemExit(int(outcome.exit))


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _find(paths: Sequence[str], outcome: _Outcome) -> Iterator[Path]:
    """The named files, and all .rlflow files below the named folders; each once. Hidden folders are passed over."""
    seen: set[Path] = set()
    for text in paths:
        path = Path(text)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*.rlflow") if p.is_file() and not _hidden(p.relative_to(path)))
        elif path.exists():
            found = [path]
        else:
            outcome.fail(_Exit.FILES, f"rlflow: No such file or directory `{text}`")
            continue
        for file in found:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield file


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _format_stdin(name: str, outcome: _Outcome) -> None:
    raw = sys.stdin.buffer.read()
    text = _formatted(raw, name, outcome)
    if text is None:
        return
    if _note_change(raw, text, name, outcome) and outcome.check:
        outcome.exit = max(outcome.exit, _Exit.PROBLEMS)
    if not outcome.check and not outcome.diff:
        _print(text)


def _format_file(path: Path, outcome: _Outcome) -> None:
    try:
        raw = path.read_bytes()
        text = _formatted(raw, path.as_posix(), outcome)
        if text is None or not _note_change(raw, text, path.as_posix(), outcome):
            return
        if outcome.check:
            outcome.exit = max(outcome.exit, _Exit.PROBLEMS)
        if outcome.check or outcome.diff:
            if not outcome.diff:
                click.echo(f"would reformat {path.as_posix()}")
            return
        _replace(path, text)
        click.echo(f"reformatted {path.as_posix()}", err=True)
    except OSError as error:
        outcome.fail(_Exit.FILES, f"rlflow: {error.strerror or error} `{path}`")


def _formatted(raw: bytes, name: str, outcome: _Outcome) -> str | None:
    """The formatted text, or None when there is none; the reason is noted."""
    from rlflow.grammar.format import FormatError, format_text

    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"{name}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8 text"
        outcome.diagnostics.append(Diagnostic("RLF0003", message))
        outcome.fail(_Exit.PROBLEMS)
        return None
    try:
        return format_text(SourceFile(name, text))
    except CompileError as error:
        outcome.diagnostics.extend(error.diagnostics)
        outcome.fail(_Exit.PROBLEMS)
    except FormatError as error:
        outcome.fail(_Exit.INTERNAL, f"error[RLF9001]: {error}\nThis is a bug of rlflow.")
    return None


def _note_change(raw: bytes, text: str, name: str, outcome: _Outcome) -> bool:
    changes = raw != text.encode("utf-8")
    if changes:
        outcome.changed += 1
        if outcome.diff:
            _print(_difference(raw.decode("utf-8"), text, name))
    else:
        outcome.unchanged += 1
    return changes


def _difference(old: str, new: str, name: str) -> str:
    """A unified diff that `patch` reads; carriage returns and a missing last newline show."""
    import difflib

    lines = difflib.unified_diff(_split(old), _split(new), name, f"{name} (formatted)")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _split(text: str) -> list[str]:
    """Lines with their newline; unlike `splitlines` only at newlines."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + parts[-1:] * bool(parts[-1])


def _print(text: str) -> None:
    """UTF-8 with LF whatever the terminal's encoding is."""
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:
        sys.stdout.write(text)
        return
    sys.stdout.flush()
    buffer.write(text.encode("utf-8"))
    buffer.flush()


def _replace(path: Path, text: str) -> None:
    """Write the whole file or nothing, with the old file's permissions; a link stays a link."""
    import shutil
    import tempfile

    target = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
        shutil.copymode(target, name)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise

"""`import "other.rlflow"`: one program out of a file and everything it imports.

Paths are relative to the importing file; a file that is imported on several ways is read once. `rlflow:NAME` is a file
that ships with rlflow. Errors inside an imported file have that file's places, and a note with the way to it.
"""

from __future__ import annotations

import os.path
from dataclasses import field, replace
from pathlib import Path, PurePosixPath

from rlflow.cluster import presets
from rlflow.diagnostics import CompileError, Diagnostic, Label, SourceFile, Span, did_you_mean
from rlflow.frontend.constants import Poison, Reporter
from rlflow.grammar import nodes
from rlflow.grammar.parse import parse
from rlflow.values import dataclass

SHIPPED = "rlflow:"
"""What the name of a file that ships with rlflow starts with."""

MAX_CHAIN = 50
"""Imports inside imports."""


def read_source(path: str | Path, name: str | None = None) -> SourceFile:
    """The text of a .rlflow file. OSError when it cannot be read, CompileError when it is not UTF-8."""
    raw = Path(path).read_bytes()
    name = Path(path).as_posix() if name is None else name
    try:
        return SourceFile(name, raw.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise CompileError(
            [Diagnostic("RLF0003", f"{name}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8 text")]
        ) from None


@dataclass(frozen=True)
class File:
    """A text of the program and where it is; path None: it ships with rlflow, or is no file at all."""

    source: SourceFile
    path: Path | None


@dataclass(frozen=True)
class Linked:
    """Everything that the files define, imported files first, and the files in this order."""

    program: nodes.Program
    files: tuple[File, ...]

    def path_of(self, span: Span) -> Path | None:
        """The path of the file that a place is in."""
        return next((file.path for file in self.files if file.source is span.file), None)


def link(program: nodes.Program, base_dir: Path | None, report: Reporter) -> Linked:
    """The program with everything it imports. `base_dir` is the folder of its file, None: imports are not possible.

    Raises Poison after reporting every problem found.
    """
    path = None if base_dir is None else base_dir / (PurePosixPath(program.file.name).name or "program")
    linker = _Linker(report)
    linker.add(program, path, (_Link(_key(path), None),))
    if report.has_errors:
        raise Poison()
    return Linked(nodes.Program(program.file, tuple(linker.items)), tuple(linker.files))


def shipped(name: str) -> SourceFile:
    """The text of a file that ships with rlflow. KeyError for an unknown name."""
    return SourceFile(SHIPPED + name, presets.shipped_text(name))


@dataclass(frozen=True)
class _Link:
    """A file on the way from the program: what identifies it, and the line that imports it."""

    key: str
    by: nodes.Import | None


_Chain = tuple[_Link, ...]


def _key(path: Path | None) -> str:
    return "" if path is None else str(path.resolve())


@dataclass
class _Linker:
    report: Reporter
    items: list[nodes.Import | nodes.Flow | nodes.Schedule | nodes.Cluster] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    _done: set[str] = field(default_factory=set)

    def add(self, program: nodes.Program, path: Path | None, chain: _Chain) -> None:
        """Enter the imports of a file, then what it defines itself."""
        for item in program.imports:
            try:
                self._follow(item, path, chain)
            except Poison:
                continue
        self.items.extend(item for item in program.items if not isinstance(item, nodes.Import))
        self.files.append(File(program.file, path))

    def _follow(self, item: nodes.Import, importer: Path | None, chain: _Chain) -> None:
        target = item.path.value
        path = None
        key = target
        if not target.startswith(SHIPPED):
            path = self._path(item, importer)
            key = _key(path)
        chain = (*chain, _Link(key, item))
        if key in [link.key for link in chain[:-1]]:
            raise self._cycle(chain)
        if key in self._done:
            return
        self._done.add(key)
        if len(chain) > MAX_CHAIN:
            raise self.report.error(
                "RLF1010", f"files import each other more than {MAX_CHAIN} deep", Label(item.span, "one too many")
            )
        source = self._shipped(item) if path is None else self._read(item, path, chain)
        try:
            program = parse(source)
        except CompileError as error:
            self.report.diagnostics.extend(replace(d, notes=(*d.notes, *_way(chain))) for d in error.diagnostics)
            raise Poison() from None
        self.add(program, path, chain)

    def _path(self, item: nodes.Import, importer: Path | None) -> Path:
        if importer is None:
            raise self.report.error(
                "RLF1012", "a file can only be imported by a file", Label(item.path.span, "relative to nothing")
            )
        path = Path(os.path.normpath(importer.parent / item.path.value))
        if not item.path.value or not _may_be_file(path):
            raise self.report.error("RLF1012", f"`{item.path.value}` is not a file", Label(item.path.span))
        return path

    def _shipped(self, item: nodes.Import) -> SourceFile:
        name = item.path.value.removeprefix(SHIPPED)
        try:
            return shipped(name)
        except KeyError:
            names = list(presets.shipped_names())
            raise self.report.unknown("file of rlflow:", name, Label(item.path.span), names) from None

    def _read(self, item: nodes.Import, path: Path, chain: _Chain) -> SourceFile:
        help_lines: tuple[str, ...] = ()
        folder = PurePosixPath(item.span.file.name).parent
        name = os.path.normpath(folder / item.path.value)
        try:
            return read_source(path, Path(name).as_posix())
        except CompileError as error:
            found = [replace(d, labels=(Label(item.path.span),), notes=_way(chain[:-1])) for d in error.diagnostics]
            self.report.diagnostics.extend(found)
            raise Poison() from None
        except FileNotFoundError:
            guess = did_you_mean(path.name, _siblings(path))
            if guess:
                help_lines = (f"did you mean `{PurePosixPath(item.path.value).with_name(guess)}`?",)
            message = f"there is no file `{item.path.value}` beside this one"
        except OSError as error:
            message = f"`{item.path.value}` cannot be read: {(error.strerror or str(error)).lower()}"
        raise self.report.error("RLF1012", message, Label(item.path.span), notes=_way(chain[:-1]), help=help_lines)

    def _cycle(self, chain: _Chain) -> Poison:
        last = chain[-1]
        start = next(i for i, link in enumerate(chain) if link.key == last.key)
        lines = [link.by for link in chain[start + 1 :] if link.by is not None]
        names = [line.span.file.name for line in lines]
        return self.report.error(
            "RLF0008",
            f"`{names[0]}` imports itself" if len(names) == 1 else "these files import each other",
            Label(lines[-1].span, "which closes the circle" if len(names) > 1 else ""),
            *(Label(line.span, "", primary=False) for line in lines[:-1]),
            notes=(" -> ".join(f"`{name}`" for name in (*names, names[0])),),
            help=("move what both need to a file of its own",),
        )


def _way(chain: _Chain) -> tuple[str, ...]:
    """Which lines lead to the last file of the chain."""
    lines = [str(link.by.span) for link in chain if link.by is not None]
    return ("imported by " + ", from ".join(reversed(lines)),) if lines else ()


def _may_be_file(path: Path) -> bool:
    """False for a folder, and for a name that the system cannot have."""
    try:
        return not path.is_dir() and path.resolve() is not None
    except (OSError, ValueError):
        return False


def _siblings(path: Path) -> list[str]:
    try:
        return sorted(other.name for other in path.parent.iterdir() if other.suffix == ".rlflow")
    except OSError:
        return []

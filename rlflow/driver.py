"""The whole line on one page: text -> tree -> flow -> passes -> plan -> backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow import __version__
from rlflow.diagnostics import CompileError, Diagnostic, RunFailure, SourceFile, Span
from rlflow.diagnostics.suppress import apply_suppressions
from rlflow.frontend.imports import read_source as read_source
from rlflow.frontend.lower import Lowered, lower
from rlflow.grammar.parse import parse
from rlflow.ir.flow import STEP, Flow, Stage
from rlflow.notebook import Shown
from rlflow.passes.base import PassContext
from rlflow.passes.pipeline import DEFAULT_PIPELINE, Observer, load_pass, run_pipeline
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.plan import Plan


@dataclass(frozen=True)
class Options:
    """What the command line adds to the file: which flow and schedule, replaced arguments, measured times."""

    flow: str | None = None
    cluster: str | None = None
    overrides: tuple[str, ...] = ()
    profile: Path | None = None
    """A measured table that estimates come from, before the cost model."""


@dataclass(frozen=True)
class Checked(Shown):
    """A flow that has passed every check; `rlflow.Program` of the Python interface."""

    path: Path
    lowered: Lowered
    flow: Flow
    """After all passes."""
    warnings: tuple[Diagnostic, ...]
    options: Options = Options()
    """It was checked with."""

    @property
    def written(self) -> Flow:
        """The flow as it is in the file: before anything is placed."""
        return self.lowered.flow

    def sentence(self) -> str:
        """What `rlflow check` says of it."""
        step = sum(1 for node in self.flow.nodes.values() if node.phase == STEP)
        cluster = self.lowered.cluster.name
        return f"{self.path}: flow `{self.flow.name}` is sound ({step} stages on cluster `{cluster}`)"

    def __repr__(self) -> str:
        return f"<{self.sentence()}>"


def lowered(path: str | Path, options: Options, source: SourceFile | None = None) -> Lowered:
    """The LOGICAL flow of a file with its schedule and cluster; `source` is its text when it has been read already.

    Raises CompileError.
    """
    return lower(
        parse(source or read_source(path)),
        Path(path).parent,
        flow_name=options.flow,
        cluster_name=options.cluster,
        overrides=options.overrides,
    )


def context_of(start: Lowered, options: Options | None = None) -> PassContext:
    """What the passes may look at beside the flow. Raises RunFailure for a profile that cannot be used."""
    profile = None
    if options is not None and options.profile is not None:
        from rlflow.profile.read import read_profile, refuse_foreign

        profile = read_profile(options.profile)
        refuse_foreign(profile, start.flow.name, start.cluster.name)
    return PassContext(
        start.schedule, start.cluster, shapes=start.shapes, architectures=start.architectures, profile=profile
    )


def check(path: str | Path, options: Options | None = None, observe: Observer | None = None) -> Checked:
    """Everything `compile` checks. Raises CompileError with all findings of the phase that failed, RunFailure for a
    profile that cannot be used."""
    options = options or Options()
    source = read_source(path)
    warnings: tuple[Diagnostic, ...] = ()
    files = [source]
    try:
        start = lowered(path, options, source)
        warnings = start.warnings
        files = [source, *(file.source for file in start.files if file.source != source)]
        context = context_of(start, options)
        flow = run_pipeline(start.flow, context, DEFAULT_PIPELINE, observe)
    except CompileError as error:
        raise CompileError(_suppress(files, (*warnings, *error.diagnostics), [])) from None
    within = [part.span for part in (start.flow, start.schedule, start.cluster) if part.span is not None]
    found = _suppress(files, (*warnings, *context.diagnostics), within)
    return Checked(Path(path), start, flow, tuple(found), options)


def _suppress(files: Sequence[SourceFile], found: Sequence[Diagnostic], within: Sequence[Span]) -> list[Diagnostic]:
    """The diagnostics without those that comments of the files silence, and what is wrong with such comments."""
    diagnostics = list(found)
    for file in files:
        diagnostics = apply_suppressions(file, diagnostics, within=[span for span in within if span.file == file])
    return diagnostics


def flow_at(path: str | Path, stage: Stage, options: Options | None = None) -> Flow:
    """The flow of a file at a stage of its compilation, after the last pass of that stage. What later passes would
    refuse is not an error here. Raises CompileError, RunFailure as `check` does."""
    options = options or Options()
    start = lowered(path, options)
    names = list(DEFAULT_PIPELINE)
    if stage is Stage.LOGICAL:
        names = names[: names.index("search-placement")]  # it decides placements and changes nothing that is written
    names = [name for name in names if load_pass(name).ensures <= stage]
    return run_pipeline(start.flow, context_of(start, options), names)


def compile(path: str | Path, options: Options | None = None) -> Plan:
    """The plan of a .rlflow file. Raises CompileError."""
    return plan_of(check(path, options), options or Options())


def plan_of(checked: Checked, options: Options) -> Plan:
    """The plan of a checked flow. Its first source is the file of the flow, which paths are relative to; a file that
    ships with rlflow is none, since the plan names the version of rlflow."""
    from rlflow.freeze import Provenance, freeze
    from rlflow.plan import Source

    texts = [file.path for file in checked.lowered.files if file.path is not None]
    files = [*texts, *checked.lowered.reward_files]
    sources = tuple(Source(path=file.as_posix(), sha256=_sha256(file)) for file in files)
    schedule = checked.lowered.schedule
    written = [pool.span for pool in schedule.pools] + [place.span for place in schedule.places]
    written += [bound.span for bound in schedule.staleness] + [trigger.span for trigger in schedule.triggers]
    pins = tuple(sorted({span for span in written if span is not None}, key=lambda span: span.start))
    cluster = checked.lowered.cluster.name
    profile = options.profile
    measured = None if profile is None else Source(path=profile.as_posix(), sha256=_sha256(profile))
    provenance = Provenance(__version__, cluster, sources, options.overrides, DEFAULT_PIPELINE, pins, measured)
    return freeze(checked.flow, provenance)


def load_plan(path: str | Path) -> Plan:
    """Read a plan file. Raises RunFailure RLF4001 when it is not a plan of this version."""
    from rlflow.plan import Plan

    try:
        return Plan.from_json(Path(path).read_text("utf-8"))
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RunFailure(
            "RLF4001",
            f"`{path}` is not a plan that this version of rlflow reads",
            notes=tuple(lines[:4]),
            help=("make it again: `rlflow compile FILE.rlflow -o plan.json`",),
        ) from None


def find_base_dir(plan: Plan, plan_path: Path | None = None) -> Path:
    """The folder of the plan's .rlflow file: below the working folder, or below the plan file and its parents.

    Raises RunFailure RLF4002 when it is in none of them.
    """
    source = Path(plan.sources[0].path)
    places = [Path.cwd()]
    if plan_path is not None:
        places += plan_path.absolute().parents
    for place in places:
        if (place / source).is_file():
            return (place / source).parent
    raise RunFailure(
        "RLF4002",
        f"the plan's source `{source}` is not found from here",
        notes=("paths in the flow are relative to it",),
        help=("run from the folder in which it was compiled",),
    )


def changed_sources(plan: Plan, base_dir: Path) -> list[str]:
    """Source files of the plan whose content is not what it was compiled from."""
    changed = []
    for source in plan.sources:
        path = source_path(plan, base_dir, source.path)
        if not is_unchanged(path, source.sha256):
            changed.append(source.path)
    return changed


def source_path(plan: Plan, base_dir: Path, source: str) -> Path:
    """Where a source of the plan is, seen from the folder of its .rlflow file."""
    return base_dir / os.path.relpath(source, Path(plan.sources[0].path).parent)


def is_unchanged(path: Path, sha256: str) -> bool:
    """Whether a file is there and has the content that a plan says."""
    return path.is_file() and _sha256(path) == sha256


def _sha256(path: Path) -> str:
    import hashlib  # loads OpenSSL, which a check does not need

    return hashlib.sha256(path.read_bytes()).hexdigest()


def pass_names(text: str) -> Sequence[str]:
    """Names of a comma-separated pipeline; KeyError names the first that is unknown."""
    from rlflow.passes.pipeline import PASSES

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PASSES:
            raise KeyError(name)
    return names

"""The program with every place of it joined to what it caused: stages, instructions, decisions, diagnostics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rlflow.amounts import seconds
from rlflow.backends.visualizers.report.subject import Subject
from rlflow.backends.visualizers.report.timeline import span_key
from rlflow.backends.visualizers.summary import describe_stale
from rlflow.backends.visualizers.words import describe_instruction, describe_layout, describe_op, describe_source
from rlflow.diagnostics import Diagnostic, Span
from rlflow.plan import Because, Layout, Plan
from rlflow.plan_parts import SpanRef


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that a place of the source caused."""

    kind: str
    """`declares`, `stage`, `instruction`, `decision`, `pinned`, `queue`, `staleness`, `reshard`, `warning`."""
    text: str
    stage: str = ""
    """Whose bars of the timeline it is about."""
    box: str = ""
    """Its box in the graph."""
    inserted_by: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one line without a boundary inside. `key` is that of the smallest span around it; empty outside."""

    text: str
    key: str
    first: bool = False
    """Whether it is the first piece of its span: the one that the keyboard reaches."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One source file."""

    name: str
    lines: tuple[tuple[Piece, ...], ...]
    gone: str = ""
    """Why there are no lines."""


def effects_of(subject: Subject) -> dict[str, tuple[SpanRef, list[Effect]]]:
    """Key of a span to the span and what it caused, in the order of the source."""
    found: dict[str, tuple[SpanRef, list[Effect]]] = {}
    for span, effect in [*_of_plan(subject.plan), *_of_diagnostics(subject)]:
        found.setdefault(span_key(span), (span, []))[1].append(effect)
    files = {source.path: number for number, source in enumerate(subject.plan.sources)}

    def place(key: str) -> tuple[int, str, int, int]:
        span = found[key][0]
        return files.get(span.file, len(files)), span.file, span.line, span.column

    return {key: found[key] for key in sorted(found, key=place)}


def listings(subject: Subject, effects: dict[str, tuple[SpanRef, list[Effect]]]) -> list[Listing]:
    """The source files that spans point into, in pieces."""
    files = list(dict.fromkeys([*subject.texts, *subject.gone]))
    spans: dict[str, list[tuple[str, SpanRef]]] = defaultdict(list)
    for key, (span, _) in effects.items():
        spans[span.file].append((key, span))
    return [
        Listing(name, tuple(_lines(subject.texts[name], spans[name])))
        if name in subject.texts
        else Listing(name, (), subject.gone[name])
        for name in files
    ]


def _lines(text: str, spans: list[tuple[str, SpanRef]]) -> Iterator[tuple[Piece, ...]]:
    """A span that has others inside is marked on its first line only: a flow would be marked as a whole."""
    seen: set[str] = set()
    known = dict(spans)
    outer = {key for key, span in spans if any(span != other and _holds(span, other) for _, other in spans)}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        here = [
            (key, *_columns(span, number, len(line))) for key, span in spans if span.line <= number <= span.end_line
        ]
        cuts = sorted({0, len(line), *(cut for _, start, end in here for cut in (start, end))})
        pieces = []
        for start, end in pairwise(cuts):
            around = [(_extent(known[key]), key) for key, since, to in here if since <= start and end <= to]
            key = min(around)[1] if around and line[start:end].strip() else ""
            if key in outer and known[key].line != number:
                key = ""
            blank = len(line[start:end]) - len(line[start:end].lstrip()) if key else 0
            if blank:
                pieces.append(Piece(line[start : start + blank], ""))
            pieces.append(Piece(line[start + blank : end], key, bool(key) and key not in seen))
            seen.add(key)
        yield tuple(pieces)


def _columns(span: SpanRef, line: int, length: int) -> tuple[int, int]:
    """Where the span lies in a line, as offsets."""
    start = span.column - 1 if span.line == line else 0
    end = span.end_column - 1 if span.end_line == line else length
    return min(start, length), min(max(end, start), length)


def _holds(span: SpanRef, other: SpanRef) -> bool:
    return (span.line, span.column) <= (other.line, other.column) and (other.end_line, other.end_column) <= (
        span.end_line,
        span.end_column,
    )


def _extent(span: SpanRef) -> tuple[int, int]:
    return span.end_line - span.line, span.end_column - span.column


def _of_plan(plan: Plan) -> Iterator[tuple[SpanRef, Effect]]:
    for data in plan.data:
        yield (
            data.span,
            Effect("declares", f"data {data.name}: {describe_source(data.source)}", box=f"data.{data.name}"),
        )
    for model in plan.models:
        text = f"model {model.name}: {describe_source(model.source)}, {'trained' if model.trainable else 'frozen'}"
        yield model.span, Effect("declares", text, box=f"model.{model.name}")
    for reward in plan.rewards:
        text = f"reward {reward.name}: {describe_source(reward.source)}"
        yield reward.span, Effect("declares", text, box=f"reward.{reward.name}")
    for environment in plan.environments:
        text = f"environment {environment.name}: {describe_source(environment.source)}"
        yield environment.span, Effect("declares", text, box=f"environment.{environment.name}")
    times = {estimate.stage: estimate.us for estimate in plan.estimates}
    for stage in plan.stages:
        layout = "" if stage.layout is None or stage.layout == Layout() else f", {describe_layout(stage.layout)}"
        time = f", about {seconds(times[stage.id])}" if stage.id in times else ""
        text = f"{stage.id}: {describe_op(stage.op)} on {stage.pool}{layout}{time}"
        yield stage.because.span, Effect("stage", text, stage.id, f"stage.{stage.id}", _inserted(stage.because))
    for program in plan.programs:
        lists = [("step", program.step), *((e.name, e.instructions) for e in program.evaluations)]
        for phase, instructions in lists:
            for i in instructions:
                where = program.pool if phase == "step" else f"{program.pool}, evaluation {phase}"
                box = f"instruction.{phase}.{program.pool}.{i.id}"
                text = f"{where}: {describe_instruction(i)}"
                stage_id = getattr(i, "stage", "")
                yield i.because.span, Effect("instruction", text, stage_id, box, _inserted(i.because))
    for channel in plan.channels:
        for reader in channel.stale:
            text = f"{channel.model} to {reader.stage}: {describe_stale(reader)}"
            yield reader.span, Effect("staleness", text, reader.stage, f"stage.{reader.stage}", "relax-staleness")
    for queue in plan.queues:
        text = f"queue {queue.id}: {queue.capacity} batches, {queue.partitions} partitions, {queue.reads} reads of each"
        yield queue.span, Effect("queue", text, queue.stage, f"queue.{queue.id}", "insert-queues")
    for pinned in plan.pinned:
        yield pinned.span, Effect("pinned", pinned.what)
    for choice in plan.choices:
        other = f"instead of {choice.runner_up}: {choice.reason}" if choice.runner_up else choice.reason
        yield choice.span, Effect("decision", f"{choice.what}: {choice.chosen} ({other})")


def _inserted(because: Because) -> str:
    return f"{because.inserted_by} ({because.reason})" if because.inserted_by else ""


def _of_diagnostics(subject: Subject) -> Iterator[tuple[SpanRef, Effect]]:
    for diagnostic in subject.diagnostics or ():
        span = diagnostic.span
        if span is not None:
            yield _reference(span), Effect("warning", diagnostic_words(diagnostic))


def _reference(span: Span) -> SpanRef:
    """Files in spans of diagnostics have the names that a plan's spans have."""
    line, column = span.file.position(span.start)
    end_line, end_column = span.file.position(span.end)
    return SpanRef(file=span.file.name, line=line, column=column, end_line=end_line, end_column=end_column)


def diagnostic_words(diagnostic: Diagnostic) -> str:
    """Code, message, notes and help in one paragraph."""
    parts = [f"{diagnostic.severity.value}[{diagnostic.code}]: {diagnostic.message}"]
    parts += [f"note: {note}" for note in diagnostic.notes]
    parts += [f"help: {text}" for text in diagnostic.help]
    return "; ".join(parts)

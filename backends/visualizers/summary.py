"""A plan in words, on at most one screen of 48 lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlflow.backends.visualizers.loss_words import describe_loss, describe_optimizer
from rlflow.backends.visualizers.resources import glance_lines, memory_lines, reshard_lines
from rlflow.backends.visualizers.words import (
    describe_because,
    describe_instruction,
    describe_layout,
    describe_op,
    describe_pool,
    describe_source,
    describe_span,
)
from rlflow.ir.ops import FrozenModel, Train, ValueModel
from rlflow.plan import COLLECTIVE_TIMEOUT_S, Channel, Instruction, Layout, Plan, Program, Queue, Stage, StaleReader
from rlflow.protocol.prices import update_lag

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

Style = Literal["title", "head", "plain", "inserted", "quiet"]
Line = tuple[Style, str]

MAX_LINES = 48
WIDTH = 112
"""Of plain text, and where nobody says how wide the terminal is."""
PHASES_SHOWN = 3
"""Of every pool's memory."""

_REST = ": see --full"

_LABELS = ("  loss ", "  optimizer ", "  numbers ")

_RICH = {"title": "bold", "head": "bold cyan", "plain": "", "inserted": "yellow", "quiet": "dim"}


def summarize(plan: Plan, full: bool = False) -> RenderableType:
    """The summary for a terminal: prose is wrapped to its width, tables are cut; what passes put in is coloured."""
    return _Summary(plan, full)


def summary_text(plan: Plan, width: int = WIDTH, full: bool = False) -> str:
    """The summary as plain text with a final newline, no line longer than `width` characters."""
    return "\n".join(line for _, line in summary_lines(plan, width, full)) + "\n"


def summary_lines(plan: Plan, width: int = WIDTH, full: bool = False) -> list[Line]:
    """At most MAX_LINES lines of at most `width` characters, or everything where `full`.

    What does not fit goes in this order: details of time, memory and queues; instruction lists, the longest first; the
    tables of reshards and memory; pools and stages. Where everything is, its sharding, the period and what limits it,
    memory, bytes that move and what is promised about staleness stay.
    """
    if full:
        sections = [_pools(plan), _stages(plan, width), *_programs(plan)]
        lines = [*_head(plan), *glance_lines(plan), *(line for section in sections for line in section)]
        lines += [*reshard_lines(plan), *memory_lines(plan), *_prose(plan)]
        return _wrap(lines, width)
    pools, stages, programs = _wrap(_pools(plan), width), _stages(plan, width), _programs(plan)
    for detail in ("all", "some", "none"):
        head = _wrap([*_head(plan), *glance_lines(plan, detail != "all")], width)
        tail = _tail(plan, width, detail)
        room = MAX_LINES - len(head) - len(tail)
        kept = [pools, stages, *([line for line in program] for program in programs)]
        shortest = _length(kept[:2]) + sum(min(len(program), 3) for program in programs)
        if shortest > room and detail == "all":
            continue
        _fit(kept[2:], room - _length(kept[:2]))
        if _length(kept) <= room:
            break
    while _length(kept) > room and any(len(section) > 3 for section in kept[:2]):
        _shorten(max(kept[:2], key=len))
    lines = [*head, *(line for section in kept for line in section), *tail]
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], ("quiet", f"... {len(lines) - MAX_LINES + 1} more lines{_REST}")]
    return [(style, line if len(line) <= width else line[: width - 1] + "…") for style, line in lines]


def _fit(programs: Sequence[list[Line]], room: int) -> None:
    """Shorten instruction lists, the longest first, then to a line each."""
    while _length(programs) > room and any(len(section) > 3 for section in programs):
        _shorten(max(programs, key=len))
    for section in programs:
        if _length(programs) > room:
            section[1:] = []
            section[0] = (section[0][0], f"{section[0][1]}{_REST}")


def _tail(plan: Plan, width: int, detail: str) -> list[Line]:
    """Everything after pools, stages and programs. `explain` and `--full` have what is left out."""
    if detail == "all":
        return [*reshard_lines(plan), *memory_lines(plan, PHASES_SHOWN), *_wrap(_prose(plan), width)]
    tables = [*reshard_lines(plan), *memory_lines(plan, 1)] if detail == "some" else []
    return [*tables, *_wrap(_prose(plan, short=True), width)]


def _prose(plan: Plan, short: bool = False) -> list[Line]:
    """What is learned, weights and their guarantees, queues, the end."""
    learning, queues = _learning(plan), _queues(plan)
    if short:
        learning = [line for line in learning if not line[1].startswith("  numbers ")]
        names = ", ".join(queue.id for queue in plan.queues)
        most = max((queue.capacity for queue in plan.queues), default=0)
        queues = [("plain", f"queues: {names}; at most {most} batches")] if plan.queues else []
    return [*learning, *_channels(plan), *queues, *_end(plan)]


def _length(sections: Sequence[Sequence[Line]]) -> int:
    return sum(len(section) for section in sections)


@dataclass(frozen=True, slots=True)
class _Summary:
    plan: Plan
    full: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        for style, line in summary_lines(self.plan, options.max_width, self.full):
            yield Text(line, _RICH[style], no_wrap=True, overflow="crop")


def describe_guarantee(channel: Channel) -> str:
    """What a weight channel promises about the age of the weights that its readers use."""
    copies = {
        "alias": "readers use the trained tensors themselves",
        "cast": "readers hold a copy in compute precision",
        "merge": "readers hold the frozen weights plus the adapters, in compute precision",
        "reshard": "readers on another pool or layout receive their parts",
    }[channel.transport]
    if not channel.stale:
        several = f"; {_updates_words(channel.updates, 0)}" if channel.updates > 1 else ""
        return f"staleness 0: every reader uses the newest version (synchronous, hard per sample){several}; {copies}"
    return f"{'; '.join(describe_stale(reader) for reader in channel.stale)}; {copies}"


def describe_stale(reader: StaleReader) -> str:
    """The bound that is used, the rule, and what is promised about the age of a sample."""
    used = f"staleness {reader.steps} of {reader.permitted} allowed, admit {reader.admit}"
    if reader.burst > 1:
        used += f" in bursts of {reader.burst}"
    if reader.trigger < 1:
        used += f", trigger at {reader.trigger * 100:g}% carry {reader.carry}"
    if reader.worst_age is None:
        return f"{used}: no bound on the age of a sample (aggregate only)"
    plural = "s" * (reader.worst_age != 1)
    kept = ", older ones are dropped" if reader.drops_data else ""
    several = f"; {_updates_words(reader.updates, reader.worst_age)}" if reader.updates > 1 else ""
    return f"{used}: no sample is older than {reader.worst_age} step{plural} (hard per sample{kept}){several}"


def _updates_words(updates: int, age: int) -> str:
    """How far the weights of the last update are from those that sampled, at most."""
    return f"{updates} optimizer updates a step, so that a sample is at most {update_lag(updates, age)} updates old"


def _head(plan: Plan) -> list[Line]:
    sources = ", ".join(source.path for source in plan.sources)
    lines: list[Line] = [("title", f"flow {plan.flow} on cluster {plan.cluster}   ({sources})")]
    if plan.overrides:
        lines.append(("plain", f"  set on the command line: {', '.join(plan.overrides)}"))
    return lines


def _pools(plan: Plan) -> list[Line]:
    lines: list[Line] = [("head", "pools")]
    for pool in plan.pools:
        stages = [stage for stage in plan.stages if stage.pool == pool.name]
        names = _distinct(stage.id for stage in stages)
        models = _distinct(model for stage in stages if (model := getattr(stage.op, "model", "")))
        weights = f"; weights of {', '.join(models)}" if models else ""
        lines.append(("plain", f"  {pool.name}: {describe_pool(pool)}; runs {', '.join(names) or 'nothing'}{weights}"))
    return lines


def _stages(plan: Plan, width: int) -> list[Line]:
    """A table, without the inputs where it would be too wide; where a layout would still be cut, a text for each."""
    rows = [_stage_row(stage) for stage in plan.stages]
    marks = [f"   + {by}" if (by := stage.because.inserted_by) else "" for stage in plan.stages]
    styles: list[Style] = ["inserted" if mark else "plain" for mark in marks]
    for shown in (rows, [row[:3] for row in rows]):
        aligned = _align(shown)
        table = [f"  {text}{mark}" for text, mark in zip(aligned, marks, strict=True)]
        if max(map(len, aligned), default=0) + 2 <= width:  # of who put a stage in, the end may be cut
            return [("head", "stages"), *zip(styles, table, strict=True)]
    texts = [
        f"  {row[0]}: {', '.join(part for part in row[1:3] if part)}{mark}"
        for row, mark in zip(rows, marks, strict=True)
    ]
    return [("head", "stages"), *_wrap(list(zip(styles, texts, strict=True)), width)]


def _stage_row(stage: Stage) -> list[str]:
    inputs = ", ".join(
        port if port == producer else f"{port}={producer}" for port, producer in sorted(stage.inputs.items())
    )
    place = stage.pool + (f" {describe_layout(stage.layout)}" if stage.layout and stage.layout != Layout() else "")
    place += f" kv heads x{stage.kv_copies}" if stage.kv_copies > 1 else ""
    phase = "" if stage.phase == "step" else f"[{stage.phase}]"
    return [f"{stage.id} {phase}".rstrip(), describe_op(stage.op), f"on {place}", f"from {inputs}" if inputs else ""]


def _programs(plan: Plan) -> list[list[Line]]:
    sections = []
    for program in plan.programs:
        sections.append([("head", f"pool {program.pool}, every step"), *_instructions(program.step)])
        for evaluation in program.evaluations:
            between = f", after every {evaluation.every} steps" if evaluation.every else ""
            title = f"pool {program.pool}, evaluation {evaluation.name}: before the first step{between}, at the end"
            flat = " -> ".join(describe_instruction(i) for i in evaluation.instructions)
            sections.append([("head", title), ("plain", f"  {flat}")])
    return sections


def _instructions(instructions: Sequence[Instruction]) -> list[Line]:
    rows = [
        [f"{number}.", describe_instruction(i), describe_because(i.because)]
        for number, i in enumerate(instructions, start=1)
    ]
    return [
        ("inserted" if i.because.inserted_by else "plain", f"  {text}")
        for i, text in zip(instructions, _align(rows), strict=True)
    ]


def _learning(plan: Plan) -> list[Line]:
    lines: list[Line] = [("head", "learning")]
    trained = [stage.op for stage in plan.stages if isinstance(stage.op, Train)]
    for train in trained:
        if len(trained) > 1:
            lines.append(("plain", f"  {train.model}:"))
        compute, init = _precision(plan, train.model)
        is_value = isinstance(plan.model(train.model).source, ValueModel)
        sampling = "" if is_value else f"temperature {train.temperature:g} in sampling and in the loss; "
        numbers = f"{sampling}master weights and optimizer fp32, compute {compute}; {init}"
        lines += [
            ("plain", f"  loss       {describe_loss(train)}"),
            ("plain", f"  optimizer  {describe_optimizer(train)}"),
            ("plain", f"  numbers    {numbers}"),
        ]
    return lines


def _channels(plan: Plan) -> list[Line]:
    lines: list[Line] = [("head", "weights")] if plan.channels else []
    for channel in plan.channels:
        readers = ", ".join(channel.readers)
        lines.append(("plain", f"  {channel.model}: {channel.source} -> {readers}; {describe_guarantee(channel)}"))
    return lines


def _queues(plan: Plan) -> list[Line]:
    lines: list[Line] = [("head", "queues")] if plan.queues else []
    for queue in plan.queues:
        batches = f"{queue.capacity} batch{'es' * (queue.capacity != 1)}"
        lines.append(
            (
                "plain",
                f"  {queue.id}: from {queue.source}; holds {batches}; {_partitions(queue)}{queue.reads} "
                f"read{'s' * (queue.reads != 1)} of a batch",
            )
        )
    return lines


def _partitions(queue: Queue) -> str:
    parts = f"{queue.partitions} partitions; " if queue.partitions > 1 else ""
    return parts + (f"starts at {queue.trigger * 100:g}%; " if queue.trigger < 1 else "")


def _end(plan: Plan) -> list[Line]:
    stops = [
        f"{count} {word}{'s' * (count != 1)}"
        for count, word in ((plan.stop.steps, "step"), (plan.stop.epochs, "epoch"))
        if count is not None
    ]
    stop = " or ".join(stops) if stops else "only when interrupted"
    lines: list[Line] = []
    if plan.collective_timeout_s > COLLECTIVE_TIMEOUT_S:
        lines.append(
            ("plain", f"collectives wait up to {plan.collective_timeout_s} s (default {COLLECTIVE_TIMEOUT_S})")
        )
    return [*lines, ("plain", f"stops after {stop}; seed {plan.seed}; checkpoint {_checkpoint(plan.programs)}")]


def _checkpoint(programs: Iterable[Program]) -> str:
    for program in programs:
        for i in program.step:
            if i.kind == "checkpoint":
                often = f"after every {i.every} steps, when interrupted and at the end" if i.every else (
                    "when the run ends or is interrupted"
                )  # fmt: skip
                return f"{often} ({describe_span(i.because.span)})"
    return "never"


def _precision(plan: Plan, model: str) -> tuple[str, str]:
    """Compute precision of a model, and where its weights come from."""
    source = plan.model(model).source
    if isinstance(source, FrozenModel):
        return _precision(plan, source.of)
    if isinstance(source, ValueModel):
        return _precision(plan, source.of)[0], f"starts from {describe_source(source)}"
    return source.compute, f"starts from {describe_source(source)}"


def _shorten(section: list[Line]) -> None:
    """Take one entry out of the middle of a section, or count it into the line that says how many are missing."""
    middle = len(section) // 2
    for index, (_, text) in enumerate(section):
        if text.startswith("  ... "):
            count = int(text.split()[1]) + 1
            victim = index - 1 if index > len(section) - index else index + 1
            section[index] = ("quiet", f"  ... {count} more{_REST}")
            if 0 < victim < len(section):
                del section[victim]
            return
    section[middle : middle + 2] = [("quiet", "  ... 2 more{_REST}")]


def _align(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns, two spaces between."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    used = [i for i, width in enumerate(widths) if width]
    return ["  ".join(row[i].ljust(widths[i]) for i in used).rstrip() for row in rows]


def _wrap(lines: list[Line], width: int) -> list[Line]:
    """Lines wrapped to a width, the rest of a line under its text."""
    out: list[Line] = []
    for style, line in lines:
        indent = " " * (13 if line.startswith(_LABELS) else 4)
        out += [(style, part) for part in textwrap.wrap(line, max(width, 30), subsequent_indent=indent)]
    return out


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))

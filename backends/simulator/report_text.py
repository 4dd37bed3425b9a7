"""A study on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from rlflow.amounts import seconds, size
from rlflow.backends.simulator.report import Result
from rlflow.backends.simulator.report_study import Mean, Study
from rlflow.plan import Plan

_ROWS = 5
"""Of a table that grows with the plan."""


def study_lines(plan: Plan, study: Study) -> list[str]:
    """At most 40 lines for a plan with up to five pools."""
    first = study.first
    seeds = _count(len(study.results), "seed")
    made = f"lengths drawn with {seeds}" if study.sampled else "stages as estimated"
    if not study.sampled and len(study.results) > 1:
        made += f", {seeds}"
    steps = len(first.ends) - first.warm_up
    lines = [f"flow {plan.flow} on cluster {plan.cluster}: {_count(steps, 'step')}, {made}", *_time(plan, study)]
    lines += _failures(study)
    lines += _pools(study)
    lines += _ages(study)
    lines += _failed_calls(study)
    lines += _refills(study)
    lines += _moved(study)
    lines += _thrown_out(study)
    lines += _queues(study)
    lines += _links(study)
    if first.uncounted:
        example = f"`--stage {first.uncounted[0]}=SECONDS`"
        lines.append(f"taken as no time: {', '.join(first.uncounted)} (Python functions are not estimated; {example})")
    return lines


def sweep_lines(columns: Sequence[str], rows: Sequence[tuple[Sequence[str], Study | str]]) -> list[str]:
    """A table: the values of the columns, and what became of them; a text says why there is no plan."""
    failing = any(study.failing for _, study in rows if not isinstance(study, str))
    table = [[*columns, "step", "tokens/s", "idle", "worst age", *(["lost to failures"] if failing else [])]]
    for values, study in rows:
        if isinstance(study, str):
            table.append([*values, study])
            continue
        result = study.first
        period = study.mean(lambda r: float(r.period))
        rate = study.mean(lambda r: r.tokens_per_second).value
        age = max((age for ages in study.ages.values() for age in ages), default=0)
        tokens = _rate(rate) if result.tokens_per_step else "not known"
        cells = [*values, _interval(period), tokens, f"{study.mean(lambda r: r.bubble).value:.0%}", str(age)]
        lost = None if study.failing is None else study.failing.lost
        table.append([*cells, *([_percent(lost) if lost is not None else "all"] if failing else [])])
    return _aligned(table)


def _time(plan: Plan, study: Study) -> list[str]:
    period = study.mean(lambda r: float(r.period))
    words = f"a step every {_interval(period)}"
    if plan.cadence is not None:
        words += f"; from the estimates alone {seconds(plan.cadence.us)}"
    lines = [words]
    if study.first.tokens_per_step:
        rate = study.mean(lambda r: r.tokens_per_second).value
        devices = sum(pool.devices for pool in study.first.pools.values())
        how = "drawn lengths" if study.first.tokens_drawn else "assumed lengths"
        lines.append(f"{_rate(rate)} tokens/s, prompts and responses ({how}); {_rate(rate / devices)} a device")
    return lines


def _failures(study: Study) -> list[str]:
    found = study.failing
    if found is None:
        return []
    words = f"with a failure of {_count(found.hosts, 'host')} every {_hours(found.between_s)}: "
    if found.step_s is None:
        words += "all is lost, since there is no checkpoint before the end"
    elif found.step_s == inf:
        words += f"no end, since {found.every} steps from one checkpoint to the next never pass without one"
    else:
        words += f"a step every {seconds(round(found.step_s * 1e6))}, {_percent(found.lost or 0.0)} of the time lost"
    steps = _count(found.best_every, "step")
    best = f"  a checkpoint every {steps} would be best: {_percent(found.best_lost)} lost"
    if found.every == found.best_every:
        best = f"  a checkpoint every {steps}, as here, is best"
    if not found.checkpoint_s:
        best += " (checkpoints taken as no time; `--stage checkpoint=SECONDS`)"
    return [words, best]


def _hours(s: float) -> str:
    return f"{s / 3600:.3g} h" if s >= 36_000 else seconds(round(s * 1e6))


def _pools(study: Study) -> list[str]:
    first = study.first
    table = [["pool", "devices", "in stages", "moving", "idle", "memory of a device"]]
    for name, pool in first.pools.items():
        busy, moving = (_share(study, name, what) for what in ("busy", "moving"))
        peak = first.peak_bytes.get(name)
        memory = "not known" if peak is None else f"{size(peak[0])} of {size(peak[1])}"
        row = [name, str(pool.devices), f"{busy:.0%}", f"{moving:.0%}", f"{max(0.0, 1 - busy - moving):.0%}", memory]
        table.append(row)
    idle = study.mean(lambda r: r.bubble).value
    return [f"device time outside stages (bubble): {idle:.0%}", *(f"  {line}" for line in _aligned(table))]


def _share(study: Study, pool: str, what: str) -> float:
    def of(result: Result) -> float:
        return float(getattr(result.pools[pool], what))

    return study.mean(of).value


def _ages(study: Study) -> list[str]:
    lines = []
    for stage, ages in study.ages.items():
        total = sum(ages.values())
        shown = ", ".join(f"{age}: {_percent(count / total)}" for age, count in ages.items()) if total else "none"
        promised = study.first.promised[stage]
        bound = "no bound is promised" if promised is None else f"at most {promised} is promised"
        lines.append(f"age of the samples of {stage}, in steps: {shown}; {bound}")
    return lines


def _failed_calls(study: Study) -> list[str]:
    lines = []
    for stage in study.first.failed_calls:
        tries, lost, stops = (
            study.mean(lambda r, stage=stage, what=what: getattr(r.failed_calls[stage], what)).value  # type: ignore[misc]
            for what in ("tries", "lost", "stops")
        )
        words = f"calls of {stage}: {tries:.3g} tries a sample, {_percent(lost)} of the samples without a score"
        lines.append(words + (f"; at {_percent(stops)} of the steps the run would stop" if stops else ""))
    return lines


def _refills(study: Study) -> list[str]:
    lines = []
    for stage in study.first.refills:
        rounds = study.mean(lambda r, stage=stage: r.refills[stage].rounds).value  # type: ignore[misc]
        short = study.mean(lambda r, stage=stage: r.refills[stage].short).value  # type: ignore[misc]
        most = max(r.refills[stage].most for r in study.results)
        words = f"rounds of sampling for {stage}: {rounds:.2f} a step on average, at most {most}"
        lines.append(words + (f"; {_percent(short)} of the steps end with too few groups" if short else ""))
    return lines


def _moved(study: Study) -> list[str]:
    lines = []
    for stage in study.first.moved:
        samples = study.mean(lambda r, stage=stage: r.moved[stage]).value  # type: ignore[misc]
        lines.append(f"moved to other engines at the end of a batch of {stage}: {_rate(samples)} samples a step")
    return lines


def _thrown_out(study: Study) -> list[str]:
    lines = []
    for stage in study.first.thrown_out:
        samples = study.mean(lambda r, stage=stage: r.thrown_out[stage].samples).value  # type: ignore[misc]
        tokens = study.mean(lambda r, stage=stage: r.thrown_out[stage].tokens).value  # type: ignore[misc]
        if samples:
            lines.append(
                f"thrown out of the full cache of {stage}: {_rate(samples)} samples a step, "
                f"{_rate(tokens)} tokens computed again (see --headroom)"
            )
    return lines


def _queues(study: Study) -> list[str]:
    rows = []
    for name, queue in study.first.queues.items():
        most = max(result.queues[name].most for result in study.results)
        rows.append([name, f"{queue.mean:.1f} on average", f"at most {most} of {queue.capacity}"])
    return _table("batches in queues", rows)


def _links(study: Study) -> list[str]:
    rows = [
        [name, size(round(link.bytes)), f"{_percent(link.busy)} of the time"]
        for name, link in study.first.links.items()
    ]
    return _table("links of the busiest device, a step", rows)


def _table(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    more = [f"  ... {len(rows) - _ROWS} more, see --format json"] if len(rows) > _ROWS else []
    return [title, *(f"  {line}" for line in _aligned(rows[:_ROWS])), *more]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; a row may be short, and its last cell does not count."""
    widths: Mapping[int, int] = {
        column: max((len(row[column]) for row in rows if column < len(row) - 1), default=0)
        for column in range(max(len(row) for row in rows))
    }
    return ["  ".join(cell.ljust(widths[column]) for column, cell in enumerate(row)).rstrip() for row in rows]


def _interval(us: Mean) -> str:
    words = seconds(round(us.value))
    if us.half is None:
        return words
    return f"{words} +- {us.half / us.value if us.value else 0:.1%}"


def _percent(share: float) -> str:
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"


def _rate(value: float) -> str:
    for scale, unit in ((1e6, " M"), (1e3, " k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"

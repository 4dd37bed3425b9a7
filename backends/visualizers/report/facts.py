"""The numbers at the top of a report: what people ask first about a plan and a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlflow.amounts import seconds, size
from rlflow.backends.visualizers.report.measured import compared
from rlflow.backends.visualizers.report.subject import Subject
from rlflow.backends.visualizers.summary import describe_stale


@dataclass(frozen=True, slots=True)
class Fact:
    """`number` is what is compared between two plans; None where words say it all. `better`: which way, if any."""

    label: str
    text: str
    number: float | None = None
    better: Literal["low", "high", ""] = ""
    note: str = ""


def facts_of(subject: Subject) -> list[Fact]:
    """In the order in which they are read; a fact that is not known is left out."""
    return [*_time(subject), *_devices(subject), *_memory(subject), *_traffic(subject), *_ages(subject), *_run(subject)]


def _time(subject: Subject) -> list[Fact]:
    plan, simulated, facts = subject.plan, subject.simulated, []
    if simulated is not None:
        drawn = "simulated, lengths drawn" if simulated.sampled else "simulated"
        facts.append(
            Fact("a step every", seconds(round(simulated.period_us)), float(simulated.period_us), "low", drawn)
        )
    if plan.cadence is not None:
        if simulated is None:
            source = "from the profile" if plan.profile is not None else "by the cost model"
            facts.append(Fact("a step every", seconds(plan.cadence.us), float(plan.cadence.us), "low", source))
        cycle = zip(plan.cadence.cycle, plan.cadence.cycle_us, strict=True)
        longest = max(cycle, key=lambda part: part[1], default=None)
        if longest is not None:
            share = longest[1] / (plan.cadence.us * max(plan.cadence.tokens, 1)) if plan.cadence.us else 0.0
            facts.append(Fact("bottleneck", longest[0], note=f"{seconds(longest[1])}, {share:.0%} of the cycle"))
    if simulated is not None:
        if simulated.tokens_per_second:
            rate = simulated.tokens_per_second
            facts.append(Fact("throughput", f"{_rate(rate)} tokens/s", rate, "high", "prompts and responses"))
        note = "; no time for " + ", ".join(simulated.uncounted) if simulated.uncounted else ""
        facts.append(
            Fact("idle devices", f"{simulated.bubble:.0%}", simulated.bubble, "low", f"share of device time{note}")
        )
    return facts


def _devices(subject: Subject) -> list[Fact]:
    pools = [pool for pool in subject.plan.pools if pool.device != "functions"]
    places = {(rank.host, rank.index) for pool in pools for rank in pool.ranks}
    hosts = {host for host, _ in places}
    note = f"in {len(pools)} pool{'s' * (len(pools) != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"
    return [Fact("devices", f"{len(places)}", len(places), note=note)]


def _memory(subject: Subject) -> list[Fact]:
    fullest = max(subject.plan.memory, key=lambda m: m.peak / m.capacity if m.capacity else 0.0, default=None)
    if fullest is None:
        return []
    share = fullest.peak / fullest.capacity if fullest.capacity else 0.0
    text = f"{size(fullest.peak)} of {size(fullest.capacity)}"
    return [Fact("fullest device", text, share, "low", f"{share:.0%}, pool {fullest.pool}")]


def _traffic(subject: Subject) -> list[Fact]:
    if not subject.plan.reshards:
        return []
    moved = sum(reshard.received for reshard in subject.plan.reshards)
    kept = sum(reshard.local for reshard in subject.plan.reshards)
    note = f"weights, of all devices; {size(kept)} already there" if kept else "weights, of all devices"
    return [Fact("moved a step", size(moved), moved, note=note)]


def _ages(subject: Subject) -> list[Fact]:
    readers = [reader for channel in subject.plan.channels for reader in channel.stale]
    if not readers:
        return [Fact("age of samples", "0 steps", 0, "low", "on-policy")]
    worst = [reader.worst_age for reader in readers]
    known = None if any(age is None for age in worst) else max(age or 0 for age in worst)
    text = "no bound" if known is None else f"at most {known} step{'s' * (known != 1)}"
    return [Fact("age of samples", text, known, "low", "; ".join(describe_stale(reader) for reader in readers))]


def _run(subject: Subject) -> list[Fact]:
    ran = subject.ran
    if ran is None:
        return []
    facts = []
    step = next((row for row in compared(subject) if row.name == "step"), None)
    if step is not None:
        error = "" if step.error is None else f"; predicted {step.error:+.0%}"
        note = f"median of {step.steps} steps{error}"
        facts.append(Fact("measured step", seconds(round(step.measured)), step.measured, "low", note))
    status = str(ran.facts.get("status", "unknown"))
    took = ran.facts.get("seconds")
    note = ran.folder + (f", {took:g} s" if isinstance(took, int | float) else "")
    virtual = ran.facts.get("virtual")
    if isinstance(virtual, dict):
        note += f"; virtual devices, {virtual.get('speed_up')} times as fast as the plan says, times are the plan's"
    facts.append(Fact("run", status, note=note))
    return facts


def _rate(value: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"


def difference(before: Fact, after: Fact) -> tuple[str, Literal["better", "worse", ""]]:
    """How the number of the second plan differs from the first one's, and which way that is."""
    if before.number is None or after.number is None or before.number == after.number:
        return "", ""
    apart = after.number - before.number
    text = f"{apart / before.number:+.0%}" if before.number else f"{apart:+g}"
    if not before.better:
        return text, ""
    lower = apart < 0
    return text, "better" if lower == (before.better == "low") else "worse"

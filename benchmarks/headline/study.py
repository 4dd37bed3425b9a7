"""All simulations of the study, kept in results.json so that the page can be written again without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.headline.cases import HERE, SCHEDULES, SUPERNODES, Case, inputs, plan_of, stated

RESULTS = HERE / "results.json"
SEEDS = {1: (0, 1), 2: (0,), 4: (0,)}
"""By supernodes. The same numbers everywhere, so that all schedules get the same lengths."""
STEPS = 3
"""That are measured, after as many to warm up and one more for every step of staleness."""
LENGTHS = (8192, 16384, 32768)
BATCHES = (384, 768, 1536)
NEXT = (2016, 2208)
"""Batches beside the calibrated one on four supernodes."""
TRIGGERS = (60, 75, 90, 100)
STALENESS = (0, 1, 2, 3, 4)
SWITCHES = (None, 0.0, 17.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one simulation."""

    tokens_per_s: float
    step_s: float
    worst_age: int
    busy: dict[str, float]
    """Pool to the share of its time in stages."""


def headline() -> list[Case]:
    return [Case(name, n, seed) for n in SUPERNODES for name in SCHEDULES for seed in SEEDS[n]]


def ablation() -> list[Case]:
    """StaleSync with other staleness and triggers, with drawn lengths; RL Fusion with other switches, as estimated."""
    stale = [Case("stalesync", seed=0, staleness=s, trigger=100) for s in STALENESS]
    early = [Case("stalesync", seed=0, staleness=s, trigger=t) for s in (0, 1) for t in TRIGGERS]
    return [*stale, *early, *(Case("fusion", switch_s=seconds) for seconds in SWITCHES)]


def estimates() -> list[Case]:
    """What else was tried, as estimated: lengths, batches, splits, growth of the batch."""
    found = [Case(name, n) for name in SCHEDULES for n in SUPERNODES]
    found += [Case(name, longest=longest) for name in SCHEDULES for longest in LENGTHS]
    found += [Case(name, prompts=prompts) for name in SCHEDULES for prompts in BATCHES]
    found += [Case("baseline", rollout=256)]
    found += [Case("fusion", 4, prompts=prompts) for prompts in NEXT]
    found += [Case(name, n, prompts=768 * grown) for name in SCHEDULES[1:] for n in (2, 4) for grown in (1, n)]
    return found


def cases() -> list[Case]:
    every = [*estimates(), *headline(), *ablation()]
    return list({case.key: case for case in every}.values())


def outcome(case: Case) -> Outcome:
    from rlflow.backends.simulator.run import Options, simulate

    plan = plan_of(case)
    warm_up = STEPS + case.staleness if case.schedule == "stalesync" else 1
    found = simulate(plan, Options(steps=STEPS, warm_up=warm_up, seed=case.seed, stated=stated(case)))
    busy = {name: round(pool.busy, 4) for name, pool in found.pools.items()}
    return Outcome(round(found.tokens_per_second, 1), round(float(found.period) / 1e6, 1), found.worst_age, busy)


def read(path: Path = RESULTS) -> tuple[dict[str, str], dict[str, Outcome]]:
    """(what they are of, case to its outcome); nothing where there is no file."""
    if not path.is_file():
        return {}, {}
    known = json.loads(path.read_text("utf-8"))
    return known["inputs"], {key: Outcome(**value) for key, value in known["outcomes"].items()}


def run(wanted: Sequence[Case], processes: int, again: bool) -> dict[str, Outcome]:
    """Simulates what is missing or, with `again`, everything, and writes results.json after every case."""
    of, found = read()
    if again or of != inputs():
        found = {}
    missing = [case for case in wanted if case.key not in found]
    with get_context("spawn").Pool(processes) as pool:
        for key, result in pool.imap_unordered(_numbered, missing):
            found[key] = result
            _write({case.key: found[case.key] for case in wanted if case.key in found})
            print(f"{key}: {result.tokens_per_s / 1e3:.1f} thousand tokens/s", flush=True)
    return found


def _numbered(case: Case) -> tuple[str, Outcome]:
    return case.key, outcome(case)


def _write(found: dict[str, Outcome]) -> None:
    outcomes = {
        key: {"tokens_per_s": o.tokens_per_s, "step_s": o.step_s, "worst_age": o.worst_age, "busy": o.busy}
        for key, o in found.items()
    }
    text = json.dumps({"inputs": inputs(), "outcomes": outcomes}, indent=1, ensure_ascii=False)
    RESULTS.write_text(text + "\n", "utf-8")

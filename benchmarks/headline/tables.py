"""The tables of docs/headline.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from benchmarks.headline.cases import LONGEST, PROMPTS, SCHEDULES, SUPERNODES, Case
from benchmarks.headline.published import CALIBRATED, LINEARITY, published, two_supernodes
from benchmarks.headline.study import BATCHES, LENGTHS, SEEDS, STALENESS, SWITCHES, TRIGGERS, Outcome

NAMES = {"baseline": "synchronous, separated", "fusion": "RL Fusion", "stalesync": "StaleSync"}
Found = Mapping[str, Outcome]
"""Key of a case to its outcome."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def tokens(found: Found, schedule: str, supernodes: int) -> float:
    """Tokens/s, the mean of the seeds."""
    return fmean(found[Case(schedule, supernodes, seed).key].tokens_per_s for seed in SEEDS[supernodes])


def linearity(found: Found, schedule: str, supernodes: int) -> float:
    return tokens(found, schedule, supernodes) / (supernodes * tokens(found, schedule, 1))


def gain(found: Found, schedule: str, over: str, supernodes: int = 1) -> float:
    return tokens(found, schedule, supernodes) / tokens(found, over, supernodes) - 1


def k(tokens_per_s: float) -> str:
    return f"{tokens_per_s / 1e3:.1f}"


def signed(share: float) -> str:
    return f"{share * 100:+.1f} %"


def _cell(found: Found, schedule: str, supernodes: int) -> list[str]:
    each = [found[Case(schedule, supernodes, seed).key].tokens_per_s for seed in SEEDS[supernodes]]
    value = fmean(each)
    spread = f" +/- {(max(each) - min(each)) / 2e3:.1f}" if len(each) > 1 else ""
    known = published(schedule, supernodes)
    if known is None:
        return ["", k(value) + spread, "prediction"]
    note = f" ({CALIBRATED[schedule, supernodes]})" if (schedule, supernodes) in CALIBRATED else ""
    return [k(known), k(value) + spread, signed(value / known - 1) + note]


def throughput(found: Found) -> str:
    head = ["schedule", "supernodes", "published", "simulated", "difference"]
    return table(head, [[NAMES[s], str(n), *_cell(found, s, n)] for n in SUPERNODES for s in SCHEDULES])


def gains(found: Found) -> str:
    rows = []
    pairs = (("fusion", "baseline", 1), ("stalesync", "fusion", 1), ("stalesync", "baseline", 1))
    for schedule, over, n in (*pairs, ("stalesync", "fusion", 4)):
        one, two = published(schedule, n), published(over, n)
        assert one is not None
        assert two is not None
        what = f"{NAMES[schedule]} over {NAMES[over]}, {n} supernode{'s' * (n != 1)}"
        rows.append([what, signed(one / two - 1), signed(gain(found, schedule, over, n))])
    for schedule in ("fusion", "stalesync"):
        note = " (calibrated)" if (schedule, 4) in CALIBRATED else ""
        value = f"{linearity(found, schedule, 4) * 100:.1f} %{note}"
        rows.append([f"linearity of {NAMES[schedule]} on 4", f"{LINEARITY[schedule] * 100:.0f} %", value])
    rows.append([f"linearity of {NAMES['baseline']} on 4", "", f"{linearity(found, 'baseline', 4) * 100:.1f} %"])
    return table(["what", "published", "simulated"], rows)


def predictions(found: Found) -> str:
    rows = []
    for schedule in ("fusion", "stalesync"):
        low, high = two_supernodes(schedule)
        share = linearity(found, schedule, 2) * 100
        rows.append([NAMES[schedule], f"{k(low)} to {k(high)}", k(tokens(found, schedule, 2)), f"{share:.1f} %"])
    share = linearity(found, "baseline", 2) * 100
    rows.append([NAMES["baseline"], "", k(tokens(found, "baseline", 2)), f"{share:.1f} %"])
    return table(["schedule", "between the published ends", "simulated", "linearity"], rows)


def _aged(outcome: Outcome) -> str:
    return f"{k(outcome.tokens_per_s)} ({outcome.worst_age})"


def staleness(found: Found) -> str:
    cells = [_aged(found[Case("stalesync", seed=0, staleness=s, trigger=100).key]) for s in STALENESS]
    return table(["staleness, no trigger", *(f"{s} steps" if s != 1 else "1 step" for s in STALENESS)], [["", *cells]])


def triggers(found: Found) -> str:
    rows = [
        [
            f"staleness {s}",
            *(_aged(found[Case("stalesync", seed=0, staleness=s, trigger=t).key]) for t in TRIGGERS),
        ]
        for s in (0, 1)
    ]
    return table(["trigger", *(f"{t} %" for t in TRIGGERS)], rows)


def switches(found: Found) -> str:
    names = {None: "by the plan", 0.0: "none", 17.0: "17 s"}
    cells = [k(found[Case("fusion", switch_s=seconds).key].tokens_per_s) for seconds in SWITCHES]
    return table(["switch", *(names[seconds] for seconds in SWITCHES)], [["tokens/s", *cells]])


def lengths(found: Found) -> str:
    rows = []
    for longest in LENGTHS:
        each = [found[Case(s, longest=longest).key].tokens_per_s for s in SCHEDULES]
        rows.append([f"{longest:,}" + " (chosen)" * (longest == LONGEST), *map(k, each), *_gain_cells(each)])
    return table(["`max_new`", *NAMES.values(), "Fusion over baseline", "StaleSync over Fusion"], rows)


def batches(found: Found) -> str:
    rows = []
    for prompts in BATCHES:
        each = [found[Case(s, prompts=prompts).key].tokens_per_s for s in SCHEDULES]
        rows.append([f"{prompts:,}" + " (chosen)" * (prompts == PROMPTS[1]), *map(k, each), *_gain_cells(each)])
    other = found[Case("baseline", rollout=256).key].tokens_per_s
    fusion, stale = (found[Case(s).key].tokens_per_s for s in SCHEDULES[1:])
    cells = [k(other), k(fusion), k(stale), *_gain_cells([other, fusion, stale])]
    rows.append([f"{PROMPTS[1]:,}, baseline with 256 of 768 devices generating", *cells])
    return table(["prompts a step", *NAMES.values(), "Fusion over baseline", "StaleSync over Fusion"], rows)


def _gain_cells(each: Sequence[float]) -> list[str]:
    return [signed(each[1] / each[0] - 1), signed(each[2] / each[1] - 1)]


def growth(found: Found) -> str:
    rows = []
    for schedule in SCHEDULES[1:]:
        one = found[Case(schedule).key].tokens_per_s
        for what, prompts in (
            ("the same", dict.fromkeys((2, 4), PROMPTS[1])),
            ("chosen", PROMPTS),
            ("in step", {n: PROMPTS[1] * n for n in (2, 4)}),
        ):
            cells = []
            for n in (2, 4):
                case = Case(schedule, n) if what == "chosen" else Case(schedule, n, prompts=prompts[n])
                value = found[case.key].tokens_per_s
                cells.append(f"{k(value)}, {value / one / n * 100:.0f} % ({prompts[n]:,} prompts)")
            rows.append([NAMES[schedule], what, *cells])
    return table(["schedule", "batch", "2 supernodes", "4 supernodes"], rows)

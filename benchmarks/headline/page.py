"""docs/headline.md: its template with the tables and the numbers of the results."""

from __future__ import annotations

from pathlib import Path
from string import Template

from benchmarks.headline import tables
from benchmarks.headline.cases import HERE, MINIBATCHES, PROMPTS, Case
from benchmarks.headline.published import published
from benchmarks.headline.study import BATCHES, SEEDS
from benchmarks.headline.tables import Found, gain, linearity, signed, tokens

DOC = Path(__file__).parents[2] / "docs" / "headline.md"


def page(found: Found) -> str:
    """The whole page. KeyError where a case has no result."""
    return Template((HERE / "page.md").read_text("utf-8")).substitute(
        SEEDS=", ".join(f"{len(seeds)} on {n}" for n, seeds in SEEDS.items()),
        ONE=f"{PROMPTS[1]:,}",
        TWO=f"{PROMPTS[2]:,}",
        FOUR=f"{PROMPTS[4]:,}",
        UPDATES=str(MINIBATCHES),
        THROUGHPUT=tables.throughput(found),
        GAINS=tables.gains(found),
        PREDICTIONS=tables.predictions(found),
        STALENESS=tables.staleness(found),
        TRIGGERS=tables.triggers(found),
        SWITCHES=tables.switches(found),
        LENGTHS=tables.lengths(found),
        BATCHES=tables.batches(found),
        GROWTH=tables.growth(found),
        **_numbers(found),
    )


def _numbers(found: Found) -> dict[str, str]:
    """What the text says in figures."""
    busy = found[Case("stalesync", seed=0).key].busy
    fusion = {n: found[Case("fusion", 4, prompts=n * PROMPTS[1]).key].tokens_per_s for n in (1, 4)}
    alone = found[Case("fusion").key].tokens_per_s
    return {
        "fusion_gain": signed(gain(found, "fusion", "baseline")),
        "stale_gain": signed(gain(found, "stalesync", "fusion")),
        "stale_gain_4": signed(gain(found, "stalesync", "fusion", 4)),
        "both_gain": signed(gain(found, "stalesync", "baseline")),
        "fusion_linearity": f"{linearity(found, 'fusion', 4) * 100:.0f} %",
        "stale_linearity": f"{linearity(found, 'stalesync', 4) * 100:.0f} %",
        "fusion_off": _off(found, "fusion", 1),
        "fusion_off_4": _off(found, "fusion", 4),
        "stale_off": _off(found, "stalesync", 1),
        "stale_off_4": _off(found, "stalesync", 4),
        "small_batch": f"{BATCHES[0]:,}",
        "large_batch": f"{BATCHES[-1]:,}",
        "small_gain": _fusion_gain(found, Case("baseline", prompts=BATCHES[0])),
        "large_gain": _fusion_gain(found, Case("baseline", prompts=BATCHES[-1])),
        "other_gain": _fusion_gain(found, Case("baseline", rollout=256)),
        "learner_busy": f"{busy['learner'] * 100:.0f} %",
        "rollout_busy": f"{busy['rollout'] * 100:.0f} %",
        "fixed": f"{fusion[1] / 4 / alone * 100:.0f} %",
        "grown": f"{fusion[4] / 4 / alone * 100:.0f} %",
    }


def _off(found: Found, schedule: str, supernodes: int) -> str:
    known = published(schedule, supernodes)
    assert known is not None
    return signed(tokens(found, schedule, supernodes) / known - 1)


def _fusion_gain(found: Found, baseline: Case) -> str:
    """As estimated, with the batch of the baseline."""
    fused = found[Case("fusion", prompts=baseline.prompts).key].tokens_per_s
    return signed(fused / found[baseline.key].tokens_per_s - 1)

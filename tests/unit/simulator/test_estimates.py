"""The cost model's closed form of a generate stage against its engines, event by event, with drawn lengths.

The token loop decides what is right: `test_engine_exact` holds the engine to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean, median

import pytest

from rlflow.backends.simulator.engine import Engine
from rlflow.backends.simulator.engine_messages import Request, Submit
from rlflow.backends.simulator.engine_settings import EngineSettings, PrefillCost
from rlflow.cluster.presets.architecture import architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.decode import decode_step
from rlflow.cost.dimensions import dimensions
from rlflow.cost.draws import LengthSampler
from rlflow.cost.generation import engine_memory, generate, lock_step, prefill
from rlflow.cost.lengths import Fixed, Lognormal
from rlflow.cost.machine import machine
from rlflow.cost.occupancy import headroom, running_at_once
from rlflow.cost.stages import EngineOptions, Workload
from rlflow.ir.flow import Layout

MODELS = {name: dimensions(architecture(name)) for name in ("qwen3_8b", "qwen3_30b_a3b")}
DEVICES = machine(Cluster("c", tuple(Host(f"h{i}", "ascend_910b", 8) for i in range(8))))
SAMPLES = 8


@dataclass(frozen=True)
class Case:
    limit: str
    """What holds requests back."""
    model: str = "qwen3_8b"
    engines: int = 1
    experts_apart: bool = False
    """The experts lie over all engines, which then are in lock step."""
    requests: int = 96
    """Of an engine."""
    slots: int = 256
    cache: float | None = None
    """Over what all requests of an engine would hold at mean age; None: what the device has."""
    longest: int = 4096
    sigma: float = 0.75
    prompt: int = 256


CASES = [
    Case("nothing"),
    Case("nothing", engines=8),
    Case("nothing", "qwen3_30b_a3b", 8, True, requests=48),
    Case("slots", slots=24),
    Case("slots", engines=8, slots=24),
    Case("slots", "qwen3_30b_a3b", 8, True, slots=32, prompt=1024),
    Case("slots", engines=4, requests=192, slots=16, sigma=1.0),
    Case("cache", cache=0.25),
    Case("cache", engines=8, cache=0.25),
    Case("cache", "qwen3_30b_a3b", 8, True, cache=0.25, prompt=1024),
    Case("cache", "qwen3_30b_a3b", 16, True, cache=0.4, longest=8192),
    Case("cache", engines=2, requests=256, cache=0.1, sigma=1.0),
    Case("cache", engines=4, requests=64, cache=0.5, sigma=0.5),
    Case("slots and cache", "qwen3_30b_a3b", 8, True, requests=128, slots=48, cache=0.3),
]


def ratio(case: Case, seeds: int = 4) -> tuple[float, int]:
    """Estimate over the mean of the engines, and how many requests a full cache threw out."""
    model, options = MODELS[case.model], EngineOptions(slots=case.slots)
    layout = Layout(dp=case.engines, tp=2, ep=2 * case.engines if case.experts_apart else 1)
    response = Lognormal.of_mean(case.longest / 4, case.longest, case.sigma)
    work = Workload(case.requests * case.engines // SAMPLES, Fixed(case.prompt), response, samples=SAMPLES)
    on = DEVICES
    _, pool = engine_memory(model, layout, on, work, options)
    if case.cache is not None:
        held = case.prompt + 0.8 * case.longest / 4
        wanted = max(case.requests * held * case.cache, case.longest + case.prompt)
        spare = (pool.tokens - wanted) * pool.bytes_per_token / 0.9 / options.memory_share
        on = replace(on, memory_bytes=round(on.memory_bytes - spare))
        _, pool = engine_memory(model, layout, on, work, options)
        assert pool.tokens == pytest.approx(wanted, rel=0.01)
    each = prefill(model, layout, on, work, options) / (case.requests * case.prompt)
    settings = EngineSettings(
        decode_step(model, layout, on),
        case.slots,
        kv_blocks=pool.tokens,
        expected=headroom(response, case.prompt, case.requests, case.slots, pool.tokens),
        prefill=PrefillCost(each),
        step_tokens=max(options.prefill_tokens, case.slots),
        ranks=lock_step(layout),
    )
    at_once = running_at_once(response, case.prompt, case.requests, case.slots, pool.tokens)
    assert {"slots": at_once == case.slots, "cache": at_once < min(case.requests, case.slots)}.get(case.limit, True)
    times, thrown_out = [], 0
    for seed in range(seeds):
        lengths = LengthSampler(response, seed)
        engines = [Engine(settings) for _ in range(case.engines // settings.ranks)]
        dealt: list[list[Request]] = [[] for _ in range(case.engines)]
        for sample in range(case.requests * case.engines):
            group, member = divmod(sample, SAMPLES)
            request = Request(sample, case.prompt, lengths.tokens(0, group, member), group)
            dealt[sample % case.engines].append(request)
        for rank, requests in enumerate(dealt):
            engines[rank // settings.ranks].send(Submit(tuple(requests), rank % settings.ranks), 0.0)
        times.append(max(engine.advance_to(float("inf"))[-1].time for engine in engines))
        thrown_out += sum(engine.totals.preemptions for engine in engines)
    return generate(model, layout, on, work, options).seconds / fmean(times), ceil(thrown_out / seeds)


@pytest.fixture(scope="module")
def ratios() -> dict[Case, tuple[float, int]]:
    return {case: ratio(case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimates_agree_with_engines(case: Case, ratios: dict[Case, tuple[float, int]]) -> None:
    found, thrown_out = ratios[case]
    assert found == pytest.approx(1, abs=0.15)
    assert thrown_out <= 0.1 * case.requests * case.engines


def test_estimates_are_right_in_the_middle(ratios: dict[Case, tuple[float, int]]) -> None:
    found = [share for share, _ in ratios.values()]
    assert median(abs(share - 1) for share in found) <= 0.03

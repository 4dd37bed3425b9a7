"""The event-level generation engine against the same rules token by token, and against the model written with SimPy.

python benchmarks/simulator_engine.py [--requests 100000] [--compared 600]

Lengths are lognormal (mean 3,000 tokens, sigma 0.9, at most 16,384), eight samples a prompt of 256 tokens, 256 slots,
8 ms + 15 us a request + 2 ns a held token for a step. Regimes: slots only; with prefill in chunks of a step of 8,192
tokens; a cache of 880,000 tokens in blocks of 16, of which admission leaves 1 % free; both; four ranks in lock step.
The loop and SimPy run once, on the first `--compared` requests, the engine three times, of which the best counts. The
loop counts everything again at every step, SimPy has the shortest code for slots alone. SimPy is left out where it is
not installed.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from importlib.util import find_spec
from math import inf
from typing import Any, TypeVar

from rlflow.backends.simulator.engine import Engine, EngineTotals
from rlflow.backends.simulator.engine_messages import EngineEvent, Request, Submit
from rlflow.backends.simulator.engine_settings import Band, BandedStep, EngineSettings, PrefillCost
from rlflow.backends.simulator.engine_token_loop import token_loop
from rlflow.backends.simulator.sampling import sampled_requests
from rlflow.cost.draws import LengthSampler
from rlflow.cost.lengths import Fixed, Lognormal

T = TypeVar("T")

STEP = BandedStep(tuple(Band(b, 8e-3 + b * 1e-6, 15e-6, 2e-9) for b in (1, 2, 4, *range(8, 257, 8))))
PREFILL = PrefillCost(token=2e-6, square=1e-11, context=1e-4)
CACHE = {"kv_blocks": 55_000, "block": 16, "spare_blocks": 550}
CHUNKS = {"prefill": PREFILL, "step_tokens": 8192}
REGIMES: dict[str, dict[str, Any]] = {
    "slots": {},
    "prefill": CHUNKS,
    "cache": CACHE,
    "cache and prefill": {**CACHE, **CHUNKS},
    "lock step of 4": {**CHUNKS, "ranks": 4},
}


def simpy_run(settings: EngineSettings, requests: Sequence[Request]) -> list[tuple[float, object]]:
    """(time, request) of every completion: slots and prompts at no cost, a process that waits for every step."""
    import simpy

    env = simpy.Environment()
    finished: list[tuple[float, object]] = []

    def engine() -> Generator[Any, Any, None]:
        waiting = deque(enumerate(requests))
        running: list[list[int]] = []  # held tokens, held tokens at the end, number
        while waiting or running:
            while waiting and len(running) < settings.slots:
                number, request = waiting.popleft()
                running.append([request.prompt, request.prompt + request.length, number])
            fixed, each, token = settings.step.affine(len(running))
            yield env.timeout(fixed + each * len(running) + token * sum(entry[0] for entry in running))
            for entry in running:
                entry[0] += 1
            finished.extend((env.now, requests[entry[2]].id) for entry in running if entry[0] == entry[1])
            running = [entry for entry in running if entry[0] < entry[1]]

    env.process(engine())
    env.run()
    return finished


def timed(rounds: int, call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """The best of so many rounds, and what the call returned."""
    best = inf
    for _ in range(rounds):
        began = time.perf_counter()
        result = call(*arguments)
        best = min(best, time.perf_counter() - began)
    return best, result


def totals_of(settings: EngineSettings, requests: Sequence[Request]) -> EngineTotals:
    engine = Engine(settings)
    engine.run(requests)
    return engine.totals


def events_of(settings: EngineSettings, requests: Sequence[Request]) -> list[EngineEvent]:
    return Engine(settings).run(requests)


def loop_events_of(settings: EngineSettings, requests: Sequence[Request]) -> list[EngineEvent]:
    return token_loop(settings, [(0.0, Submit(tuple(requests)))])


def apart(told: Sequence[EngineEvent], expected: Sequence[EngineEvent]) -> float:
    """The largest relative difference of times. ValueError if what happened differs."""
    if [event[1:] for event in told] != [event[1:] for event in expected]:
        raise ValueError("the engine and the loop over tokens tell different events")
    return max(abs(a.time - b.time) / b.time for a, b in zip(told, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--compared", type=int, default=600)
    options = parser.parse_args()
    prompts = LengthSampler(Fixed(256), 0, "prompt")
    responses = LengthSampler(Lognormal.of_mean(3000, 16_384, sigma=0.9), 0)
    drawing, requests = timed(1, sampled_requests, prompts, responses, 0, max(1, options.requests // 8), 8)
    some = requests[: options.compared]
    print(f"{len(requests):,} requests drawn in {drawing:.2f} s; compared on {len(some):,}")
    print(f"{'regime':<18} {'all, s':>8} {'Mtokens/s':>10} {'preempted':>10} {'loop, s':>8} {'ratio':>6} {'off by':>8}")
    for name, more in REGIMES.items():
        settings = EngineSettings(STEP, slots=256, **more)
        seconds, totals = timed(3, totals_of, settings, requests)
        tokens = sum(request.length for request in requests) / seconds / 1e6
        fast, told = timed(3, events_of, settings, some)
        slow, expected = timed(1, loop_events_of, settings, some)
        print(
            f"{name:<18} {seconds:>8.2f} {tokens:>10.1f} {totals.preemptions:>10,} {slow:>8.2f} "
            f"{slow / fast:>6.0f} {apart(told, expected):>8.1e}"
        )
    if find_spec("simpy") is None:
        print("SimPy is not installed")
        return
    settings = EngineSettings(STEP, slots=256)
    fast, told = timed(3, events_of, settings, some)
    slow, finished = timed(1, simpy_run, settings, some)
    worst = max(abs(event.time - at) / at for event, (at, _) in zip(told, finished, strict=True))
    if [event.id for event in told] != [id for _, id in finished]:
        raise ValueError("the engine and SimPy finish requests in different orders")
    print(f"{'SimPy, slots':<18} {'':>8} {'':>10} {'':>10} {slow:>8.2f} {slow / fast:>6.0f} {worst:>8.1e}")


if __name__ == "__main__":
    main()

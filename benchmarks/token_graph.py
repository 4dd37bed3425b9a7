"""How long the period of a token graph takes: Howard's policy iteration against the linear programme, in one run.

python benchmarks/token_graph.py [--edges 800 4000 20000] [--rounds 5] [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph
from rlflow.passes.analysis.tokens.oracle import solve
from rlflow.passes.analysis.tokens.period import period

EDGES_PER_STAGE = 4
"""Of these one is the stage's self-loop."""
NEAR = 20
"""How many places an edge leads at most, forwards without tokens or backwards with one to three."""


def random_graph(edges: int, seed: int) -> TokenGraph:
    """So many closed edges: a chain of serial stages of 0.1 to 10 s, its closing edge, and random edges between near
    stages. Live, since edges without tokens only lead forwards, and strongly connected."""
    rng = random.Random(seed)
    stages = edges // EDGES_PER_STAGE
    names = [f"s{i}" for i in range(stages)]
    made = [TokenEdge(src, dst) for src, dst in pairwise(names)]
    made.append(TokenEdge(names[-1], names[0], stages // 4))
    while len(made) + stages < edges:
        i = rng.randrange(stages)
        j = max(0, min(stages - 1, i + rng.randint(-NEAR, NEAR)))
        made.append(TokenEdge(names[i], names[j], 0 if i < j else rng.randint(1, 3)))
    return TokenGraph.of({name: rng.uniform(0.1, 10) for name in names}, made)


def timed(side: Callable[[TokenGraph], float], graph: TokenGraph) -> tuple[float, float]:
    """The answer, and the seconds of processor time it took: others may use the machine."""
    started = time.process_time()
    value = side(graph)
    return value, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--edges", type=int, nargs="+", default=[800, 4000, 20000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    sides: dict[str, Callable[[TokenGraph], float]] = {
        "Howard": lambda graph: float(period(graph).value),
        "LP": lambda graph: solve(graph).period,
    }
    solve(random_graph(80, 0))  # imports scipy
    for edges in args.edges:
        graph = random_graph(edges, args.seed)
        values: dict[str, float] = {}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(args.rounds):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for name in order:
                values[name], seconds = timed(sides[name], graph)
                times[name].append(seconds)
        difference = abs(values["Howard"] - values["LP"]) / values["LP"]
        medians = {name: statistics.median(found) for name, found in times.items()}
        line = ", ".join(
            f"{name} median {medians[name] * 1e3:.1f} ms (fastest {min(found) * 1e3:.1f})"
            for name, found in times.items()
        )
        cycle = len(period(graph).cycle)
        print(f"{edges:6} edges: {line}, ratio {medians['LP'] / medians['Howard']:.1f}", end="")
        print(f"; period {values['Howard']:.6g} s, critical cycle of {cycle}, relative difference {difference:.0e}")


if __name__ == "__main__":
    main()

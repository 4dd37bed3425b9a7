"""How long the placement search takes: seven stages on 1,536 and on 10,240 devices, against a mixed-integer program.

python benchmarks/auto_placement.py [--devices 1536 10240] [--seed 0] [--no-oracle]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from rlflow.passes.search.decide import Decision, Refusal, search
from rlflow.passes.search.devices import pool_sizes
from rlflow.passes.search.milp import PoolColumn, solve_milp
from rlflow.passes.search.options import StageOption, StageTable
from rlflow.passes.search.pool_time import PoolTimes
from rlflow.passes.search.problem import DeviceType, Problem
from rlflow.passes.search.reasons import GIB

HOST = 8
MEMORY = 64 * GIB
AIMS = {1536: 0.5, 10240: 2.0}
"""Seconds of processor time for the search without alternatives."""
ORACLE_SIZES = 63
"""Of each pool in the mixed-integer program: with all sizes it would have 163,000 binaries."""
TENSOR, PIPELINE = (1, 2, 4, 8), (1, 2, 4)


@dataclass(frozen=True)
class Role:
    """What one stage costs: device-seconds in all, seconds that no device takes away, and bytes over all devices."""

    name: str
    work: float
    fixed: float
    weights: float
    state: float
    """Bytes of gradients and optimizer, sharded over all devices."""
    working: float


# A policy of 32 B parameters that trains, a critic of the same size, a reference and a reward model of 32 B: bytes of
# bf16 weights, and of fp32 gradients and Adam where trained. Device-seconds are per step on 64 devices.
ROLES = (
    Role("rollout", 3600.0, 6.0, 64e9, 0.0, 24 * GIB),
    Role("old_logprobs", 500.0, 0.4, 64e9, 0.0, 8 * GIB),
    Role("reference", 500.0, 0.4, 64e9, 0.0, 8 * GIB),
    Role("values", 500.0, 0.4, 64e9, 0.0, 8 * GIB),
    Role("reward", 450.0, 0.5, 64e9, 0.0, 8 * GIB),
    Role("critic_train", 1500.0, 0.8, 64e9, 14 * 32e9, 14 * GIB),
    Role("actor_train", 1700.0, 0.8, 64e9, 14 * 32e9, 14 * GIB),
)


def options(role: Role, sizes: Sequence[int], scale: float, noise: random.Random) -> Iterator[StageOption]:
    """Tensor parallelism costs communication, a pipeline bubbles, data parallelism an all-reduce that grows slowly."""
    for tp in TENSOR:
        for pp in PIPELINE:
            bias = noise.uniform(0.97, 1.03)
            for n in sizes:
                if n % (tp * pp):
                    continue
                dp = n // (tp * pp)
                lost = (1 + 0.05 * (tp - 1)) * (1 + (pp - 1) / 16) * bias
                seconds = role.work * scale / n * lost + role.fixed * (1 + 0.1 * dp.bit_length()) / (tp * pp) ** 0.5
                static = int(role.weights / (tp * pp) + role.state / n)
                peak = static + int(role.working / tp)
                yield StageOption(n, seconds, static, peak, (tp, pp, dp), (tp, pp))


def reshard(source: str, source_class: Hashable, target: str, target_class: Hashable) -> float:
    """The policy moves between rollout and training when their layouts differ; others keep their own weights."""
    policy = {"rollout", "actor_train"}
    return 1.2 if {source, target} <= policy and source_class != target_class else 0.05


def offload(load: object) -> float:
    """Bytes above the memory go to the host and back at 25 GB/s, up to 100 GiB."""
    over = max(0, load.peak_bytes - MEMORY)  # type: ignore[attr-defined]
    return float("inf") if over > 100 * GIB else 2 * over / 25e9


def problem_of(devices: int, seed: int) -> tuple[Problem, float]:
    """The problem, and the seconds that its tables took."""
    noise = random.Random(seed)
    hosts = (HOST,) * (devices // HOST)
    made = {role.name: list(options(role, pool_sizes(hosts), devices / 64, noise)) for role in ROLES}
    started = time.process_time()
    tables = {name: StageTable.of(some, MEMORY) for name, some in made.items()}
    took = time.process_time() - started
    kind = DeviceType("npu", hosts, MEMORY, tables, offload)
    return Problem(tuple(tables), (kind,), reshard=reshard, alternatives=False), took


def timed(problem: Problem) -> tuple[Decision, float]:
    started = time.process_time()
    found = search(problem)
    took = time.process_time() - started
    if isinstance(found, Refusal):
        raise SystemExit(found.message)
    return found, took


def oracle(problem: Problem, sizes: Sequence[int]) -> tuple[float, float, int]:
    """Period, seconds of the solver and number of binaries of the mixed-integer program over these sizes."""
    kind = problem.device_types[0]
    tables = [kind.tables[stage] for stage in problem.stages]
    times = PoolTimes(problem.stages, tables, sizes, kind.swap_model, problem.reshard, problem.links)
    count = len(problem.stages)
    columns = [
        PoolColumn(block, 0, n, plan.seconds)
        for k in range(1, count + 1)
        for block in combinations(range(count), k)
        for n in sizes
        if (plan := times.at_most(block, n)) is not None
    ]
    started = time.process_time()
    found = solve_milp(count, columns, [kind.devices])
    took = time.process_time() - started
    if found is None:
        raise SystemExit("the mixed-integer program has no solution")
    return found[0], took, len(columns)


def thinned(sizes: Sequence[int]) -> tuple[int, ...]:
    """The small sizes, then sizes spread evenly up to the largest."""
    small = [n for n in sizes if n <= 8 * HOST]
    large = [n for n in sizes if n > 8 * HOST]
    wanted = ORACLE_SIZES - len(small)
    step = max(1.0, len(large) / wanted)
    return tuple([*small, *(large[min(len(large) - 1, round((i + 1) * step) - 1)] for i in range(wanted))])


def compare(devices: int, seed: int, with_oracle: bool) -> None:
    problem, tables_took = problem_of(devices, seed)
    kept = sum(len(f) for t in problem.device_types[0].tables.values() for c in t.classes for f in c.frontiers)
    found, took = timed(problem)
    whole, whole_took = timed(replace(problem, alternatives=True))
    print(f"{devices} devices, {len(problem.stages)} stages; processor time")
    print(f"  tables, {kept} options kept      {tables_took:8.3f} s")
    aim = f" (aim: below {AIMS[devices]:g} s)" if devices in AIMS else ""
    print(f"  search                          {took:8.3f} s{aim}")
    print(f"  search with {len(whole.alternatives):2} alternatives     {whole_took:8.3f} s")
    above = 100 * (found.chosen.period / found.bound.seconds - 1)
    pools = ", ".join(f"{'+'.join(pool.stages)} on {pool.devices}" for pool in found.chosen.pools)
    print(f"  period {found.chosen.period:.6f} s, {above:.2f} % above the bound")
    print(f"  {pools}")
    print(f"  {found.effort.partitions} partitions, {found.effort.joint_choices} joint choices")
    if not with_oracle:
        return
    sizes = thinned(pool_sizes(problem.device_types[0].hosts))
    thin = replace(problem, device_types=(replace(problem.device_types[0], sizes=sizes),))
    same, same_took = timed(thin)
    period, solver_took, binaries = oracle(thin, sizes)
    print(
        f"  mixed-integer program, {len(sizes)} sizes, {binaries} binaries: {solver_took:.3f} s, period {period:.6f} s"
    )
    print(f"  search over the same sizes: {same_took:.3f} s, period {same.chosen.period:.6f} s")
    print(f"  ratio of times {solver_took / same_took:.1f}, of periods {period / same.chosen.period:.9f}")
    if abs(period - same.chosen.period) > 1e-9 * period:
        raise SystemExit("the two periods differ")
    if found.chosen.period > same.chosen.period:
        raise SystemExit("more sizes gave a longer period")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=list(AIMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-oracle", action="store_true", help="only the search")
    args = parser.parse_args()
    for devices in args.devices:
        compare(devices, args.seed, not args.no_oracle)


if __name__ == "__main__":
    main()

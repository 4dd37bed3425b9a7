"""A pool of CPUs whose memory the schedule states, as a machine whose memory can be planned."""

from __future__ import annotations

from typing import Final

from rlflow.cost.machine import Device, Machine, machine
from rlflow.ir.flow import PoolSpec
from rlflow.passes.analysis.costs import Costs
from rlflow.passes.base import PassContext

NOMINAL: Final = {
    "peak_bf16_flop_per_s": 1e11,
    "hbm_bytes_per_s": 2e10,
    "host_read_bytes_per_s": 1e10,
    "host_write_bytes_per_s": 1e10,
    "scaleup_bytes_per_s": 1e9,
    "scaleout_bytes_per_s": 1e9,
}
"""Orders of magnitude of a few cores. They weigh copies against each other and nothing else: no estimate of a stage is
made from them, since the speed of CPUs is measured, not stated."""


def machine_of(pool: PoolSpec, costs: Costs, context: PassContext) -> Machine | None:
    """The devices of a pool; of CPUs those that have the `memory` that the schedule states. None where neither is
    known."""
    if pool.device != "cpu":
        return costs.machine(pool)
    stated = next((request.memory_bytes for request in context.schedule.pools if request.name == pool.name), None)
    if stated is None:
        return None
    device = Device("cpu", {**NOMINAL, "hbm_bytes": stated})
    return machine(context.cluster, tuple(dict.fromkeys(pool.host_of_rank)), device=device)

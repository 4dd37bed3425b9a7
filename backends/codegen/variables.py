"""Environment variables of a run, by the kind of its devices, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.plan import MoveObject, Plan

HCCL_CONNECT_S = 600
"""HCCL's own default is 120 s; ranks that load large models meet later than that."""


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    why: str


def variables(plan: Plan, kinds: set[str], interface: str) -> tuple[Variable, ...]:
    """What every process of the run gets. `kinds`: of the hosts (npu, cuda, cpu). `interface`: the network interface
    between hosts, "" = the libraries choose."""
    found = [Variable("PYTHONUNBUFFERED", "1", "lines of the log appear when they are written")]
    swaps = any(isinstance(i, MoveObject) for program in plan.programs for i in program.step)
    if "npu" in kinds:
        found += _npu(plan, swaps)
    if "cuda" in kinds:
        found += _cuda(swaps)
    if interface:
        libraries = {"npu": "HCCL", "cuda": "NCCL"}
        names = [f"{libraries[kind]}_SOCKET_IFNAME" for kind in sorted(kinds) if kind in libraries]
        for name in [*names, "GLOO_SOCKET_IFNAME"]:
            found.append(Variable(name, interface, "the interface between hosts, not a container's bridge"))
    return tuple(found)


def _npu(plan: Plan, swaps: bool) -> list[Variable]:
    timeout = plan.collective_timeout_s
    if swaps:
        segments = Variable(
            "PYTORCH_NPU_ALLOC_CONF",
            "expandable_segments:False",
            "the plan swaps; with expandable segments memory of sleeping weights is not given back",
        )
    else:
        segments = Variable(
            "PYTORCH_NPU_ALLOC_CONF",
            "expandable_segments:True",
            "less fragmentation; the plan swaps nothing that it could hinder",
        )
    return [
        Variable(
            "HCCL_CONNECT_TIMEOUT",
            str(HCCL_CONNECT_S),
            "seconds for ranks to meet; they load models at different speeds (default 120)",
        ),
        Variable(
            "HCCL_EXEC_TIMEOUT",
            str(timeout),
            "seconds a collective waits: the plan's collective_timeout_s, the same on all ranks",
        ),
        Variable("HCCL_EVENT_TIMEOUT", str(timeout + 68), "must be above HCCL_EXEC_TIMEOUT, whose error says more"),
        Variable(
            "HCCL_HOST_SOCKET_PORT_RANGE", "auto", "processes that share a host or device do not fight for one port"
        ),
        Variable("HCCL_NPU_SOCKET_PORT_RANGE", "auto", "the same for the ports of the device"),
        segments,
        Variable("TASK_QUEUE_ENABLE", "2", "kernels are launched from a second thread; for eager mode, not for graphs"),
        Variable("CPU_AFFINITY_CONF", "1", "threads of a rank stay near its device"),
    ]


def _cuda(swaps: bool) -> list[Variable]:
    state, why = (
        ("False", "the plan swaps; the sleep mode of rollout engines refuses expandable segments")
        if swaps
        else ("True", "less fragmentation; the plan swaps nothing that it could hinder")
    )
    return [
        Variable("PYTORCH_ALLOC_CONF", f"expandable_segments:{state}", why),
        Variable("NCCL_DEBUG", "WARN", "a failed collective says why"),
    ]

"""What the environment of a process must be like for its devices, and what in it would break a plan.

Pure: it reads a plan and a mapping of environment variables, so that the launcher, `rlflow doctor` and tests ask the
same questions. Devices have two numbers: the physical one, by which `npu-smi` and the visible-devices variable know
them, and the logical one, its place among the visible devices, which is all that torch ever takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rlflow.communicators import DEFAULT_MIB, buffer_mib, communicators
from rlflow.diagnostics import Diagnostic, RunFailure
from rlflow.plan import COLLECTIVE_TIMEOUT_S, Plan, Pool, PublishWeights, RankPlace, ReshardWeights

CODE: Final = "RLF4020"
VISIBLE: Final = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
RAY_RESOURCE: Final = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
"""What a rank asks Ray for, by the kind of its pool."""
NOT_BY_RAY: Final = {
    "npu": "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "cuda": "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
}
"""Tells Ray to leave the visible-devices variable alone."""
ALLOCATOR: Final = {"npu": "PYTORCH_NPU_ALLOC_CONF", "cuda": "PYTORCH_CUDA_ALLOC_CONF"}
WEIGHT_FORMAT: Final = "VLLM_ASCEND_ENABLE_NZ"
TIMEOUTS: Final = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")
"""Seconds that HCCL waits for other ranks while a group is made, and inside a collective."""
_EVENT_GRACE_S: Final = 60
PORT_RANGES: Final = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
_TRUE: Final = ("1", "true", "yes", "on")


# --- which device ----------------------------------------------------------------------------------------------------


def visible_devices(kind: str, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Physical numbers of the visible devices, ascending: logical number i is the i-th. None where all are visible.

    CANN takes a list that does not ascend for no devices at all, so `1,0` is read as `0,1` and must be written so
    before a process starts (`normalised`). RLF4020 for what is no list of distinct numbers.
    """
    variable = VISIBLE.get(kind, "")
    text = environ.get(variable)
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    bad = next((word for word in words if not word.isdecimal()), None)
    twice = next((word for word in words if words.count(word) > 1), None)
    if bad is not None or twice is not None:
        what = f"`{bad}` is no number" if bad is not None else f"device {twice} stands there twice"
        raise RunFailure(
            CODE,
            f"{variable} is `{text}`, and {what}",
            help=("write the numbers of `npu-smi info`, separated by commas" if kind == "npu" else "write numbers",),
        )
    return tuple(sorted(int(word) for word in words))


def normalised(kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The visible-devices variable as every system reads it: ascending. Empty where it is not set."""
    devices = visible_devices(kind, environ)
    return {} if devices is None else {VISIBLE[kind]: ",".join(str(device) for device in devices)}


def logical_index(physical: int, visible: tuple[int, ...] | None) -> int:
    """What torch calls a device. RLF4020 when it is not visible."""
    if visible is None:
        return physical
    if physical not in visible:
        listed = ",".join(str(device) for device in visible)
        raise RunFailure(CODE, f"device {physical} is not among the visible devices {listed}")
    return visible.index(physical)


def physical_device(place: RankPlace, visible: tuple[int, ...] | None) -> int:
    """The device of a rank on its own host, whatever hosts come before. RLF4020 when the host shows too few."""
    if visible is None:
        return place.index
    if place.index >= len(visible):
        raise RunFailure(
            CODE,
            f"rank {place.rank} is to hold device {place.index} of host `{place.host}`, which shows {len(visible)}",
            notes=(f"visible there: {','.join(str(device) for device in visible)}",),
            help=("make as many devices visible as the plan's cluster has on a host",),
        )
    return visible[place.index]


# --- a worker's environment ------------------------------------------------------------------------------------------


def worker_environment(plan: Plan, pool: Pool, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that every rank of the pool gets before anything is imported: the same on all of them.

    The visible devices are not among them: Ray sets those, one device for each rank. What the user has set stays where
    it does no harm; waits are never shorter than the plan's.
    """
    if pool.device != "npu":
        return {}
    out = {name: str(max(_seconds(environ, name), plan.collective_timeout_s)) for name in TIMEOUTS}
    # The watchdog of events must not end a process that still waits in a collective.
    event = plan.collective_timeout_s + _EVENT_GRACE_S
    out["HCCL_EVENT_TIMEOUT"] = str(max(_seconds(environ, "HCCL_EVENT_TIMEOUT"), event))
    # Processes that share a device must not listen on one port.
    out |= {name: environ.get(name, "auto") for name in PORT_RANGES}
    # Weights are written in place: a format of its own would be read as if it were the plain one.
    out[WEIGHT_FORMAT] = "0"
    out |= _buffers(plan, pool, environ)
    out["TASK_QUEUE_ENABLE"] = environ.get("TASK_QUEUE_ENABLE", "1")
    return out


def _buffers(plan: Plan, pool: Pool, environ: Mapping[str, str]) -> dict[str, str]:
    """HCCL_BUFFSIZE (MiB) where the default would not fit beside what the plan keeps on a device."""
    memory = next((memory for memory in plan.memory if memory.pool == pool.name), None)
    if memory is None:
        return {}
    layouts = [stage.layout for stage in plan.stages if stage.pool == pool.name and stage.layout is not None]
    exchanges = sum(r.source != r.target and pool.name in (r.source, r.target) for r in plan.reshards)
    room = memory.capacity + memory.reserved - memory.peak
    fits = buffer_mib(communicators(layouts, exchanges), room)
    asked = environ.get("HCCL_BUFFSIZE", "")
    size = min(fits, int(asked)) if asked.isdecimal() else fits
    return {} if size == DEFAULT_MIB else {"HCCL_BUFFSIZE": str(size)}


def _seconds(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


# --- what breaks a plan ----------------------------------------------------------------------------------------------


def environment_findings(plan: Plan, environ: Mapping[str, str], sleeping_engine: bool = False) -> list[Diagnostic]:
    """Everything in an environment that this plan must not meet, as RLF4020.

    `sleeping_engine`: rollout is by an engine whose sleep mode puts weights into a memory pool of its own (vLLM,
    vllm-ascend), not by the embedded one, whose swaps go through the ordinary allocator.
    """
    kinds = sorted({pool.device for pool in plan.pools} & VISIBLE.keys())
    return [found for kind in kinds for found in _findings(kind, plan, environ, sleeping_engine)]


def refuse_environment(plan: Plan, environ: Mapping[str, str], sleeping_engine: bool = False) -> None:
    """RunFailure with the first finding, if there is one."""
    for found in environment_findings(plan, environ, sleeping_engine):
        raise RunFailure(found.code, found.message, notes=found.notes, help=found.help)


def _findings(kind: str, plan: Plan, environ: Mapping[str, str], sleeping_engine: bool) -> Iterator[Diagnostic]:
    pools = [pool for pool in plan.pools if pool.device == kind]
    named = ", ".join(f"`{pool.name}`" for pool in pools)
    flag = NOT_BY_RAY[kind]
    if environ.get(flag, "").lower() in _TRUE:
        yield Diagnostic(
            CODE,
            f"{flag} is set, and the ranks of pool {named} get their devices from Ray",
            notes=("every rank would see all devices and take the first",),
            help=(f"unset {flag}",),
        )
    yield from _visible_findings(kind, pools, environ)
    settings = environ.get(ALLOCATOR[kind], "")
    if sleeping_engine and "expandable_segments:true" in settings.replace(" ", "").lower():
        yield Diagnostic(
            CODE,
            f"{ALLOCATOR[kind]} has expandable_segments, and the rollout engine's sleep mode cannot work with it",
            notes=(f"it is `{settings}`", "sleep mode takes its memory from a pool of its own, in whole segments"),
            help=("take expandable_segments:True out",),
        )
    if kind == "npu":
        yield from _npu_findings(plan, pools, environ)


def _visible_findings(kind: str, pools: list[Pool], environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    try:
        visible = visible_devices(kind, environ)
        if visible is not None:
            for pool in pools:
                for place in pool.ranks:
                    physical_device(place, visible)
    except RunFailure as failure:
        yield failure.to_diagnostic()


def _npu_findings(plan: Plan, pools: list[Pool], environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    text = environ.get(WEIGHT_FORMAT, "")
    written = next((pool for pool in pools if _is_written(plan, pool)), None)
    if written is not None and text.lower() in _TRUE:
        yield Diagnostic(
            CODE,
            f"{WEIGHT_FORMAT} is `{text}`, and the weights in pool `{written.name}` are written in place every step",
            notes=("a plain copy into a weight of format FRACTAL_NZ is read as other numbers",),
            help=(f"unset {WEIGHT_FORMAT}: the ranks get 0",),
        )
    for name in TIMEOUTS:
        seconds = _seconds(environ, name)
        if environ.get(name) and not environ[name].isdecimal():
            yield Diagnostic(CODE, f"{name} is `{environ[name]}`, not a number of seconds")
        elif seconds and seconds < plan.collective_timeout_s > COLLECTIVE_TIMEOUT_S:
            yield Diagnostic(
                CODE,
                f"{name} is {seconds} s, and ranks of this plan may wait {plan.collective_timeout_s} s for each other",
                help=(f"unset {name}: the ranks get {plan.collective_timeout_s}",),
            )


def _is_written(plan: Plan, pool: Pool) -> bool:
    """Whether weights that a stage of the pool reads are trained, here or elsewhere."""
    return any(
        isinstance(instruction, PublishWeights | ReshardWeights)
        for program in plan.programs
        if program.pool == pool.name
        for instruction in program.step
    )

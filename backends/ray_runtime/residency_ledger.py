"""Bytes on the device, measured after every instruction, beside those that the plan has there."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.backends.ray_runtime.held_table import CACHE, HeldTable
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Train
from rlflow.plan import Instruction, Stage
from rlflow.plan_decisions import PoolMemory


@dataclass(frozen=True, slots=True)
class Entry:
    """One measurement. Objects of the table to bytes on the device."""

    step: int
    instruction: str
    measured: dict[str, int]
    planned: dict[str, int]
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        return sum(self.measured.values())

    @property
    def planned_bytes(self) -> int:
        return sum(self.planned.values())

    @property
    def over_plan_bytes(self) -> int:
        """Of the objects that take more than the plan says; what others leave free does not make up for it."""
        return sum(max(0, size - self.planned[name]) for name, size in self.measured.items())


class Ledger:
    """Of one rank. What is listed: weights, optimizers, gradients, keys and values. Activations and buffers of
    communication are no objects that stay; an accelerator's allocator counts them, into `allocator_peak_bytes`.

    More than the plan has at an instant is a number in the metrics (`over_plan_bytes`), since the plan's sizes are a
    model's; more than the device may hold is a failure, RLF5034.
    """

    def __init__(self, state: RankState, table: HeldTable, memory: PoolMemory) -> None:
        self._state, self._table, self._memory = state, table, memory
        self._contents = {phase.stage: dict(phase.contents) for phase in memory.phases}
        self.entries: list[Entry] = []
        """Of the latest step, and of what came between it and the one before."""

    def measure(self, instruction: Instruction, stage: Stage | None, step: int, metrics: StepMetrics) -> None:
        """Add an entry, to the trace event of the instruction too. RunFailure RLF5034."""
        if self.entries and self.entries[-1].step != step:
            self.entries = []
        measured = {name: held.device_bytes() for name, held in self._table.objects.items()}
        planned = {name: held.planned_bytes for name, held in self._table.objects.items()}
        for name, cache in self._table.caches.items():
            runs = stage is not None and name == f"{stage.id}{CACHE}"
            measured[name] = cache.engine.cache_peak_bytes if runs else 0
            planned[name] = cache.whole - cache.away
        if stage is not None and isinstance(stage.op, Train):
            trainer = self._state.models[stage.op.model].trainer
            assert trainer is not None
            name = f"{stage.op.model} gradients"
            found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in trainer.gradients()}
            measured[name], planned[name] = sum(found.values()), self._contents.get(stage.id, {}).get(name, 0)
        host = sum(held.host_bytes() for held in self._table.objects.values())
        entry = Entry(step, instruction.id, measured, planned, host)
        self.entries.append(entry)
        self._report(entry, stage, metrics)

    def _report(self, entry: Entry, stage: Stage | None, metrics: StepMetrics) -> None:
        family = f"memory/{self._state.pool}"
        numbers = {
            "device_peak_bytes": entry.device_bytes,
            "planned_peak_bytes": entry.planned_bytes,
            "host_peak_bytes": entry.host_bytes,
            "over_plan_bytes": entry.over_plan_bytes,
        }
        device = self._state.device
        if device.kind != "cpu":
            numbers["allocator_peak_bytes"] = device.memory().peak
        for name, number in numbers.items():
            key = f"{family}/{name}"
            metrics.highs[key] = max(metrics.highs.get(key, 0.0), float(number))
        metrics.resident(entry.device_bytes, entry.planned_bytes, entry.host_bytes)
        if entry.device_bytes > self._memory.capacity:
            largest = sorted(entry.measured.items(), key=lambda item: (-item[1], item[0]))[:5]
            raise RunFailure(
                "RLF5034",
                f"a device of pool `{self._state.pool}` holds {entry.device_bytes} bytes after "
                f"`{entry.instruction}`, and may hold {self._memory.capacity}",
                notes=(
                    f"the plan has {entry.planned_bytes} bytes there",
                    "largest: " + ", ".join(f"{name} {size} ({entry.planned[name]} planned)" for name, size in largest),
                ),
                help=("give the pool a larger `memory`, or more devices",),
            )

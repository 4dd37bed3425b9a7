"""One rank of a pool: holds a device, loads its part, and executes the pool's instruction list."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.checkpoint import (
    Part,
    ahead_part,
    captured,
    load_checkpoint,
    training_part,
    weights_digest,
    write_part,
)
from rlflow.backends.ray_runtime.deliveries import due, save_every
from rlflow.backends.ray_runtime.devices.device import open_device
from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.failures import stage_failed
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.place import PlaceNote
from rlflow.backends.ray_runtime.rank_actor import RankSettings
from rlflow.backends.ray_runtime.reward_worker import RewardPool
from rlflow.backends.ray_runtime.run_logs import doing, logger
from rlflow.backends.ray_runtime.saving.ahead import rest
from rlflow.backends.ray_runtime.saving.writer import Writer
from rlflow.backends.ray_runtime.state import RankState
from rlflow.backends.ray_runtime.streams.session import Streams
from rlflow.backends.ray_runtime.waiting import answer
from rlflow.backends.ray_runtime.world import World
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.imposed_lengths import imposed_lengths
from rlflow.plan import Evaluation, Plan, Program, SaveCheckpoint

WRITE_GRACE_S = 60.0
"""For a checkpoint that is being written when something else fails: the run ends with the report of the failure."""


class Rank:
    """States: new -> join -> load(part)... -> ready -> run -> ended. `request_stop` comes from another thread."""

    def __init__(self, settings: RankSettings, place: PlaceNote) -> None:
        self._settings = settings
        self._place = place
        self._run_dir = Path(settings.run_dir)
        torch.set_num_threads(settings.threads)
        plan = Plan.from_json(settings.plan_json)
        size = settings.pools[settings.pool]
        self._device = open_device(next(pool.device for pool in plan.pools if pool.name == settings.pool))
        self._state = RankState(
            plan, settings.pool, settings.rank, size, Path(settings.base_dir), settings.seed, device=self._device
        )
        if settings.lengths:
            self._state.lengths = imposed_lengths(plan, settings.lengths, settings.seed)
        self._program: Program = plan.program(settings.pool)
        self._stop = threading.Event()
        self._saved_step: int | None = None
        self._writer = Writer()
        self._writing: dist.ProcessGroup | None = None
        """The ranks of this pool, for the threads that write."""
        self._reported = 0
        self._resumed: int | None = None
        self._merged_step: int | None = None
        self._interpreter: Interpreter | None = None
        self._trace = (self._run_dir / "trace" / f"{settings.pool}-{settings.rank}.jsonl").open("a", encoding="utf-8")

    # --- start-up ----------------------------------------------------------------------------------------------------

    def join(self, address: str) -> None:
        """Form the process groups; `address` is host:port of the first rank of all. Tensors on the host go through
        gloo."""
        settings = self._settings
        timeout = timedelta(seconds=settings.deadline_s)
        world = World(settings.pool, settings.rank, settings.pools, timeout)
        world.queues, world.edges, world.control = settings.queues, settings.edges, settings.control
        own = self._device.collective_backend
        world.join(address, own if own == "gloo" else f"cpu:gloo,{self._device.kind}:{own}")
        self._state.join(world)
        if settings.pools[settings.pool] > 1:
            self._writing = world.between(world.ranks(settings.pool), "checkpoints")

    def load(self, part: str) -> None:
        """Load `models`, then `data`."""
        {"models": self._state.load_models, "data": self._state.load_data}[part]()

    def resume(self, step: int) -> None:
        """Go back to the state after `step` steps."""
        load_checkpoint(self._state, self._checkpoints, step)
        self._saved_step = self._resumed = step

    def facts(self) -> dict[str, Any]:
        """What the driver shows and records: steps to run, data fingerprints, model sizes."""
        return {
            "total_steps": self._state.total_steps() if self._state.data or self._state.plan.stop.steps else 0,
            "seed": self._state.seed,
            "data": {name: data.facts() for name, data in self._state.data.items()},
            "parameters": {name: model.parameters for name, model in self._state.models.items()},
        }

    @property
    def _checkpoints(self) -> Path:
        return self._run_dir / "checkpoints"

    # --- the run -----------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """End the run after the step in progress."""
        self._stop.set()

    def run(
        self, done: int, last: int, rewards: dict[str, RewardPool], data: dict[str, str]
    ) -> Iterator[dict[str, Any] | RunFailure]:
        """Steps done + 1 .. last with their evaluations; yields a report after each, at last one with `ended`.

        `last` 0 means the evaluations alone. A failure is yielded, not raised. Ranks other than 0 yield nothing else.
        `data`: fingerprints of the data sets of all pools.
        """
        self._state.rewards = rewards
        self._state.fingerprints = data
        try:
            self._place.begin()
            yield from self._run(done, last)
        except RunFailure as failure:
            self._writer.wait(WRITE_GRACE_S)
            yield failure
        except Exception as error:
            self._writer.wait(WRITE_GRACE_S)
            yield stage_failed("", error)
        finally:
            self._trace.close()
            self._state.close()
            self._state.all.leave()

    def _run(self, done: int, last: int) -> Iterator[dict[str, Any]]:
        streams = Streams(self._state)
        self._interpreter = Interpreter(
            self._state, lambda step: self._save(step, merged=step == last), self._place, streams
        )
        step = done
        saves = save_every(self._state.plan) is not None
        for channel in self._state.channels.values():
            channel.start(done, last, more=saves)
        streams.begin(done, last)
        if done == 0:
            report = self._evaluate(step, list(self._program.evaluations))
            if report is not None:
                yield report
        while step < last:
            self._writer.check()
            if not self._may_begin(step + 1):
                self._sample_ahead(step)
                self._state.drain(step)
                break
            step += 1
            started = time.time()
            metrics = self._metrics()
            self._interpreter.run(self._program.step, step, metrics)
            idle = metrics.whole_step(time.time() - started, self._state.world)
            doing(f"step {step}")
            logger.info("done in %.3f s, idle %s", time.time() - started, idle)
            self._write_events(metrics)
            data = self._reduced(metrics)
            self._write_ahead(step)
            if data is not None:
                yield {"step": step, "data": data, "saved": self._newly_published()}
            if step == last:
                self._sample_ahead(step)
            report = self._evaluate(step, [e for e in self._program.evaluations if due(e, step, last)])
            if report is not None:
                yield report
        streams.finish(step)
        for channel in self._state.channels.values():
            channel.close()
        self._save_last(step)
        self._writer.close()
        if self._settings.rank == 0:
            saved = self._saves and step > 0
            yield {"ended": True, "step": step, "checkpoint": f"checkpoints/global_step_{step}" if saved else ""}

    def _evaluate(self, step: int, evaluations: list[Evaluation]) -> dict[str, Any] | None:
        if not evaluations:
            return None
        assert self._interpreter is not None
        started = time.time()
        out: dict[str, float] = {}
        for evaluation in evaluations:
            metrics = self._metrics(evaluation.name)
            self._interpreter.run(evaluation.instructions, step, metrics)
            data = self._reduced(metrics)
            self._write_events(metrics)
            for name, value in (data or {}).items():
                if name.endswith("/mean") or name.endswith("clip_ratio"):
                    family = "val-aux" if "_length" in name else "val"
                    out[f"{family}/{evaluation.name}/{name}"] = value
        if self._settings.rank != 0:
            return None
        out["timing_s/testing"] = time.time() - started
        return {"step": step, "data": out, "evaluation": True}

    def _metrics(self, evaluation: str = "") -> StepMetrics:
        return StepMetrics(self._state.plan, self._settings.pool, self._settings.rank, evaluation)

    def _reduced(self, metrics: StepMetrics) -> dict[str, float] | None:
        """The metrics over all ranks, on rank 0; None elsewhere."""
        if self._state.group is None:
            return reduce_parts([metrics.parts()])
        gathered: list[Any] | None = [None] * self._state.world if self._settings.rank == 0 else None
        dist.gather_object(metrics.parts(), gathered, group=self._state.group, group_dst=0)
        return None if gathered is None else reduce_parts(gathered)

    def _write_events(self, metrics: StepMetrics) -> None:
        for event in metrics.events:
            self._trace.write(json.dumps(event, sort_keys=True) + "\n")
        self._trace.flush()

    def _may_begin(self, step: int) -> bool:
        """Whether the run goes on with this step: the same answer on all ranks of all pools."""
        control = self._settings.control
        if control is None:
            return not self._agreed_to_stop()
        answer = [self._agreed(control.begin.remote(step)) if self._settings.rank == 0 else None]
        if self._state.group is not None:
            dist.broadcast_object_list(answer, group=self._state.group, group_src=0)
        return bool(answer[0])

    def _agreed(self, ref: Any) -> Any:
        limit = self._settings.deadline_s
        return answer(ref, limit, str(self._state.all), "what the pools agree through (after which step to stop)")

    def _agreed_to_stop(self) -> bool:
        """Whether any rank was asked to stop: all leave after the same step."""
        stop = self._stop.is_set()
        if self._state.group is None:
            return stop
        flag = torch.tensor([int(stop)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._state.group)
        return bool(flag.item())

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def _saves(self) -> bool:
        """Whether this pool trains, so that checkpoints hold what it has trained."""
        return any(isinstance(instruction, SaveCheckpoint) for instruction in self._program.step)

    def _save(self, step: int, merged: bool = False) -> None:
        """Copy what is trained, and write it beside the steps that follow.

        `merged`: with the weights that adapters amount to, for people to take away.
        """
        assert self._interpreter is not None
        self._writer.settle()  # before another copy is made: one at a time is in memory
        residency = self._interpreter.residency
        with contextlib.nullcontext() if residency is None else residency.trained():
            self._refuse_different_ranks(step)
            self._submit(training_part(self._state, step, merged))
            if merged and self._state.has_adapters:
                self._writer.settle()  # merging reads the frozen weights, which may leave the device after this
                self._merged_step = step
        self._saved_step = step

    def _save_last(self, step: int) -> None:
        """The checkpoint after the last step. A run that was stopped did not know before that it was the last: it is
        written again for the merged weights, unless other pools have parts of it."""
        if not self._saves or step == 0:
            return
        lacks_merged = self._state.has_adapters and self._merged_step != step and self._settings.control is None
        if self._saved_step != step or lacks_merged:
            self._save(step, merged=True)

    def _write_ahead(self, step: int, save: bool = False) -> None:
        for kept in self._state.ahead.ended(step, lambda: captured(self._state, step), save):
            self._submit(ahead_part(self._state, kept))

    def _sample_ahead(self, step: int) -> None:
        """The run ends after `step`: make the samples of the steps that follow it, for its checkpoint alone."""
        ahead = self._state.ahead
        if not ahead.stages or step == 0 or self._resumed == step:
            return
        assert self._interpreter is not None
        cursors = dict(self._state.cursors)
        self._write_ahead(step, save=True)
        instructions = rest(self._state.plan, self._settings.pool, ahead.stages)
        for later in range(step + 1, ahead.last(step) + 1):
            self._interpreter.run(instructions, later, self._metrics())
            self._write_ahead(later)
        self._state.cursors.update(cursors)

    def _submit(self, part: Part) -> None:
        """Have a part written. The checkpoint is in its place when all pools have written theirs."""

        control = self._settings.control

        def is_last(step: int) -> bool:
            return control is None or bool(self._agreed(control.saved.remote(step)))

        def write() -> bool:
            return write_part(part, self._checkpoints, self._writing, is_last, self._settings.keep)

        self._writer.submit(part.step, write)

    def _newly_published(self) -> int:
        """The checkpoint that came into its place since the last report; 0 = none."""
        found = self._writer.published
        new = found if found != self._reported else 0
        self._reported = found
        return new

    def _refuse_different_ranks(self, step: int) -> None:
        """With data parallelism all ranks hold the same weights. RLF5006 when they do not."""
        if self._state.group is not None:
            digests: list[str] = [""] * self._state.world
            dist.all_gather_object(digests, weights_digest(self._state), group=self._state.group)
            if len(set(digests)) > 1:
                raise RunFailure(
                    "RLF5006",
                    f"the ranks of pool `{self._settings.pool}` hold different weights after step {step}",
                    notes=tuple(f"rank {rank}: sha256 {digest[:16]}..." for rank, digest in enumerate(digests)),
                )

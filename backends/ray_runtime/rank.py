"""One rank of a pool: holds a device, loads its part, and executes the pool's instruction list."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.checkpoint import load_checkpoint, save_checkpoint, weights_digest
from rlflow.backends.ray_runtime.devices.device import open_device
from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.failures import stage_failed
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.rank_actor import RankSettings
from rlflow.backends.ray_runtime.reward_worker import RewardPool
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Evaluation, Plan, Program


class Rank:
    """States: new -> join -> load(part)... -> ready -> run -> ended. `request_stop` comes from another thread."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._run_dir = Path(settings.run_dir)
        torch.set_num_threads(settings.threads)
        plan = Plan.from_json(settings.plan_json)
        self._device = open_device(next(pool.device for pool in plan.pools if pool.name == settings.pool))
        self._state = RankState(
            plan,
            settings.pool,
            settings.rank,
            settings.world,
            Path(settings.base_dir),
            settings.seed,
            device=self._device,
        )
        self._program: Program = next(p for p in plan.programs if p.pool == settings.pool)
        self._stop = threading.Event()
        self._saved_step: int | None = None
        self._interpreter: Interpreter | None = None
        self._trace = (self._run_dir / "trace" / f"{settings.pool}-{settings.rank}.jsonl").open("a", encoding="utf-8")

    # --- start-up ----------------------------------------------------------------------------------------------------

    def join(self, address: str) -> None:
        """Form the pool's process group; `address` is host:port of rank 0. Tensors on the host go through gloo."""
        own = self._device.collective_backend
        dist.init_process_group(
            own if own == "gloo" else f"cpu:gloo,{self._device.kind}:{own}",
            init_method=f"tcp://{address}",
            rank=self._settings.rank,
            world_size=self._settings.world,
            timeout=timedelta(seconds=self._settings.deadline_s),
        )
        self._state.group = dist.group.WORLD

    def load(self, part: str) -> None:
        """Load `models`, then `data`."""
        {"models": self._state.load_models, "data": self._state.load_data}[part]()

    def resume(self, step: int) -> None:
        """Go back to the state after `step` steps."""
        load_checkpoint(self._state, self._checkpoints, step)
        self._saved_step = step

    def facts(self) -> dict[str, Any]:
        """What the driver shows and records: steps to run, data fingerprints, model sizes."""
        return {
            "total_steps": self._state.total_steps(),
            "seed": self._state.seed,
            "data": {name: data.facts() for name, data in self._state.data.items()},
            "parameters": {
                name: sum(p.numel() for p in model.loaded.model.parameters())
                for name, model in self._state.models.items()
            },
        }

    @property
    def _checkpoints(self) -> Path:
        return self._run_dir / "checkpoints"

    # --- the run -----------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """End the run after the step in progress."""
        self._stop.set()

    def run(self, done: int, last: int, rewards: dict[str, RewardPool]) -> Iterator[dict[str, Any] | RunFailure]:
        """Steps done + 1 .. last with their evaluations; yields a report after each, at last one with `ended`.

        `last` 0 means the evaluations alone. A failure is yielded, not raised. Ranks other than 0 yield nothing else.
        """
        self._state.rewards = rewards
        try:
            yield from self._run(done, last)
        except RunFailure as failure:
            yield failure
        except Exception as error:
            yield stage_failed("", error)
        finally:
            self._trace.close()
            self._state.close()
            if self._state.group is not None:
                dist.destroy_process_group()

    def _run(self, done: int, last: int) -> Iterator[dict[str, Any]]:
        self._interpreter = Interpreter(self._state, self._save)
        step = done
        if done == 0:
            report = self._evaluate(step, list(self._program.evaluations))
            if report is not None:
                yield report
        while step < last and not self._agreed_to_stop():
            step += 1
            started = time.time()
            metrics = self._metrics()
            self._interpreter.run(self._program.step, step, metrics)
            ended = time.time()
            metrics.seconds["step"] = ended - started
            due = [e for e in self._program.evaluations if step == last or (e.every and step % e.every == 0)]
            self._write_events(metrics)
            data = self._reduced(metrics)
            if data is not None:
                data |= self._derived(data, step)
                yield {"step": step, "data": data, "saved": self._saved_step == step}
            report = self._evaluate(step, due)
            if report is not None:
                yield report
        if step > 0 and (self._saved_step != step or self._state.has_adapters):
            self._save(step, merged=True)
        if self._settings.rank == 0:
            yield {"ended": True, "step": step, "checkpoint": f"checkpoints/global_step_{step}" if step else ""}

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
        gathered: list[Any] | None = [None] * self._settings.world if self._settings.rank == 0 else None
        dist.gather_object(metrics.parts(), gathered, dst=0, group=self._state.group)
        return None if gathered is None else reduce_parts(gathered)

    def _derived(self, data: dict[str, float], step: int) -> dict[str, float]:
        seconds = data["timing_s/step"]
        tokens = data.get("perf/total_num_tokens", 0.0)
        return {
            "training/global_step": float(step),
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / self._settings.world,
        }

    def _write_events(self, metrics: StepMetrics) -> None:
        for event in metrics.events:
            self._trace.write(json.dumps(event, sort_keys=True) + "\n")
        self._trace.flush()

    def _agreed_to_stop(self) -> bool:
        """Whether any rank was asked to stop: all leave after the same step."""
        stop = self._stop.is_set()
        if self._state.group is None:
            return stop
        flag = torch.tensor([int(stop)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._state.group)
        return bool(flag.item())

    def _save(self, step: int, merged: bool = False) -> None:
        """Rank 0 writes: with data parallelism all ranks hold the same state, which is checked.

        `merged`: with the weights that adapters amount to, for people to take away.
        """
        if self._state.group is not None:
            digests: list[str] = [""] * self._settings.world
            dist.all_gather_object(digests, weights_digest(self._state), group=self._state.group)
            if len(set(digests)) > 1:
                raise RunFailure(
                    "RLF5006",
                    f"the ranks of pool `{self._settings.pool}` hold different weights after step {step}",
                    notes=tuple(f"rank {rank}: sha256 {digest[:16]}..." for rank, digest in enumerate(digests)),
                )
        if self._settings.rank == 0:
            save_checkpoint(self._state, self._checkpoints, step, merged)
        self._saved_step = step

"""The control plane at one, two and four supernodes: virtual runs of growing plans on this machine.

    python benchmarks/control_plane.py [--speed-up 100] [--steps 5]

The plans are StaleSync's of the headline study (Pangu Ultra MoE, a third of the devices generates, two thirds train,
samples at most a step old), without its trigger and with a batch that grows with the cluster, so that the work of a
supernode stays the same: 768, 1,536 and 3,072 devices, 768 prompts a supernode and step. Rows carry the same share of
their bytes in all plans. Every stage sleeps its estimated time divided by the speed-up; Ray's actors, the queues with a
part from every rank, the run control, the reports and the files are real. What is more than the slept time is the
control plane, on this machine's cores, where a cluster would have hundreds. See README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.headline.cases import Case, plan_of
from rlflow import runs
from rlflow.backends.ray_runtime.virtual.preview import preview_of
from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings
from rlflow.backends.simulator.run import simulate
from rlflow.backends.visualizers.progress import Progress
from rlflow.plan import Plan

SUPERNODES = (1, 2, 4)
PROMPTS = 768
"""A step, per supernode."""
BATCH_BYTES = 4 << 20
"""Of response tokens that rows carry in a step, per supernode."""
WARM_UP = 2
"""Steps that are left out."""
AIM = 0.91


@dataclass(frozen=True)
class Measured:
    """Of one plan. Periods in seconds of this machine."""

    devices: int
    workers: int
    period: float
    slept: float
    """The simulated period divided by the speed-up."""
    spread: tuple[float, float]
    """Shortest and longest step."""
    messages: float
    """A step, on all pools."""
    cpu_s: float
    """Processor seconds a step, of all processes of the run with Ray's own."""
    load: float
    """Mean of the machine's load in the measured steps."""

    @property
    def overhead_ms(self) -> float:
        return (self.period - self.slept) * 1e3


@dataclass
class Watch:
    """Looks every second at what this process and its children have computed."""

    metrics: Path
    seen: list[tuple[int, float, float]] = field(default_factory=list)
    """(steps that have ended, processor seconds, load)"""
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()

    def between(self, first: int, last: int) -> tuple[float, float]:
        """Processor seconds from the end of one step to that of another, and the mean load."""
        inside = [one for one in self.seen if first <= one[0] < last]
        after = next(cpu for steps, cpu, _ in self.seen if steps >= last)
        return after - inside[0][1], statistics.mean(load for _, _, load in inside)

    def _look(self) -> None:
        this, known = psutil.Process(), dict[int, float]()
        while not self._ended.wait(1.0):
            for process in (this, *this.children(recursive=True)):
                try:
                    times = process.cpu_times()
                except psutil.Error:
                    continue
                known[process.pid] = times.user + times.system
            steps = self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0
            self.seen.append((steps, sum(known.values()), os.getloadavg()[0]))


def measure(plan: Plan, supernodes: int, speed_up: float, steps: int) -> Measured:
    """One run in a folder that is thrown away. RunFailure as `runs.execute`."""
    seen = preview_of(plan, VirtualSettings(speed_up=speed_up, batch_bytes=BATCH_BYTES * supernodes))
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        request = runs.RunRequest(plan, Path(folder), run_dir, steps + WARM_UP, virtual=seen)
        with Watch(run_dir / "metrics.jsonl") as watch:
            runs.execute(request, Progress(None, Console(stderr=True, quiet=True)))
        events = list(runs.read_events(run_dir))
        rows = runs.read_metrics(run_dir / "metrics.jsonl")
    ends = sorted(
        (event["start_us"] + event["duration_us"]) / 1e6 / speed_up
        for event in events
        if event["pool"] == "learner" and event["rank"] == 0 and event["kind"] == "publish"
    )
    periods = [after - before for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    cpu, load = watch.between(WARM_UP, WARM_UP + steps)
    sent = [sum(v for name, v in row["data"].items() if name.endswith("/messages")) for row in rows[WARM_UP:]]
    facts = seen.facts
    period = statistics.median(periods)
    return Measured(
        facts["devices"],
        sum(facts["workers"].values()),
        period,
        float(simulate(plan).period) / 1e6 / speed_up,
        (min(periods), max(periods)),
        statistics.mean(sent),
        cpu / steps,
        load,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed-up", type=float, default=100.0, help="default: 100")
    parser.add_argument("--steps", type=int, default=5, help="that are measured; default: 5")
    asked = parser.parse_args()
    found: dict[int, Measured] = {}
    print(
        "supernodes  devices  workers  step       slept      overhead     of the plan's step  messages  processor  "
        "load",
        flush=True,
    )
    for count in SUPERNODES:
        plan = plan_of(Case("stalesync", count, trigger=100, prompts=PROMPTS * count))
        one = found[count] = measure(plan, count, asked.speed_up, asked.steps)
        low, high = one.spread
        print(
            f"{count:<10}  {one.devices:<7}  {one.workers:<7}  {one.period:6.2f} s   {one.slept:6.2f} s   "
            f"{one.overhead_ms:6.0f} ms    {one.overhead_ms / 1e3 / (one.slept * asked.speed_up):18.3%}  "
            f"{one.messages:<8.0f}  {one.cpu_s:6.2f} s   {one.load:4.1f}  (steps {low:.2f} to {high:.2f} s)",
            flush=True,
        )
    for count in SUPERNODES[1:]:
        scaling = found[1].period / found[count].period
        ideal = found[1].slept / found[count].slept
        print(f"scaling efficiency at {count}: {scaling:.3f}, simulated {ideal:.3f}, ratio {scaling / ideal:.3f}")
    most = found[SUPERNODES[-1]]
    reached = found[1].period / most.period
    print(f"aim at {SUPERNODES[-1]}: {AIM}; {'reached' if reached >= AIM else 'not reached'} with {reached:.3f}")
    print(f"against one supernode without any overhead: {found[1].slept / most.period:.3f}")


if __name__ == "__main__":
    main()

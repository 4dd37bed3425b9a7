"""Live progress of a run: a panel that redraws itself on a terminal, else one line per step.

Reads verl's metric names, so anything that logs those can drive it.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlflow.backends.visualizers.flow_metrics import (
    ages,
    held_out,
    idle_shares,
    longest_waits,
    number,
    numbers,
    queue_depths,
    reward_of,
    stage_seconds,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

HISTORY = 40
"""Steps shown in the sparkline."""

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_ETA_STEPS = 20
_STAGES_SHOWN = 8


class Progress:
    """States: new -> start() -> running, phase() and step() in any order -> stop(). Calls outside are harmless.

    `total_steps` None = the run has no known end. Colours and NO_COLOR are the console's business.
    """

    capacities: Mapping[str, int] = {}
    """Queue to the batches that it holds, where known."""
    title = "rlflow"
    """Of the panel."""
    note = ""
    """A line below the panel's others; empty = none."""

    def __init__(self, total_steps: int | None, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self._console = console
        self._clock = clock
        """Seconds; injected by tests."""
        self._live: Live | None = None
        self._blocks = _ASCII if console.options.ascii_only else _BLOCKS
        self._started = clock()
        self._phase = ""
        self._phase_started = self._started
        self._is_stepping = False
        self._step = 0
        self._data: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._held: dict[str, float] = {}
        self._seconds: deque[float] = deque(maxlen=_ETA_STEPS)
        self._step_ended = self._started
        self._checkpoint = ""

    def start(self, phase_text: str, since: float = 0.0) -> None:
        """Begin showing, in the first start-up phase; what is shown began `since` seconds ago."""
        self._step_ended = self._clock()
        self._started = self._step_ended - since
        if self._console.is_terminal and self._live is None:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._panel,
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=sys.stdout.isatty(),  # a piped stdout holds results, which must not land here
            )
            self._live.start()
        self._begin_phase(phase_text)

    @property
    def step_seconds(self) -> float:
        """Of the last step; 0 before it."""
        return self._seconds[-1] if self._seconds else 0.0

    def phase(self, text: str) -> None:
        """The next phase before or between steps, such as `loading models`; the one before it has ended."""
        self._end_phase()
        self._begin_phase(text)

    def step(self, step: int, data: Mapping[str, object]) -> None:
        """Step number `step` (from 1) has ended with these metrics; values that are no numbers are left out. An update
        without a reward and without a step time, such as an evaluation's, only adds its values."""
        now = self._clock()
        held = held_out(data)
        self._held.update(held)
        reward, seconds = reward_of(data), number(data.get("timing_s/step"))
        if reward is None and seconds is None:
            if self._live is None and held:
                self._say("  ".join([f"step {step}", *_held_words(held)]))
            return
        self._end_phase()
        self._is_stepping = True
        self._step, self._data = step, numbers(data)
        self._seconds.append(now - self._step_ended if seconds is None else seconds)
        self._step_ended = now
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
        if self._live is None:
            self._say(self._line())

    def message(self, text: str) -> None:
        """A line that stays, above the panel. Text that starts with `checkpoint` also becomes the last checkpoint."""
        if text.lower().startswith("checkpoint"):
            self._checkpoint = text
        self._say(text)

    def stop(self) -> None:
        """End the showing; the last state of the panel stays on the screen."""
        self._end_phase()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin_phase(self, text: str) -> None:
        self._phase, self._phase_started = text, self._clock()
        if self._live is None and text:
            self._say(f"{text} ...")

    def _end_phase(self) -> None:
        if not self._phase:
            return
        seconds = self._clock() - self._phase_started
        if not self._is_stepping or self._live is None:
            self._say(f"{self._phase}: {duration(seconds)}")
        self._phase = ""

    def _say(self, text: str) -> None:
        """A whole line as it is: no markup, no highlighting, no wrapping."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        data = self._data
        of = f"/{self.total_steps}" if self.total_steps is not None else ""
        words = [f"step {self._step}{of}"]
        reward = reward_of(data)
        if reward is not None:
            words.append(f"reward {reward:.4f}")
        if "response_length/mean" in data:
            words.append(f"length {data['response_length/mean']:.1f} tokens")
        if "perf/throughput" in data:
            words.append(f"{data['perf/throughput']:.0f} tokens/s")
        words.append(f"{self._seconds[-1]:.2f} s")
        stages = stage_seconds(data)
        if stages:
            words.append("(" + ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages) + ")")
        words += _flow_words(data, self.capacities, recorded_only=True)
        words += _held_words(held_out(data))
        return "  ".join(words)

    def _eta(self) -> str:
        if self.total_steps is None or not self._seconds or self._step >= self.total_steps:
            return ""
        return duration((self.total_steps - self._step) * sum(self._seconds) / len(self._seconds))

    def _panel(self) -> RenderableType:
        """Called by rich's refresh thread; reads only, and survives half-made updates because it copies first."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        elapsed = duration(self._clock() - self._started)
        rows: list[RenderableType] = []
        if self._phase:
            since = duration(self._clock() - self._phase_started)
            rows.append(Text.assemble((f"{self._phase} ", "bold"), (since, "dim"), no_wrap=True, overflow="ellipsis"))
        if self._is_stepping:
            head = Table.grid(padding=(0, 2))
            of = f" / {self.total_steps}" if self.total_steps is not None else ""
            cells: list[RenderableType] = [Text(f"step {self._step}{of}", "bold")]
            if self.total_steps:
                cells.append(ProgressBar(self.total_steps, self._step, width=28))
            if self._seconds:
                cells.append(Text(f"{_exact(self._seconds[-1])} a step"))
            head.add_row(*cells)
            eta = self._eta()
            times = Text(f"elapsed {elapsed}" + (f", left about {eta}" if eta else ""), "dim")
            rows += [head, times, self._numbers(), *self._stage_bars(), *self._flow(), *self._footer()]
        if self.note:
            rows.append(Text(self.note, "yellow", no_wrap=True, overflow="ellipsis"))
        return Panel(Group(*rows), title=self.title, title_align="left", border_style="dim")

    def _numbers(self) -> RenderableType:
        from rich.text import Text

        data, rewards, reward = self._data, list(self._rewards), reward_of(self._data)
        text = Text(no_wrap=True, overflow="ellipsis")
        if reward is not None:
            text.append("mean reward ")
            text.append(f"{reward:.4f} ", "bold green" if math.isfinite(reward) else "bold red")
            text.append(sparkline(rewards, self._blocks) if rewards else "", "green")
        if "response_length/mean" in data:
            text.append(f"   {data['response_length/mean']:.1f} tokens per response")
        if "perf/throughput" in data:
            text.append(f"   {data['perf/throughput']:.0f} tokens/s")
        return text

    def _flow(self) -> list[RenderableType]:
        """Idle pools, queues and ages, a line each, where the metrics have them."""
        from rich.text import Text

        words = _flow_words(self._data, self.capacities)
        return [Text(line, no_wrap=True, overflow="ellipsis") for line in words]

    def _stage_bars(self) -> list[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        stages = stage_seconds(self._data)
        if not stages:
            return []
        table = Table.grid(padding=(0, 1))
        longest = max(seconds for _, seconds in stages) or 1.0
        full = "#" if self._blocks == _ASCII else "━"
        for name, seconds in stages[:_STAGES_SHOWN]:
            bar = full * max(round(24 * seconds / longest), int(seconds > 0))
            table.add_row(Text(name), Text(f"{seconds:8.2f} s", "dim"), Text(bar, "blue"))
        return [table]

    def _footer(self) -> list[RenderableType]:
        from rich.text import Text

        words = _held_words(dict(self._held)) + ([self._checkpoint] if self._checkpoint else [])
        return [Text("   ".join(words), "dim", no_wrap=True, overflow="ellipsis")] if words else []


def sparkline(values: Sequence[float], blocks: str = _BLOCKS) -> str:
    """One character per value, from the lowest block for the least to the highest for the greatest."""
    low, high = min(values), max(values)
    if high <= low:
        return blocks[len(blocks) // 2] * len(values)
    return "".join(blocks[min(int((v - low) / (high - low) * len(blocks)), len(blocks) - 1)] for v in values)


def _flow_words(data: Mapping[str, float], capacities: Mapping[str, int], recorded_only: bool = False) -> list[str]:
    """`idle rollout 28%`, `queue samples->learner 1.5 of 2`, `age of samples 0.9, at most 1`; those that there are.

    `recorded_only`: without the share that follows from the stages' times.
    """
    words = []
    idle = [(pool, share) for pool, share in idle_shares(data) if pool or not recorded_only]
    waits = longest_waits(data)
    if idle:
        parts = [f"{pool} {share:.0%}".strip() + (f" ({waits[pool]})" if pool in waits else "") for pool, share in idle]
        words.append("idle " + ", ".join(parts))
    queues = [
        f"{name} {depth:.3g}" + (f" of {capacities[name]}" if name in capacities else "")
        for name, depth in queue_depths(data)
    ]
    if queues:
        words.append("queue " + ", ".join(queues))
    for stage, mean, most in ages(data):
        parts = ([f"{mean:.2f}"] if mean is not None else []) + ([f"at most {most:.0f}"] if most is not None else [])
        words.append(f"age of {stage} {', '.join(parts)}")
    return words


def _held_words(held: Mapping[str, float]) -> list[str]:
    return [f"held out {name} {value:.4f}" for name, value in sorted(held.items())]


def _exact(seconds: float) -> str:
    """As `duration`, with three digits where it is short: steps are compared."""
    return f"{seconds:.3g} s" if 0.001 <= seconds < 60 else duration(seconds)


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 05 s` or `2 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"

"""The weight channels of a plan: which version is published, which a reader has, and which it must have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rlflow.backends.simulator.clock import Clock, Process, Signal, Wait
from rlflow.plan import Channel, Plan, ReshardWeights
from rlflow.plan_decisions import Reshard


@dataclass(slots=True, eq=False)
class WeightBook:
    """Versions by model. Version = number of trainings that are published."""

    plan: Plan
    clock: Clock
    loads: dict[str, list[Callable[[int], None]]] = field(default_factory=lambda: defaultdict(list))
    """Reader to what is told that it has a new version."""
    changed: Signal = field(default_factory=Signal)
    published: dict[str, int] = field(default_factory=dict)
    copies: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Readers to the version of the copy that a `reshard` made for them."""
    _channels: dict[str, Channel] = field(init=False)
    _resharded: set[str] = field(init=False)
    """Readers that get their weights from a `reshard`."""

    def __post_init__(self) -> None:
        self._channels = {channel.model: channel for channel in self.plan.channels}
        lists = [
            listed
            for program in self.plan.programs
            for listed in (program.step, *(evaluation.instructions for evaluation in program.evaluations))
        ]
        self._resharded = {
            reader for listed in lists for i in listed if isinstance(i, ReshardWeights) for reader in i.readers
        }

    def channel(self, model: str) -> Channel | None:
        return self._channels.get(model)

    def reshard(self, readers: tuple[str, ...]) -> Reshard | None:
        """What a `reshard` instruction for these readers moves; None where the plan does not know."""
        return next((reshard for reshard in self.plan.reshards if set(reshard.readers) & set(readers)), None)

    def required(self, model: str, readers: Iterable[str], step: int) -> int:
        """The oldest version that the readers may use in this step.

        A reader `s` steps behind needs version step - s; with a burst g, the first multiple of g from there on, since
        nothing is admitted before.
        """
        channel = self._channels[model]
        stale = {reader.stage: reader for reader in channel.stale}
        needed = 0
        for reader in readers:
            found = stale.get(reader)
            steps, burst = (found.steps, found.burst) if found else (0, 1)
            needed = max(needed, -(-max(0, step - steps) // burst) * burst)
        return needed

    def newest(self, model: str, least: int) -> Process:
        """Sleeps until version `least` or a later one is published."""
        while self.published.get(model, 0) < least:
            yield Wait(self.changed, f"version {least} of {model}")

    def publish(self, model: str, version: int) -> None:
        """The training has ended. Readers of the trained tensors themselves have them at once."""
        self.published[model] = version
        channel = self._channels.get(model)
        if channel is not None:
            self.load([reader for reader in channel.readers if reader not in self._resharded], version)
        self.clock.fire(self.changed)

    def load(self, readers: Iterable[str], version: int) -> None:
        """The readers have the version."""
        for reader in readers:
            for told in self.loads.get(reader, ()):
                told(version)

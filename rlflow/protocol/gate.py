"""The count gate: how many samples may be admitted at the published version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.protocol.batches import BatchSizes
from rlflow.protocol.errors import ProtocolError


@dataclass(slots=True)
class CountGate:
    """Sample number n may be admitted at version v only if n <= (v + bound + 1) * batch (AReaL's gate, 2025).

    n counts the admitted samples that were not rejected. Kept as a window: the samples that hold a credit (admitted,
    not rejected, not part of a published version) are at most the sum of the coming bound + 1 batches, the same for
    constant batches and stays right when batches change or a step takes fewer (trigger with carry-over). So a run
    that resumes at version v without samples starts at `accepted` = v * batch by itself.

    With `burst` g the window only opens fully at versions that are multiples of g: n <= (v // g * g + bound + 1) *
    batch. Places that come back in between (refunds) may be filled at once, else a lost sample could stop the run.
    """

    bound: int
    batches: BatchSizes
    group: int = 1
    """Samples of a group; a group is admitted whole."""
    burst: int = 1
    version: int = 0
    """Published version."""
    held: int = 0
    """Credits out."""

    def __post_init__(self) -> None:
        if self.bound < 0 or self.group < 1 or self.burst < 1 or self.version < 0 or self.held < 0:
            raise ValueError(
                f"bound {self.bound}, version {self.version}, held {self.held} must not be negative, "
                f"group {self.group} and burst {self.burst} must be at least 1"
            )
        for size in self.batches.sizes:
            self._check_batch(size)

    @property
    def live(self) -> bool:
        """Whether every step can get its batch: g <= bound + 1, else no window at v = g - 1 reaches step v."""
        return self.burst <= self.bound + 1

    @property
    def window(self) -> int:
        """Credits in all: the samples of the coming bound + 1 steps."""
        return self.batches.total(self.version, self.version + self.bound)

    @property
    def free(self) -> int:
        """Credits not out. Negative after the bound or the batch was lowered: so many samples may be late, once."""
        return self.window - self.held

    @property
    def accepted(self) -> int:
        """Number of the last admitted sample, the steps before this version counted with whole batches."""
        return self.batches.total(0, self.version - 1) + self.held

    @property
    def capacity(self) -> int:
        """Samples that may be admitted now, in whole groups."""
        open_until = self.version // self.burst * self.burst + self.bound
        room = self.batches.total(self.version, open_until) - self.held
        return max(0, room // self.group * self.group)

    def admit(self, samples: int) -> int:
        """Takes credits for whole groups; the version they are admitted at."""
        if samples < 1 or samples % self.group:
            raise ProtocolError(f"{samples} samples are no whole groups of {self.group}")
        if samples > self.capacity:
            raise ProtocolError(f"{samples} samples at version {self.version}, but only {self.capacity} may enter")
        self.held += samples
        return self.version

    def refund(self, samples: int) -> None:
        """Credits of rejected samples come back at once."""
        if not 0 <= samples <= self.held:
            raise ProtocolError(f"refund of {samples} samples, but {self.held} hold a credit")
        self.held -= samples

    def publish(self, version: int, samples: int, *, rollback: bool = False) -> None:
        """The engines have loaded `version`; the `samples` trained for it return their credits.

        An older or equal version is refused (a restarted trainer that serves old weights) unless `rollback` says so.
        """
        if version < 0 or (version <= self.version and not rollback):
            raise ProtocolError(
                f"version {version} offered, but version {self.version} is published: "
                "an older version is taken only as a declared rollback"
            )
        self.refund(samples)
        self.version = version

    def change_bound(self, bound: int) -> None:
        """From now on. After lowering it, samples already out keep the old bound; none enters until they fit."""
        if bound < 0:
            raise ValueError(f"bound {bound} must not be negative")
        self.bound = bound

    def change_batch(self, batch: int, from_step: int | None = None) -> int:
        """The batch from `from_step` on; the step of the change.

        The default is the first step that no admitted sample can be due at: then every bound holds. A smaller batch
        earlier than that makes samples already out late, once (`free` may be negative).
        """
        self._check_batch(batch)
        start = self.version + self.bound + 1 if from_step is None else from_step
        if start < self.version:
            raise ValueError(f"step {start} is trained: version {self.version} is published")
        self.batches = self.batches.changed(batch, start)
        return start

    def _check_batch(self, batch: int) -> None:
        if batch < 1 or batch % self.group:
            below = batch // self.group * self.group
            near = f"{below} or {below + self.group}" if below else f"{self.group}"
            raise ValueError(f"a batch of {batch} samples is no multiple of the group of {self.group}: take {near}")

    def to_json(self) -> dict[str, Any]:
        return {
            "bound": self.bound,
            "starts": list(self.batches.starts),
            "sizes": list(self.batches.sizes),
            "group": self.group,
            "burst": self.burst,
            "version": self.version,
            "held": self.held,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CountGate:
        rest = {key: value for key, value in data.items() if key not in {"starts", "sizes"}}
        return cls(batches=BatchSizes(tuple(data["starts"]), tuple(data["sizes"])), **rest)

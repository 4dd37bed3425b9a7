"""What the ranks that hold one model together agree on while they sample. One rank alone does not communicate."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.parallel.mesh import Mesh, new_group
from rlflow.diagnostics.diagnostic import RunFailure

Sample: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""As `sampling.Sampler` is called."""


class Replica:
    """Of a mesh with several ranks every rank makes one, at the same time: it has a process group of its own for what
    the controlling threads tell each other."""

    def __init__(self, mesh: Mesh | None, device: torch.device, timeout: timedelta) -> None:
        self.group = None if mesh is None else mesh.replica
        self.first = self.group is None or dist.get_rank(self.group) == 0
        self._device = device
        self._control: dist.ProcessGroup | None = None
        if mesh is not None and self.group is not None:
            self._control = new_group(mesh.members(lambda place: place.dp), "engine control", timeout)

    def follow_first(self) -> None:
        """Go on when the first rank has come here."""
        if self.group is not None:
            dist.broadcast(torch.zeros(1, device=self._device), group=self.group, group_src=0)

    def tell_first(self, number: int) -> int:
        """The first rank's number; called by controlling threads."""
        if self._control is None:
            return number
        told = torch.tensor([number], device=self._device)
        dist.broadcast(told, group=self._control, group_src=0)
        return int(told)

    def same(self, problem: str, version: int, cuts: int) -> int:
        """Whether all ranks can generate with the same weights; the largest `cuts`. RLF5006, on all of them."""
        if self.group is None:
            if problem:
                raise RunFailure("RLF5006", problem)
            return cuts
        found = torch.tensor([bool(problem), version, -version, cuts], dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        bad, newest, oldest, cuts = (int(x) for x in found)
        if bad:
            raise RunFailure("RLF5006", problem or "generate on another rank of the replica is not possible")
        if newest != -oldest:
            raise RunFailure("RLF5006", f"the ranks of a replica have weights of versions {-oldest} to {newest}")
        return cuts

    def sample(
        self, sampler: Sample, logits: torch.Tensor, draws: torch.Tensor | None, signal: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Tokens, log-probs and signal of the first rank, on all ranks. With a signal no tokens are sampled.

        The others do not sample for themselves: not every device sums a distribution in the same order twice.
        """
        if self.group is None:
            if signal:
                return logits, logits, signal
            return *sampler(logits, draws), signal
        rows = len(logits)
        told = torch.zeros(2 * rows + 1, dtype=torch.float64, device=logits.device)
        if self.first:
            told[-1] = signal
            if not signal:
                told[:rows], told[rows:-1] = sampler(logits, draws)
        dist.broadcast(told, group=self.group, group_src=0)
        return told[:rows].long(), told[rows:-1].float(), int(told[-1])

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on the first rank, or raises there; on the others it is not called."""
        if self.group is None:
            return make()
        told: list[Any] = [None, None]
        if self.first:
            try:
                told[0] = make()
            except RunFailure as failure:
                told[1] = failure
            except Exception as error:
                told[1] = RunFailure("RLF5006", f"{type(error).__name__}: {error}")
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        if told[1] is not None:
            raise told[1]
        return told[0]

"""The weights that an engine samples from: where they come from, which version they are, and whether they are there."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from rlflow.backends.ray_runtime.adapters import cast
from rlflow.backends.ray_runtime.engine import Level, Tag, weights_digest
from rlflow.backends.ray_runtime.engine_gate import refused
from rlflow.backends.ray_runtime.engine_memory import WeightMemory
from rlflow.backends.ray_runtime.local_weights import LocalWeights, check_layout, whole_tensors
from rlflow.backends.ray_runtime.merged_adapters import MergedAdapters
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.diagnostics.diagnostic import RunFailure


class EngineWeights:
    """See `RolloutEngine` for whose weights they are; the methods are those of an `Engine`, without its caches."""

    def __init__(self, loaded: LoadedModel, compute: Literal["fp32", "bf16"], mesh: Mesh | None, own: bool) -> None:
        dtype = torch.bfloat16 if compute == "bf16" else torch.float32
        self.version = 0
        self.digest = ""
        """Of the weights with adapters; empty for a model without."""
        if mesh is not None:
            check_layout(mesh)
        model: PreTrainedModel = loaded.model
        if loaded.adapters is not None and own:
            model = loaded.adapters.base
        elif loaded.adapters is not None:
            model = loaded.adapters.merged(dtype)
            self.digest = loaded.adapters.write_merged(model)
        self._local: LocalWeights | None = None
        self._mesh = mesh
        if mesh is not None and mesh.tp is not None:
            self._local = LocalWeights(model, mesh, dtype)
            model = self._local.model
        elif own or (compute == "bf16" and loaded.adapters is None):
            model = cast(copy.deepcopy(model), dtype).requires_grad_(False)
        self.model = model
        self._master = None if own else loaded
        self.loaded = replace(loaded, model=model, adapters=None, critic=None) if own else loaded
        self.tensors = self._local.tensors if self._local is not None else whole_tensors(model)
        """This rank's, live, by canonical name"""
        self._merged: MergedAdapters | None = None
        if loaded.adapters is not None and own:
            self._merged = MergedAdapters(loaded.adapters, mesh, self.tensors)
            self.digest = self._merged.merge()
        self.incoming = self.tensors if self._merged is None else self._merged.tensors
        """What an update writes."""
        others = set() if own else {p.untyped_storage().data_ptr() for p in loaded.model.parameters()}
        beside = [] if self._merged is None else self._merged.memory
        every = (*self.tensors.values(), *model.parameters(), *beside)
        mine = [tensor for tensor in every if tensor.untyped_storage().data_ptr() not in others]
        self.memory = WeightMemory(mine)
        self.shared = len(mine) < len(every)
        """Some of them change without being loaded."""
        self._asleep: set[Tag] = set()
        self._updating: int | None = None
        self._written: set[str] = set()
        self._stale = False
        """They were thrown away."""

    @property
    def problem(self) -> str:
        """Why the engine cannot generate, after "the engine"; empty when it can."""
        if self._asleep:
            return f"is asleep ({' and '.join(sorted(self._asleep, reverse=True))})"
        if self._updating is not None:
            return f"is getting the weights of version {self._updating}"
        return "has no weights since it slept or an update failed" if self._stale else ""

    @property
    def readable(self) -> bool:
        return "weights" not in self._asleep and self._updating is None and not self._stale

    @property
    def changed(self) -> bool:
        """Whether the last update brought other adapters than the one before."""
        return self._merged is not None and self._merged.changed

    def parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] | None:
        """Of an engine that adds adapters to frozen weights of its own: the weights without adapters, the frozen ones
        under adapters, and the sums. None for any other."""
        if self._merged is None:
            return None
        under, sums = self._merged.parts()
        known = {tensor.untyped_storage()._cdata for tensor in sums}
        every = (*self.tensors.values(), *self.model.parameters())
        return [tensor for tensor in every if tensor.untyped_storage()._cdata not in known], under, sums

    # --- new values ------------------------------------------------------------------------------------------------

    def load(self, version: int) -> None:
        if self._master is None:
            raise refused("weights of another pool cannot be loaded here", "they come by begin_update and end_update")
        self._need_memory("load_weights")
        master = self._master
        model: PreTrainedModel = master.model
        if master.adapters is not None:
            model = self.model if self._local is None else master.adapters.merged()
            self.digest = master.adapters.write_merged(model)
        with torch.no_grad():
            if self._local is not None:
                assert self._mesh is not None
                self._local.take(model, self._mesh)
            elif self.model is not model:
                for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                    mine.copy_(theirs)
        self._updating = None
        self.version, self._stale = version, False

    def load_adapters(self, folder: Path) -> None:
        """In an update: those of a checkpoint. ValueError for the adapters of another model."""
        assert self._merged is not None
        self._merged.load(folder)
        self.update(self.incoming)

    def begin_update(self, version: int) -> None:
        self._need_memory("begin_update")
        if version < self.version:
            raise RunFailure(
                "RLF5018",
                f"weights of version {version} were sent to an engine that has version {self.version}",
                help=("send them in the order of their versions",),
            )
        self._updating = version
        self._written = set()

    def update(self, names: Iterable[str]) -> None:
        if self._updating is None:
            raise refused("update outside of an update", "call begin_update first")
        names = set(names)
        unknown = sorted(names - self.incoming.keys())
        if unknown:
            raise RunFailure("RLF5018", f"{len(unknown)} tensors that the engine does not have: {_few(unknown)}")
        self._written |= names

    def end_update(self, digest: str | None) -> None:
        version = self._updating
        if version is None:
            raise refused("end_update outside of an update", "call begin_update first")
        self._updating = None
        self._stale = True
        missing = sorted(self.incoming.keys() - self._written)
        if digest is not None:
            found = weights_digest(self.incoming)
            if found != digest:
                raise RunFailure(
                    "RLF5018",
                    f"the weights of version {version} are not those that were sent",
                    notes=(f"sha256 of what was sent {digest[:16]}..., of what is here {found[:16]}...",),
                )
        elif missing:
            raise RunFailure(
                "RLF5018",
                f"{len(missing)} of {len(self.incoming)} tensors of version {version} were not sent: {_few(missing)}",
            )
        if self._merged is not None:
            self.digest = self._merged.merge()
        self.version, self._stale = version, False

    # --- memory ----------------------------------------------------------------------------------------------------

    def check_sleep(self) -> None:
        if self._asleep or self._updating is not None:
            raise refused(f"sleep while the engine {self.problem}")

    def sleep(self, level: Level) -> None:
        self._asleep = {"weights", "kv"}
        if self.memory.whole:
            # Frozen weights beside adapters are not sent again, so that no level loses them.
            self.memory.give_up(keep=self._merged is not None or (level == 1 and not self._stale))

    def wake(self, tags: set[Tag]) -> None:
        if "kv" in tags and "weights" in self._asleep - tags:
            raise refused("wake of kv before the weights", "wake the weights first")
        if "weights" in tags & self._asleep and not self.memory.held and not self.memory.take_back():
            self._stale = True
        self._asleep -= tags

    def _need_memory(self, what: str) -> None:
        if "weights" in self._asleep:
            raise refused(f"{what} while the weights are asleep", "wake the weights first")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")

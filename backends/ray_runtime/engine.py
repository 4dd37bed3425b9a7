"""What a rollout engine is: the interface that a run talks to, whatever samples behind it.

An engine samples from one model with weights of its own. Between calls it is in a state:

    awake ── sleep(level) ──▶ asleep ── wake("weights") ──▶ weights only ── wake("kv") ──▶ awake
    awake or weights only ── begin_update ──▶ updating ── update ... end_update ──▶ as before, with a new version

`generate` works when it is awake. After `sleep(2)`, which throws the weights away, it works after the next update; so
the order that needs the least memory is wake weights, update, wake kv. `pause` stops a `generate` that another thread
is in at the next token; sleeping and updating are legal then, too.

How the calls map to engines with a server of their own (names as of vLLM 0.33 and vllm-ascend, which share them):

    sleep(1 | 2)               sleep(level): 1 moves the weights to host memory, 2 drops them; both drop the KV cache
    wake("weights"), ("kv")    wake_up(tags=["weights"]), wake_up(tags=["kv_cache"])
    pause("keep" | "abort")    pause_generation(mode): requests stay frozen, or end with what they have
    resume                     resume_generation
    begin_update               start_weight_update, after reset_prefix_cache
    update                     update_weights
    end_update                 finish_weight_update

Where the model lies on several ranks (one replica), every rank makes each of these calls, in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.devices.swap import host_copy
from rlflow.backends.ray_runtime.environment_worker import Environments
from rlflow.ir.ops import Generate

Level: TypeAlias = Literal[1, 2]
Tag: TypeAlias = Literal["weights", "kv"]
PauseMode: TypeAlias = Literal["keep", "abort"]
Ends: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Given uid and number of samples, int64 [samples] each: how many tokens each is to have, int64 [samples]."""
Enough: TypeAlias = Callable[[np.ndarray], bool]
"""Given bool [samples], which samples of the call are complete: whether generation is to stop here."""


class Handover(Protocol):
    """Takes complete samples out of a call of `generate_partial` that goes on with the others."""

    def wanted(self, waiting: np.ndarray) -> bool:
        """Given bool [samples], which are complete and not taken yet, at every token: whether to give them now."""

    def take(self, samples: Batch) -> None:
        """Those, with the columns of `Generated`."""


@dataclass(frozen=True, slots=True)
class Residency:
    """What an engine holds, in bytes, measured on the storages of its tensors.

    Weights that another part of the process owns (the trainer's master weights) are not counted.
    """

    weights: int
    """On the device."""
    host: int
    """Weights that wait in host memory."""
    kv: int
    """Keys and values, on the device."""


@dataclass(frozen=True)
class Generated:
    """Samples of `generate_partial`. The columns are those of `generate`, and `step` int64: of the sample's draws.

    An unfinished sample has the tokens made so far, none perhaps; the column `truncated` is False for it. Given back as
    `begun` it goes on with the next token of its own random stream.
    """

    finished: Batch
    unfinished: Batch

    def by_group(self) -> Generated:
        """The same samples, with those of incomplete groups (uid, step) among the unfinished, be they complete or not.

        A complete sample may be given back as `begun` like any other; it comes out as it went in.
        """
        open_groups = set(_groups(self.unfinished))
        held = np.array([group in open_groups for group in _groups(self.finished)], dtype=bool)
        if not held.any():
            return self
        waiting = self.finished.select(np.nonzero(held)[0])
        return Generated(self.finished.select(np.nonzero(~held)[0]), Batch.concat([self.unfinished, waiting]))


def _groups(samples: Batch) -> list[tuple[int, int]]:
    return list(zip(samples.array("uid").tolist(), samples.array("step").tolist(), strict=True))


class Engine(Protocol):
    """See the module's text. RunFailure RLF5006 for a call that the engine's state does not allow."""

    version: int
    """Of the weights that it samples from."""

    def generate(
        self,
        prompts: Batch,
        op: Generate,
        *,
        seed: int,
        step: int,
        version: int | None = None,
        environments: Environments | None = None,
        ends: Ends | None = None,
    ) -> Batch:
        """`op.n` complete samples per prompt. While the engine is paused it waits.

        `ends`, for benchmarks: when a sample ends, instead of when the model says so. Its last token is the end token,
        with the log-probability that the model gives it, and none comes before; one of `op.max_new` tokens or more is
        truncated.

        Columns as batch.py has them; `version` is the oldest version that made a token of the sample, `versions` by row
        the versions that made its tokens, a tuple of `rlflow.protocol.samples.Segment` in the order of the tokens.
        """

    def generate_partial(
        self,
        prompts: Batch,
        op: Generate,
        *,
        seed: int,
        step: int,
        begun: Batch | None = None,
        enough: Enough | None = None,
        ends: Ends | None = None,
        handover: Handover | None = None,
    ) -> Generated:
        """As `generate`, but it ends as soon as `enough` says so or `pause("abort")` is called, with what there is.

        What `handover` took before is not in the result. On the ranks of a replica all or none have one.

        `begun` are unfinished samples of an earlier call, with the same `op`. They come first, in decoding and in the
        result, and keep the draws of the step that began them. `step` numbers the draws of the others.
        """

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop a `generate` of another thread at its next token, and let none begin; returns when it has stopped.

        `keep`: it waits for `resume` with all that it has. If weights or cache were changed meanwhile it reads prompts
        and responses anew, and goes on with the new weights. `abort`: `generate_partial` returns, `generate` fails.
        """

    def resume(self) -> None:
        """End a pause."""

    def sleep(self, level: Level) -> Residency:
        """Free the KV cache, and the weights: 1 keeps them in host memory, 2 does not. Weights that are shared with
        another part of the process stay. Returns what is still held."""

    def wake(self, tags: Iterable[Tag] = ("weights", "kv")) -> Residency:
        """Take the memory back, `weights` first. Returns what is held then."""

    def residency(self) -> Residency:
        """What is held now."""

    def local_tensors(self) -> Mapping[str, torch.Tensor]:
        """This rank's part of the weights, live, under the names and in the shapes of `rlflow.reshard.shards.Sharding`
        (canonical names, padding included)."""

    def incoming(self) -> Mapping[str, torch.Tensor]:
        """What is written between `begin_update` and `end_update`: `local_tensors`, or of a model with adapters these
        alone, which `end_update` adds to the frozen weights."""

    def begin_update(self, version: int) -> None:
        """The weights are about to be written: drop the caches made with the old ones, allow no generation."""

    def update(self, names: Iterable[str]) -> None:
        """These of `incoming` have been written. RLF5018 for a name that is none of them."""

    def end_update(self, digest: str | None = None) -> None:
        """All have been written: the engine has the new version from here on.

        `digest`: what `weights_digest` gives for the tensors as they were sent. RLF5018 when it is another one here, or
        without it when `update` did not name every tensor; the engine then still waits for weights.
        """


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 (hex) of tensors, in the order of their names: of each its name, type, shape and row-major bytes.

    Both sides of a transfer call it: the sender on what a rank should hold, the engine on its `incoming`.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = host_copy(tensors[name])
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

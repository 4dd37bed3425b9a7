"""The embedded rollout engine: sampling from a transformers model without a server. See engine.py for its interface.

A group's prompt is prefilled once and its cache repeated n times; finished rows leave the cache as decoding goes on;
every sample has its own random stream.

What is promised in float32: the tokens of a sample depend on weights, prompt, (seed, step, uid, sample) and the
sampling parameters. They depend on the samples beside it, on waves, compaction, pauses, tp and ep only by rounding:
sums are taken in another order, logits differ in their last bits, and a draw that lies within this difference of the
border between two tokens may take the other one. With float32 that is a share of about 1e-6 of the tokens, with bf16 of
1e-2. The ranks of one replica never differ: all take what the first one sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.conversation import Conversations, decode_text
from rlflow.backends.ray_runtime.decoder import make_decoder
from rlflow.backends.ray_runtime.engine import (
    Ends,
    Enough,
    Generated,
    Handover,
    Level,
    PauseMode,
    Residency,
    Tag,
)
from rlflow.backends.ray_runtime.engine_gate import Gate, refused
from rlflow.backends.ray_runtime.engine_weights import EngineWeights
from rlflow.backends.ray_runtime.environment_worker import Environments
from rlflow.backends.ray_runtime.generation import Generation, Work
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.replica import Replica
from rlflow.backends.ray_runtime.sampling import Sampler, response_lengths
from rlflow.backends.ray_runtime.spells import no_spells
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate
from rlflow.protocol.samples import Segment

__all__ = ["RolloutEngine", "Sampler", "response_lengths"]

_MAX_ROWS = 256
"""Samples decoded together; bounds the cache of a large batch."""
_COMPACT_SHARE = 8
"""Finished rows are dropped when they are at least one in this many: dropping copies the cache once."""


class RolloutEngine:
    """Samples from `loaded`; an `Engine`.

    On one rank with compute "fp32" it reads the master weights themselves, so it is never out of date. With "bf16", on
    a mesh with tp > 1, and with `own` (the weights come from another pool) it holds weights of its own, which
    `load_weights` or an update renews. With `own` nothing of `loaded.model` is kept. Of a model with adapters it holds
    the weights with the adapters added, and shares the others with the trainer where it can; with `own` an update
    brings adapters, and the frozen weights stay in float32 beside what they are added up to.

    A model is whole when its engine is made, so before a trainer cuts it. All ranks of the mesh make their
    engines together. A thread of the rank waits at most `wait_seconds` for the other, in a pause or for one.

    RunFailure RLF4003 for a layout or a model that it cannot sample from in parts.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        compute: Literal["fp32", "bf16"],
        mesh: Mesh | None = None,
        *,
        own: bool = False,
        wait_seconds: float = 600.0,
    ) -> None:
        self._weights = EngineWeights(loaded, compute, mesh, own)
        self.loaded = self._weights.loaded
        self._model = self._weights.model
        self._decoder = make_decoder(self._model)
        self._released = False
        self._replica = Replica(mesh, self._model.device, timedelta(seconds=wait_seconds))
        self._gate = Gate(self._replica, wait_seconds)
        self.cache_limit_bytes: int | None = None
        """What keys and values may take: fewer samples are decoded at once where they would take more, at least one."""
        self.spells = no_spells()
        """What its time went to; who reads it empties it."""

    # --- weights ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def digest(self) -> str:
        """Of the weights with adapters that it samples from; empty for a model without."""
        return self._weights.digest

    def load_weights(self, version: int) -> None:
        """Take over the master weights, in place, as `version`. RLF5006 where they are not on this rank."""
        with self._gate.exclusive("load_weights"):
            self._weights.load(version)
            self._renewed()

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._weights.tensors)

    def incoming(self) -> dict[str, torch.Tensor]:
        return dict(self._weights.incoming)

    @property
    def changed(self) -> bool:
        """Whether the last update brought other adapters than the one before."""
        return self._weights.changed

    def load_adapters(self, folder: Path, version: int) -> None:
        """One update: to the adapters that a checkpoint has in a model's folder. ValueError for another model's."""
        self.begin_update(version)
        self._weights.load_adapters(folder)
        self.end_update()

    def begin_update(self, version: int) -> None:
        with self._gate.exclusive("begin_update"):
            self._weights.begin_update(version)
            self._drop_caches()
            self._decoder.drop_weights()

    def update(self, names: Iterable[str]) -> None:
        self._weights.update(names)

    def end_update(self, digest: str | None = None) -> None:
        self._weights.end_update(digest)
        self._renewed()

    def _renewed(self) -> None:
        self._drop_caches()
        self._decoder.refresh()

    def _drop_caches(self) -> None:
        self._decoder.drop()
        self._gate.cuts += 1

    # --- memory ----------------------------------------------------------------------------------------------------

    def sleep(self, level: Level) -> Residency:
        with self._gate.exclusive("sleep"):
            self._weights.check_sleep()
            self._drop_caches()
            self._decoder.drop_weights()
            self._weights.sleep(level)
        return self.residency()

    def wake(self, tags: Iterable[Tag] = ("weights", "kv")) -> Residency:
        with self._gate.exclusive("wake"):
            before = self._weights.readable
            self._weights.wake(set(tags))
            if self._weights.readable and not before:
                self._decoder.refresh()
        return self.residency()

    def residency(self) -> Residency:
        memory, decoder = self._weights.memory, self._decoder
        return Residency(memory.device_bytes + decoder.copied_bytes(), memory.host_bytes, decoder.cache_bytes())

    def own_bytes(self, awake: bool = False) -> int:
        """Bytes of weights that nothing else in the process holds: on the device now, or when `awake`."""
        memory = self._weights.memory
        return memory.whole if awake else memory.device_bytes

    def parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] | None:
        """Of an engine that adds adapters to frozen weights of its own: the weights without adapters, the frozen ones
        under adapters, and the sums, which an update writes. None for any other."""
        return self._weights.parts()

    @property
    def cache_peak_bytes(self) -> int:
        """The most that keys and values took in the last call of generate."""
        return self._decoder.cache_peak

    def release(self) -> None:
        """Free what generation left for the next call: caches, and copies of weights that make it faster."""
        with self._gate.exclusive("release"):
            self._drop_caches()
            self._decoder.drop_weights()
            self._released = True

    # --- pausing ---------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep") -> None:
        self._gate.pause(mode)

    def resume(self) -> None:
        self._gate.resume()

    def _resumed(self, signal: int) -> tuple[int, bool]:
        """See `generation.Resume`."""
        before = self._gate.cuts
        self._gate.hold(signal)
        return self.version, self._agree(before) > before

    def _agree(self, cuts: int) -> int:
        problem = self._weights.problem
        message = f"generate while the engine {problem}" if problem else ""
        return self._replica.same(message, self.version, self._gate.cuts - cuts) + cuts

    # --- sampling --------------------------------------------------------------------------------------------------

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
        """`op.n` samples per prompt, prompt by prompt: the columns of a samples batch (see batch.py).

        `logprobs` are those of the sampled tokens under softmax(logits / temperature) over the whole vocabulary, that
        is before top-k and top-p cut it, and ids without a token leave it; at temperature 0 (greedy) they are taken at
        temperature 1. Two generate
        stages on the same prompts of one step draw the same numbers unless their seeds differ. `version`: of the
        weights that it has now, if not the engine's.

        Of prompts with a share only the share's samples are made; `group` then counts over the whole step.

        With `op.environment` the samples are conversations with `environments` (see conversation.py) and have two more
        columns, `mask` and `turns`.

        RunFailure: RLF5007 a prompt with `op.max_new` does not fit the context, RLF5002 an empty prompt, RLF5017 a
        failing environment, RLF5006 an engine that is asleep, in an update, or is paused with `abort` meanwhile.
        """
        present = op.environment is None or environments is not None or not self._replica.first
        assert ends is None or op.environment is None, "an environment ends its samples itself"
        assert present, f"generate needs the environment `{op.environment}`"
        first, own = own_samples(prompts, op.n)
        work = self._work(prompts, op, step)
        with self._call():
            run = self._generation(work, op, seed, version, ends=ends)
            talks: Conversations | None = None
            rows = np.arange(own.start, own.stop, dtype=np.int64)
            if op.environment is not None:
                talks = Conversations(self._decoder, self.loaded, op, environments, prompts, run, self._replica)
            with torch.inference_mode():
                most = self._rows_at_once(work, op)
                if talks is None:
                    run.run(rows, most, _COMPACT_SHARE)
                else:
                    talks.run(rows, most, _COMPACT_SHARE)
        if run.stopped:
            raise RunFailure("RLF5006", "generate was aborted", help=("generate_partial gives what there is",))
        samples = self._samples(prompts, op, run, rows, talks)
        return samples.with_columns(group=first + samples.array("group"))

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
        if op.environment is not None:
            raise RunFailure(
                "RLF4003",
                "multi-turn samples cannot be left unfinished",
                notes=(f"the environment `{op.environment}` would have to keep their conversations",),
                help=("use a trigger at 100%",),
            )
        begun = begun if begun is not None and begun.rows else None
        _, own = own_samples(prompts, op.n)
        before = 0 if begun is None else begun.rows
        rows = np.concatenate([np.arange(before), before + np.arange(own.start, own.stop)]).astype(np.int64)
        given = np.zeros(before + prompts.rows * op.n, dtype=bool)

        def taken(which: np.ndarray) -> Batch:
            return self._samples(prompts, op, run, which, None, begun).with_columns(step=run.work.step[which])

        def wanted(complete: np.ndarray) -> bool:
            return handover is not None and handover.wanted(complete & ~given)

        def give() -> None:
            new = rows[run.complete[rows] & ~given[rows]]
            given[new] = True
            if handover is not None:
                handover.take(taken(new))

        with self._call():
            work = self._work(prompts, op, step, begun)
            run = self._generation(work, op, seed, None, enough, ends, None if handover is None else wanted, give)
            with torch.inference_mode():
                run.run(rows[~run.complete[rows]], self._rows_at_once(work, op), _COMPACT_SHARE)
        rows = rows[~given[rows]]
        samples = taken(rows)
        lengths, open_ = run.lengths()
        complete = (~open_ | (lengths == op.max_new))[torch.from_numpy(rows)].numpy()
        return Generated(samples.select(np.nonzero(complete)[0]), samples.select(np.nonzero(~complete)[0]))

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Around one call of generate."""
        with self._gate.call():
            self._agree(self._gate.cuts)
            if self._weights.shared or self._released:
                self._decoder.refresh()
                self._released = False
            self._decoder.cache_peak = 0
            try:
                yield
            finally:
                self._decoder.drop()

    def _generation(
        self,
        work: Work,
        op: Generate,
        seed: int,
        version: int | None,
        enough: Enough | None = None,
        ends: Ends | None = None,
        wanted: Enough | None = None,
        give: Callable[[], None] = lambda: None,
    ) -> Generation:
        return Generation(
            self._decoder,
            self.loaded,
            op,
            work,
            device=self._model.device,
            seed=seed,
            version=self.version if version is None else version,
            loaded_version=self.version,
            gate=self._gate,
            replica=self._replica,
            resume=self._resumed,
            enough=enough,
            wanted=wanted,
            give=give,
            ends=ends,
            spells=self.spells,
        )

    def _rows_at_once(self, work: Work, op: Generate) -> int:
        """Samples that are decoded together: as many as the cache may hold at full length."""
        if self.cache_limit_bytes is None or not work.prompts:
            return _MAX_ROWS
        config = self._model.config
        heads = int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        number = 2 * int(config.num_hidden_layers) * kv_heads * size * int(self._model.dtype.itemsize)
        longest = max(len(prompt) for prompt in work.prompts) + op.max_new
        return min(_MAX_ROWS, max(1, self.cache_limit_bytes // (number * longest)))

    def _work(self, prompts: Batch, op: Generate, step: int, begun: Batch | None = None) -> Work:
        """Samples of `begun`, then `op.n` of every prompt, be they this rank's or not."""
        ids = [row.numpy() for row in _rows(prompts.packed("prompt_ids"))]
        uids = prompts.array("uid")
        self._check_lengths(ids, uids, op.max_new)
        prompt, sample = np.divmod(np.arange(prompts.rows * op.n, dtype=np.int64), op.n)
        uid, steps = uids[prompt], np.full(len(prompt), step, dtype=np.int64)
        if begun is None:
            return Work(ids, prompt, uid, sample, steps, {}, {})
        old = [row.numpy() for row in _rows(begun.packed("prompt_ids"))]
        self._check_lengths(old, begun.array("uid"), op.max_new)
        responses, logprobs = (_rows(begun.packed(name)) for name in ("response_ids", "logprobs"))
        longest = max(len(row) for row in responses)
        if longest > op.max_new:
            raise refused(f"a begun sample has {longest} tokens, and max_new is {op.max_new}")
        return Work(
            [*old, *ids],
            np.concatenate([np.arange(len(old)), len(old) + prompt]),
            np.concatenate([begun.array("uid"), uid]),
            np.concatenate([begun.array("sample"), sample]),
            np.concatenate([begun.array("step"), steps]),
            dict(enumerate(responses)),
            dict(enumerate(logprobs)),
        )

    def _samples(
        self,
        prompts: Batch,
        op: Generate,
        run: Generation,
        rows: np.ndarray,
        talks: Conversations | None,
        begun: Batch | None = None,
    ) -> Batch:
        """The samples numbered `rows`, in their order, as a batch; `group` counts those of `begun` first."""
        mine = torch.from_numpy(rows)
        tokens, logprobs = run.tokens[mine], run.logprobs[mine]
        if talks is None:
            lengths, open_ = (column[mine] for column in run.lengths())
            truncated = open_ & (lengths == op.max_new)
        else:
            lengths, truncated = talks.lengths[mine], talks.truncated[mine]
        kept = torch.arange(op.max_new) < lengths[:, None]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        responses = Packed(tokens[kept], offsets)
        given: list[tuple[Segment, ...]] = [] if begun is None else begun.items("versions")
        before = len(given)
        old, new = rows[rows < before], rows[rows >= before] - before
        samples, groups = prompts.select(new // op.n), new // op.n
        if begun is not None:
            numbers: dict[tuple[int, int], int] = {}
            pairs = zip(begun.array("uid").tolist(), begun.array("step").tolist(), strict=True)
            of_begun = np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs], dtype=np.int64)
            groups = np.concatenate([of_begun[old], len(numbers) + groups])
            carried = Batch(before, {name: begun.columns[name] for name in prompts.columns}).select(old)
            samples = Batch.concat([carried, replace(samples, share=None)])
        if talks is not None:
            samples = samples.with_columns(
                mask=Packed(talks.mask[mine][kept], offsets), turns=talks.turns[mine].numpy()
            )
        versions = [
            run.segments(row, length, given[row] if row < before else ())
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        return samples.with_columns(
            group=groups,
            sample=run.work.sample[rows],
            response_ids=responses,
            logprobs=Packed(logprobs[kept], offsets),
            text=decode_text(self.loaded.tokenizer, responses),
            truncated=truncated.numpy(),
            version=np.array(
                [min((part.version for part in parts), default=run.version) for parts in versions], dtype=np.int64
            ),
            versions=versions,
        )

    def _check_lengths(self, ids: list[np.ndarray], uids: np.ndarray, max_new: int) -> None:
        for row, uid in zip(ids, uids, strict=True):
            if not len(row):
                raise RunFailure("RLF5002", f"prompt {uid} has no tokens")
            if len(row) + max_new > self.loaded.context:
                raise RunFailure(
                    "RLF5007",
                    f"prompt {uid} has {len(row)} tokens; with max_new = {max_new} that is {len(row) + max_new}, "
                    f"and the model's context is {self.loaded.context} tokens",
                    help=(f"lower max_new to {self.loaded.context - len(row)} or drop prompts this long",)
                    if len(row) < self.loaded.context
                    else ("drop prompts this long",),
                )


def own_samples(prompts: Batch, n: int) -> tuple[int, range]:
    """The first prompt's number in the whole step, and which of the prompts' samples (prompt by prompt, `n` each, from
    0 on) are this rank's: all, unless the prompts have a share."""
    share = prompts.share
    if share is None:
        return 0, range(prompts.rows * n)
    first, whole = share.touched.start, share.samples(n)
    return first, range(whole.start - first * n, whole.stop - first * n)


def _rows(packed: Packed) -> list[torch.Tensor]:
    return [packed.row(index) for index in range(packed.rows)]

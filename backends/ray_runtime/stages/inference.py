"""Stages that run a model without training it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.forward import sequence_scores
from rlflow.backends.ray_runtime.packing import Sequences
from rlflow.backends.ray_runtime.rollout import own_samples
from rlflow.backends.ray_runtime.stages.call import Call, token_count
from rlflow.backends.ray_runtime.stages.replicas import Together, together
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate, Logprobs, ModelScore, Values

EVALUATION_STEP_OFFSET = 1 << 40
"""Added to the step in an evaluation's random streams, so that they share no draw with training."""
_BUDGET = 16384
"""Padded tokens of one forward of a reward model."""


def generate(call: Call, op: Generate) -> Batch:
    model = call.model(op.model)
    assert model.engine is not None
    stream = call.step if call.stage.phase == "step" else call.step + EVALUATION_STEP_OFFSET
    prompts = call.batch("prompts")
    environments = None if op.environment is None else call.state.environments[op.environment]
    engine = model.engine

    def make() -> Batch:
        replica = together(model.engine_mesh, prompts)
        made = engine.generate(
            replica.rows(),
            op,
            seed=call.state.seed,
            step=stream,
            version=model.version,
            environments=environments,
            ends=call.state.ends(call.stage.id),
        )
        return _own_samples(replica, made, op.n) if len(replica.parts) > 1 else made

    samples = call.state.ahead.samples(call.stage.id, call.step, prompts, op.n, make)
    _, own = own_samples(prompts, op.n)
    if samples.rows != len(own):
        raise RunFailure(
            "RLF5006",
            f"generate gave {samples.rows} samples, not {len(own)} of {prompts.rows} prompts x {op.n}",
        )
    call.metrics.samples(samples, call.stage.id)
    call.metrics.spells(engine.spells)
    call.tokens = token_count(samples)
    return samples


def _own_samples(replica: Together, samples: Batch, n: int) -> Batch:
    """Of a replica's samples those of this rank's prompts, with groups numbered as this rank numbers them."""
    batches = [part[0] for part in replica.parts]
    counts = [len(own_samples(prompts, n)[1]) for prompts in batches]
    first = sum(counts[: replica.place])
    own = samples.select(range(first, first + counts[replica.place]))
    share = batches[replica.place].share
    if share is None:
        before = sum(prompts.rows for prompts in batches[: replica.place])
        own = own.with_columns(group=own.array("group") - before)
    return Batch(own.rows, own.columns, share)


def logprobs(call: Call, op: Logprobs) -> Packed:
    return _predict(call, op.model, lambda trainer, samples: trainer.logprobs(samples, op.temperature))


def _predict(call: Call, name: str, predict: Callable[[Trainer, Batch], Packed]) -> Packed:
    """What a model says about every response token of this rank's samples."""
    model = call.model(name)
    assert model.trainer is not None
    samples = call.batch("samples")
    call.tokens = token_count(samples)
    replica = together(model.mesh, samples)
    found = replica.own(predict(model.trainer, replica.rows()), [part[0].rows for part in replica.parts])
    assert isinstance(found, Packed)
    return found


def values(call: Call, op: Values) -> Packed:
    found = _predict(call, op.model, lambda trainer, samples: trainer.values(samples))
    _refuse_not_finite(found.values, f"a value of `{op.model}`")
    return found


def model_score(call: Call, op: ModelScore) -> np.ndarray:
    """The reward model's output at the last token of prompt and response, float32 [samples].

    The very last one, an end token included, whether or not the checkpoint pads with it.
    """
    model = call.model(op.model)
    samples = call.batch("samples")
    if model.mesh is not None:
        raise RunFailure(
            "RLF4003", f"the reward model `{op.model}` runs whole on every rank", help=("place it with tp = 1, pp = 1",)
        )
    call.tokens = token_count(samples)
    sequences = Sequences(samples, model.loaded.pad_id)
    if samples.rows and int(sequences.lengths.max()) > model.loaded.context:
        raise RunFailure(
            "RLF5007",
            f"a sample has {int(sequences.lengths.max())} tokens, and the context of the reward model `{op.model}` is "
            f"{model.loaded.context} tokens",
        )
    out = np.zeros(samples.rows, dtype=np.float32)
    for rows, ids, last in sequences.rectangles(_BUDGET):
        with torch.no_grad():
            out[rows] = sequence_scores(model.loaded.model, model.compute, ids, last).cpu().numpy()
    _refuse_not_finite(torch.from_numpy(out), f"a score of `{op.model}`")
    call.metrics.scores(call.stage.id, out)
    return out


def _refuse_not_finite(numbers: torch.Tensor, what: str) -> None:
    """NaN means "not applicable" from here on, so a model must not make one."""
    bad = ~torch.isfinite(numbers)
    if bad.any():
        raise RunFailure("RLF5009", f"{what} is {float(numbers[bad][0])}")

"""Stages that run a model without training it."""

from __future__ import annotations

import numpy as np
import torch

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.forward import sequence_scores
from rlflow.backends.ray_runtime.packing import Sequences
from rlflow.backends.ray_runtime.rollout import own_samples
from rlflow.backends.ray_runtime.stages.call import Call, token_count
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
    samples = model.engine.generate(
        prompts, op, seed=call.state.seed, step=stream, version=model.version, environments=environments
    )
    _, own = own_samples(prompts, op.n)
    if samples.rows != len(own):
        raise RunFailure(
            "RLF5006",
            f"generate gave {samples.rows} samples, not {len(own)} of {prompts.rows} prompts x {op.n}",
        )
    call.metrics.samples(samples, call.stage.id)
    call.tokens = token_count(samples)
    return samples


def logprobs(call: Call, op: Logprobs) -> Packed:
    trainer = call.model(op.model).trainer
    assert trainer is not None
    call.tokens = token_count(call.batch("samples"))
    return trainer.logprobs(call.batch("samples"), op.temperature)


def values(call: Call, op: Values) -> Packed:
    trainer = call.model(op.model).trainer
    assert trainer is not None
    call.tokens = token_count(call.batch("samples"))
    found = trainer.values(call.batch("samples"))
    _refuse_not_finite(found.values, f"a value of `{op.model}`")
    return found


def model_score(call: Call, op: ModelScore) -> np.ndarray:
    """The reward model's output at the last token of prompt and response, float32 [samples].

    The very last one, an end token included, whether or not the checkpoint pads with it.
    """
    model = call.model(op.model)
    samples = call.batch("samples")
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

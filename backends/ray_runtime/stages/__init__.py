"""How each kind of op is executed: one handler per kind, looked up by the interpreter. A handler decides nothing."""

from __future__ import annotations

from rlflow.backends.ray_runtime.stages import advantages, columns, inference, scores, selection, training
from rlflow.backends.ray_runtime.stages.call import Handlers

RUN: Handlers = {
    "generate": inference.generate,
    "logprobs": inference.logprobs,
    "values": inference.values,
    "model_score": inference.model_score,
    "score": scores.start_score,
    "combine": columns.combine,
    "field": columns.field_of,
    "kl_reward": columns.kl_reward,
    "overlong": columns.overlong,
    "group_normalize": advantages.group_normalize,
    "rloo": advantages.rloo,
    "reinforce_pp": advantages.reinforce_pp,
    "remax": advantages.remax,
    "gae": advantages.gae,
    "best_of": selection.best_of,
    "best_worst": selection.best_worst,
    "mixed_groups": selection.mixed_groups,
    "train": training.train,
}
"""What `run` does, by the op's kind."""

WAIT: Handlers = {"score": scores.collect_score}
"""What `wait` does for ops whose `run` only starts them."""

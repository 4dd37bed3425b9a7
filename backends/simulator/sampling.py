"""Requests of a step with drawn lengths."""

from __future__ import annotations

from rlflow.backends.simulator.engine_messages import Request
from rlflow.cost.draws import LengthSampler
from rlflow.cost.errors import WorkloadError


def sampled_requests(
    prompts: LengthSampler, responses: LengthSampler, step: int, count: int, samples: int = 1
) -> list[Request]:
    """The requests of a step in the order of prompts. Their ids are (step, prompt, sample), groups (step, prompt)."""
    if prompts.seed == responses.seed and prompts.stream == responses.stream:
        raise WorkloadError("prompts and responses need streams of different names")
    requests = []
    for prompt in range(count):
        length = prompts.tokens(step, prompt)
        for sample, tokens in enumerate(responses.group(step, prompt, samples)):
            requests.append(Request((step, prompt, sample), length, tokens, (step, prompt)))
    return requests

"""Pauses in the middle of conversations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate
from tests.unit.ray_runtime import rollout_jobs as jobs
from tests.unit.ray_runtime.test_multi_turn import TEXTS, Answers, by_length, column, make, prompts, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["qwen3", "llama", "gpt2"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    return make(request.param, tmp_path)


@pytest.mark.parametrize("step", [1, 3, 8, 20])
@pytest.mark.parametrize("new_weights", [False, True])
def test_a_pause_in_a_conversation(loaded: LoadedModel, step: int, new_weights: bool) -> None:
    """All caches are dropped meanwhile, also those of conversations that wait for their environment."""
    kind = loaded.model.config.model_type
    if new_weights and kind == "gpt2":
        pytest.skip("there is one GPT-2 only")
    other = tiny(kind, init_seed=1) if new_weights else loaded
    op = Generate(model="actor", environment="game", n=4, max_new=60, turns=5)
    batch = prompts(loaded, TEXTS)
    engine = RolloutEngine(loaded, "fp32", own=True, wait_seconds=20)
    expected = engine.generate(batch, op, seed=3, step=5, environments=Answers(by_length))
    reached = jobs.stop_at_step(engine, step)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(engine.generate, batch, op, seed=3, step=5, environments=Answers(by_length))
        assert reached.wait(30)
        engine.pause()
        engine.begin_update(1)
        if new_weights:
            for name, tensor in RolloutEngine(other, "fp32", own=True).local_tensors().items():
                engine.local_tensors()[name].copy_(tensor)
        engine.update(engine.local_tensors())
        engine.end_update()
        engine.resume()
        samples = future.result(60)
    if not new_weights:
        for name in ("response_ids", "mask"):
            assert column(samples, name) == column(expected, name)
    trained = [Trainer(m, "fp32").logprobs(samples, 1.0) for m in (loaded, other)]
    both = 0
    for row, parts in enumerate(samples.items("versions")):
        mask = samples.packed("mask").row(row) == 1
        versions = torch.cat([torch.full((part.tokens,), part.version) for part in parts])
        wanted = torch.where(versions == 1, trained[1].row(row), trained[0].row(row))
        torch.testing.assert_close(samples.packed("logprobs").row(row)[mask], wanted[mask], atol=2e-5, rtol=0)
        both += len(parts) > 1
    assert both > 3


def test_an_aborted_conversation_is_a_failure(loaded: LoadedModel) -> None:
    engine = RolloutEngine(loaded, "fp32", wait_seconds=20)
    op = Generate(model="actor", environment="game", n=4, max_new=60, turns=5)
    reached = jobs.stop_at_step(engine, 3)
    with ThreadPoolExecutor(1) as pool:
        batch, answers = prompts(loaded, TEXTS), Answers(by_length)
        future = pool.submit(engine.generate, batch, op, seed=3, step=5, environments=answers)
        assert reached.wait(30)
        engine.pause("abort")
        with pytest.raises(RunFailure, match="multi-turn generate was aborted"):
            future.result(30)

"""Rollouts that the tests of several ranks run, and the models and prompts that both sides make for themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.engine import weights_digest
from rlflow.backends.ray_runtime.environment_worker import Observation, Turn
from rlflow.backends.ray_runtime.models import LoadedModel, load_model
from rlflow.backends.ray_runtime.parallel.mesh import Mesh, make_mesh
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import Layout
from rlflow.ir.ops import Generate, Lora, TinyModel
from tests.unit.ray_runtime.parallel.workers import DEADLINE

ALPHABET = "0123456789+="
TEXTS = ["1+2=", "34+5=", "7", "100+200+300=", "34+5="]
Kind = Literal["qwen3", "llama", "qwen2", "qwen3_moe"]


def model(kind: Kind, seed: int = 0, lora: bool = False, letters: int = 0, **sizes: int) -> LoadedModel:
    """Random weights that make every token's odds differ; 14 tokens and so many `letters`."""
    numbers = {"hidden": 32, "layers": 2, "intermediate": 48, "heads": 4, "kv_heads": 2, "context": 64, **sizes}
    base: Any = {"qwen3": "qwen3", "llama": "llama"}.get(kind, "qwen3")
    adapters = Lora(rank=4, alpha=8.0, targets="all_linear") if lora else None
    source = TinyModel(
        architecture=base, alphabet=ALPHABET + "abcdef"[:letters], init_seed=seed, lora=adapters, **numbers
    )  # type: ignore[arg-type]
    loaded = load_model(source, Path())
    settings = {
        "vocab_size": loaded.model.config.vocab_size,
        "hidden_size": numbers["hidden"],
        "intermediate_size": numbers["intermediate"],
        "num_hidden_layers": numbers["layers"],
        "num_attention_heads": numbers["heads"],
        "num_key_value_heads": numbers["kv_heads"],
        "max_position_embeddings": numbers["context"],
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if kind == "qwen2":
        loaded.model = Qwen2ForCausalLM(Qwen2Config(**settings)).eval()
    elif kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        loaded.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts, norm_topk_prob=True)).eval()
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(3.0) if kind in ("qwen3", "llama") else parameter.normal_(0.0, 0.25)
    return loaded


def prompts(loaded: LoadedModel, texts: list[str] = TEXTS, first: int = 0) -> Batch:
    return Batch(
        len(texts),
        {
            "uid": np.arange(first, first + len(texts), dtype=np.int64),
            "record": [{"question": text} for text in texts],
            "prompt_ids": Packed.from_rows([loaded.encode(text) for text in texts], torch.int64),
            "prompt_text": texts,
        },
    )


def op(**options: Any) -> Generate:
    return Generate(model="actor", **{"n": 4, "max_new": 24, **options})


def rows(samples: Batch, name: str = "response_ids") -> list[list[Any]]:
    column = samples.packed(name)
    return [column.row(index).tolist() for index in range(samples.rows)]


def stop_at_step(engine: RolloutEngine, step: int) -> threading.Event:
    """Set after so many tokens; the generating thread then waits until it is paused."""
    reached, count, original = threading.Event(), 0, engine._decoder.step

    def counted(tokens: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == step:
            reached.set()
            while not engine._gate.signal:
                time.sleep(0.001)
        return original(tokens)

    engine._decoder.step = counted  # type: ignore[method-assign]
    return reached


def sampled(engine: RolloutEngine, **options: Any) -> Batch:
    return engine.generate(prompts(engine.loaded), op(**options), seed=3, step=5)


def load(engine: RolloutEngine, source: LoadedModel, version: int, digest: str | None = None) -> None:
    """What a transfer from another pool does."""
    engine.begin_update(version)
    for name, tensor in RolloutEngine(source, "fp32", own=True).local_tensors().items():
        engine.local_tensors()[name].copy_(tensor)
        engine.update([name])
    engine.end_update(digest)


def paused(
    engine: RolloutEngine, aside: ThreadPoolExecutor, step: int, run: Callable[[], Any], mode: Literal["keep", "abort"]
) -> Future[Any]:
    """`run` in another thread, which samples and is paused before token number `step` + 1."""
    reached = stop_at_step(engine, step)
    future = aside.submit(run)
    assert reached.wait(30)
    engine.pause(mode)
    return future


# --- what workers run -------------------------------------------------------------------------------------------------


def mesh_of(layout: Layout) -> Mesh:
    return make_mesh(layout, range(layout.size), timeout=DEADLINE)


def generated(
    layout: Layout, kind: Kind, compute: Any, options: dict[str, Any], sizes: dict[str, int]
) -> dict[str, Any]:
    """What this rank samples and holds."""
    loaded = model(kind, **sizes)
    engine = RolloutEngine(loaded, compute, mesh_of(layout), own=True)
    samples = engine.generate(prompts(loaded), op(**options), seed=3, step=5)
    return {
        "tokens": rows(samples),
        "logprobs": rows(samples, "logprobs"),
        "decoder": type(engine._decoder).__name__,
        "shapes": {name: tuple(tensor.shape) for name, tensor in engine.local_tensors().items()},
        "tensors": {name: tensor.float().numpy() for name, tensor in engine.local_tensors().items()},
    }


class Game:
    """An environment that answers with its own random numbers: two of them never agree."""

    name = "game"

    def step(self, turns: Sequence[Turn]) -> list[Observation | None]:
        rng = np.random.default_rng()
        return [Observation(str(rng.integers(10_000))) if turn.number < 4 else None for turn in turns]

    def forget(self) -> None:
        pass


def talked(layout: Layout, kind: Kind) -> dict[str, Any]:
    """Conversations; only the first rank has the environment. The log-probs are those of a whole model, too."""
    loaded = model(kind)
    mesh = mesh_of(layout)
    engine = RolloutEngine(loaded, "fp32", mesh)
    game: Any = Game() if mesh.rank == 0 else None
    multi = op(environment="game", turns=4, max_new=48)
    samples = engine.generate(prompts(loaded), multi, seed=3, step=5, environments=game)
    mask = samples.packed("mask").values == 1
    trained = Trainer(loaded, "fp32").logprobs(samples, 1.0).values
    off = (trained - samples.packed("logprobs").values)[mask].abs().max()
    return {"tokens": rows(samples), "mask": rows(samples, "mask"), "off": float(off)}


def trained_here(layout: Layout, lora: bool) -> list[Any]:
    """The engine's part of the weights of a model that is trained in the same process, before and after."""
    loaded = model("qwen3", lora=lora)
    engine = RolloutEngine(loaded, "fp32", mesh_of(layout))
    found = []
    for version in (0, 1):
        if version:
            train(loaded)
            engine.load_weights(version)
        samples = engine.generate(prompts(loaded), op(), seed=3, step=5)
        trained = Trainer(loaded, "fp32").logprobs(samples, 1.0).values
        off = (trained - samples.packed("logprobs").values).abs().max()
        found.append((rows(samples), float(off), engine.digest, sorted(set(samples.array("version").tolist()))))
    return found


def train(loaded: LoadedModel) -> None:
    """Other weights, or other adapters."""
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
                parameter.add_(noise, alpha=0.2)


def refused(layout: Layout, kind: Kind, sizes: dict[str, int]) -> str:
    try:
        RolloutEngine(model(kind, **sizes), "fp32", mesh_of(layout))
    except RunFailure as failure:
        return f"{failure.code} {failure.message} | {' | '.join((*failure.notes, *failure.help))}"
    return ""


def updated_while_paused(layout: Layout, kind: Kind) -> dict[str, Any]:
    """Sampling is paused on all ranks, gets the weights of another model, and goes on."""
    loaded, other = model(kind), model(kind, seed=1)
    mesh = mesh_of(layout)
    engine, source = (RolloutEngine(m, "fp32", mesh, own=True) for m in (loaded, other))
    found: dict[str, Any] = {}
    begun = stop_at_step(engine, 5) if mesh.rank == 0 else None

    def run() -> None:
        try:
            found["samples"] = engine.generate(prompts(loaded), op(max_new=50), seed=3, step=5)
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    if begun is not None:
        assert begun.wait(30)
    else:
        time.sleep(0.05)  # the ranks are told at different times, this one perhaps before it has entered the call
    engine.pause()
    engine.begin_update(1)
    for name, tensor in engine.local_tensors().items():
        tensor.copy_(source.local_tensors()[name])
    engine.update(engine.local_tensors())
    engine.end_update(weights_digest(source.local_tensors()))
    engine.resume()
    thread.join(60)
    if "error" in found:
        raise found["error"]
    samples = found["samples"]
    return {
        "tokens": rows(samples),
        "versions": [[(s.version, s.tokens) for s in row] for row in samples.items("versions")],
    }

"""Adapters by themselves: which layers, what they amount to, what is frozen, and what is written."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlflow.backends.ray_runtime.adapters import Adapters, target_layers
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.models import LoadedModel, derive, load_model, load_weights, save_model
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import AdamW, Generate, HfModel, Lora, Nll, TinyModel, Train

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.tensor([[1, 5, 10, 3, 11, 8]])
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def source(lora: Lora | None, architecture: str = "qwen3", **sizes: int) -> TinyModel:
    return TinyModel(
        architecture=architecture,  # type: ignore[arg-type]
        alphabet="0123456789+=",
        **{"hidden": 32, "layers": 2, "intermediate": 48, **sizes},  # type: ignore[arg-type]
        lora=lora,
    )


def lora(rank: int = 4, alpha: float = 8.0, targets: str | tuple[str, ...] = "all_linear", seed: int = 0) -> Lora:
    return Lora(rank=rank, alpha=alpha, targets=targets, init_seed=seed)  # type: ignore[arg-type]


def adapted(which: Lora | None = None, architecture: str = "qwen3") -> tuple[LoadedModel, Adapters]:
    loaded = load_model(source(which or lora(), architecture), Path())
    assert loaded.adapters is not None
    return loaded, loaded.adapters


def samples_of(rows: list[tuple[int, int]]) -> Batch:
    rng = np.random.default_rng(1)
    columns = {
        "prompt_ids": Packed.from_rows([rng.integers(0, 12, p).tolist() for p, _ in rows], torch.int64),
        "response_ids": Packed.from_rows([rng.integers(0, 14, r).tolist() for _, r in rows], torch.int64),
    }
    return Batch(len(rows), columns)


SAMPLES = samples_of([(4, 3), (1, 9), (7, 1), (3, 5)])


def learn(trainer: Trainer, steps: int, first: int = 0) -> list[float]:
    op = Train(model="m", loss=(Nll(weight=1.0),), optimizer=AdamW(lr=1e-2, weight_decay=0.1), minibatch=2)
    return [trainer.train(SAMPLES, None, op, seed=0, step=first + i)["actor/loss"] for i in range(steps)]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def noise(adapters: Adapters, seed: int = 3) -> None:
    """Adapters as if they had been trained."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapters._layers.values():
        weight = layer.lora_B["default"].weight
        with torch.no_grad():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))


# --- which layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all_linear", ALL),
        ("attention", ALL[:4]),
        (("v_proj", "q_proj"), ("q_proj", "v_proj")),
        (("self_attn.q_proj", "mlp.down_proj"), ("q_proj", "down_proj")),
    ],
)
def test_targets_are_layers_of_every_block(
    architecture: str, targets: str | tuple[str, ...], expected: tuple[str, ...]
) -> None:
    model = load_model(source(None, architecture), Path()).model
    found = target_layers(model, targets)
    assert len(found) == 2 * len(expected)
    assert {name.rpartition(".")[2] for name in found} == set(expected)
    assert not any("lm_head" in name or "embed" in name for name in found)


def test_what_is_added_is_bit_for_bit_what_peft_adds() -> None:
    _, adapters = adapted()
    noise(adapters)
    for name, weight in adapters.effective():
        layer = adapters._layers[name]
        assert torch.equal(weight, layer.get_base_layer().weight + layer.get_delta_weight("default"))


def test_one_block_alone() -> None:
    loaded, adapters = adapted(lora(targets=("layers.1.self_attn.q_proj",)))
    assert list(adapters._layers) == ["model.layers.1.self_attn.q_proj"]
    assert sum(p.requires_grad for p in loaded.model.parameters()) == 2


@pytest.mark.parametrize("name", ["lm_head", "q_prj", "proj", "embed_tokens", "q_norm"])
def test_a_layer_that_is_not_there(name: str) -> None:
    with pytest.raises(RunFailure, match=f"has no linear layer `{name}`") as failure:
        adapted(lora(targets=("q_proj", name)))
    assert failure.value.code == "RLF5013"
    assert failure.value.notes == ("it has " + ", ".join(sorted(ALL)),)


def test_the_first_weights_come_from_the_seed_and_leave_the_callers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (adapted(lora(seed=seed))[0] for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    pairs = [[p for p in m.model.parameters() if p.requires_grad and bool(p.any())] for m in (first, second, other)]
    assert all(torch.equal(a, b) for a, b in zip(pairs[0], pairs[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(pairs[0], pairs[2], strict=True))


# --- what they amount to ----------------------------------------------------------------------------------------------


def test_an_adapter_is_applied_once(tmp_path: Path) -> None:  # D16
    """Weights of 1.0 and an adapter that amounts to 0.5 are 1.5 wherever they are used: trainer, sampler, file."""
    loaded, adapters = adapted(lora(rank=4, alpha=8.0, targets=("q_proj",)))
    name, layer = next(iter(adapters._layers.items()))
    with torch.no_grad():
        layer.get_base_layer().weight.fill_(1.0)
        layer.lora_A["default"].weight.fill_(0.25)
        layer.lora_B["default"].weight.fill_(0.25)  # 2 * sum over 4 of 0.25 * 0.25
    engine = RolloutEngine(loaded, "fp32")
    for version in (1, 2):
        engine.load_weights(version)
        assert torch.equal(engine._model.get_submodule(name).weight, torch.full((32, 32), 1.5))
    for folder in ("a", "b"):
        save_model(loaded, tmp_path / folder)
        for saved in (
            AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32),
            load_model(HfModel(path=folder), tmp_path).model,
        ):
            assert torch.equal(saved.get_submodule(name).weight, torch.full((32, 32), 1.5))
    assert torch.equal(adapters.base.get_submodule(name).weight, torch.full((32, 32), 1.0))
    x = torch.ones(1, 32)
    assert float(layer(x)[0, 0]) == pytest.approx(32 * 1.5)


@settings(max_examples=12, deadline=None)
@given(
    rank=st.integers(1, 6),
    alpha=st.sampled_from([0.5, 1.0, 16.0]),
    architecture=st.sampled_from(["qwen3", "llama"]),
    targets=st.sampled_from(["attention", "all_linear", ("down_proj",)]),
)
def test_merged_is_what_the_definition_says(
    rank: int, alpha: float, architecture: str, targets: str | tuple[str, ...]
) -> None:
    loaded, adapters = adapted(lora(rank, alpha, targets), architecture)
    noise(adapters)
    merged = adapters.merged()
    for name, layer in adapters._layers.items():
        weight = layer.get_base_layer().weight.double()
        a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
        expected = weight + (alpha / rank) * (b @ a)
        torch.testing.assert_close(merged.get_submodule(name).weight.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logits(merged), logits(loaded.model), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(merged), logits(adapters.base), atol=1e-3)


def test_gradients_are_those_of_the_product() -> None:
    """By the chain rule from the gradient of the merged weight: dB = s dW A', dA = s B' dW."""
    loaded, adapters = adapted()
    noise(adapters)
    merged = adapters.merged()
    for name in adapters._layers:
        merged.get_submodule(name).weight.requires_grad_(True)
    for model in (merged, loaded.model):
        model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    for name, layer in adapters._layers.items():
        whole = merged.get_submodule(name).weight.grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.testing.assert_close(b.grad, 2.0 * whole @ a.detach().T, atol=1e-6, rtol=1e-3)
        torch.testing.assert_close(a.grad, 2.0 * b.detach().T @ whole, atol=1e-6, rtol=1e-3)


def test_a_bf16_sampler_rounds_the_sum_once() -> None:  # D17
    loaded, adapters = adapted()
    noise(adapters)
    engine = RolloutEngine(loaded, "bf16")
    noise(adapters, seed=4)
    engine.load_weights(1)
    tensors = dict(engine._model.named_parameters())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    for name, weight in adapters.effective():
        assert torch.equal(tensors[name + ".weight"], weight.to(torch.bfloat16))
    base = dict(adapters.base.named_parameters())
    for name in tensors.keys() - {f"{name}.weight" for name in adapters._layers}:
        assert torch.equal(tensors[name], base[name].to(torch.bfloat16))


def test_the_sampler_shares_all_but_the_adapted_layers() -> None:
    loaded, adapters = adapted(lora(targets="attention"))
    engine = RolloutEngine(loaded, "fp32")
    base = dict(adapters.base.named_parameters())
    own = {name for name, p in engine._model.named_parameters() if p.data_ptr() != base[name].data_ptr()}
    assert own == {f"{name}.weight" for name in adapters._layers}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_sampled_log_probs_are_the_trainers(architecture: str) -> None:
    loaded, adapters = adapted(architecture=architecture)
    engine = RolloutEngine(loaded, "fp32")
    noise(adapters)
    engine.load_weights(1)
    prompts = Batch(2, {"prompt_ids": Packed.from_rows([[1, 10, 2], [3, 4]], torch.int64), "uid": np.array([0, 1])})
    samples = engine.generate(prompts, Generate(model="m", n=3, max_new=6), seed=0, step=1, version=1)
    again = Trainer(loaded, "fp32").logprobs(samples, 1.0)
    torch.testing.assert_close(again.values, samples.packed("logprobs").values, atol=2e-5, rtol=0)


# --- what is frozen ---------------------------------------------------------------------------------------------------


def test_training_leaves_the_weights_bit_for_bit_and_has_no_moments_for_them() -> None:
    plain = load_model(source(None), Path())
    loaded, adapters = adapted()
    before = Trainer(loaded, "fp32")
    assert torch.equal(before.logprobs(SAMPLES, 1.0).values, Trainer(plain, "fp32").logprobs(SAMPLES, 1.0).values)
    losses = learn(before, 12)
    assert losses[-1] < losses[0] - 0.3
    frozen = dict(adapters.base.named_parameters())
    for name, tensor in plain.model.named_parameters():
        assert torch.equal(frozen[name], tensor)
        assert not frozen[name].requires_grad
    trained = [p for p in loaded.model.parameters() if p.requires_grad]
    assert len(trained) == 2 * len(adapters._layers)
    assert all(float(p.detach().abs().sum()) > 0 for p in trained)
    moments = before.state_dict()["optimizer"]["state"]
    assert [tuple(entry["exp_avg"].shape) for entry in moments.values()] == [tuple(p.shape) for p in trained]


def test_a_frozen_copy_is_the_model_without_adapters_on_the_same_tensors() -> None:
    plain = Trainer(load_model(source(None), Path()), "fp32").logprobs(SAMPLES, 1.0)
    loaded, _ = adapted()
    frozen = derive(loaded, "frozen")
    theirs = {p.data_ptr() for p in loaded.model.parameters()}
    assert {p.data_ptr() for p in frozen.model.parameters()} <= theirs
    trainer, reference = Trainer(loaded, "fp32"), Trainer(frozen, "fp32")
    for _ in range(2):
        assert torch.equal(reference.logprobs(SAMPLES, 1.0).values, plain.values)
        learn(trainer, 2)
    assert not torch.allclose(trainer.logprobs(SAMPLES, 1.0).values, plain.values, atol=1e-2)
    assert frozen.adapters is None


def test_a_value_model_starts_from_a_copy_of_the_weights() -> None:
    loaded, adapters = adapted()
    noise(adapters)
    critic = derive(loaded, "value")
    base = dict(adapters.base.model.named_parameters())
    assert all(torch.equal(p, base[name]) for name, p in critic.model.body.named_parameters())
    assert {p.data_ptr() for p in critic.model.parameters()}.isdisjoint(p.data_ptr() for p in base.values())
    assert all(p.requires_grad for p in critic.model.parameters())


# --- what is written --------------------------------------------------------------------------------------------------


def test_peft_reads_the_adapter(tmp_path: Path) -> None:
    loaded, adapters = adapted(lora(rank=4, alpha=8.0, targets="attention"))
    noise(adapters)
    save_model(loaded, tmp_path)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8.0, 0.0)
    assert sorted(config["target_modules"]) == sorted(ALL[:4])
    theirs = PeftModel.from_pretrained(load_model(source(None), Path()).model, str(tmp_path / "adapter"))
    assert torch.equal(logits(theirs), logits(loaded.model))
    assert not (tmp_path / "adapter_config.json").exists()  # transformers would apply it to the merged weights


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = Trainer(adapted()[0], "fp32")
    expected = learn(straight, 6)
    first = Trainer(adapted()[0], "fp32")
    learn(first, 3)
    save_model(first.loaded, tmp_path, False)
    assert not (tmp_path / "model.safetensors").exists()
    moments = copy.deepcopy(first.state_dict())
    loaded, _ = adapted(lora(seed=9))
    load_weights(loaded, tmp_path)
    second = Trainer(loaded, "fp32")
    second.load_state_dict(moments)
    assert learn(second, 3, first=3) == expected[3:]
    pairs = zip(straight.loaded.model.parameters(), loaded.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_adapter_of_other_weights(tmp_path: Path) -> None:
    loaded, _ = adapted()
    save_model(loaded, tmp_path, False)
    other = load_model(source(lora(), init_seed=1), Path())
    with pytest.raises(RunFailure, match="trained beside other weights") as failure:
        load_weights(other, tmp_path)
    assert failure.value.code == "RLF5010"


def test_a_checkpoint_folder_gets_adapters_as_a_tiny_model_does(tmp_path: Path) -> None:
    save_model(load_model(source(None), Path()), tmp_path / "model")
    loaded = load_model(HfModel(path="model", lora=lora(targets="attention")), tmp_path)
    assert loaded.adapters is not None
    tiny, _ = adapted(lora(targets="attention"))
    assert torch.equal(logits(loaded.model), logits(tiny.model))
    assert learn(Trainer(loaded, "fp32"), 2) == learn(Trainer(tiny, "fp32"), 2)


@pytest.mark.parametrize("which", [lora(rank=2), lora(targets="attention")])
def test_an_adapter_of_another_shape(tmp_path: Path, which: Lora) -> None:
    save_model(adapted()[0], tmp_path, False)
    with pytest.raises(ValueError, match="holds the adapters of other layers, or of another rank"):
        load_weights(adapted(which)[0], tmp_path)

"""Value models and reward models: what they compute, how they are saved, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, Qwen3Config, Qwen3ForSequenceClassification

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.forward import sequence_scores
from rlflow.backends.ray_runtime.heads import VALUE_HEAD, ValueHeadModel
from rlflow.backends.ray_runtime.models import LoadedModel, derive, load_model, load_weights, save_model
from rlflow.backends.ray_runtime.packing import Sequences
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import AdamW, PresetModel, RewardModel, TinyModel, Train, ValueClip

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCE = TinyModel(architecture="qwen3", alphabet="0123456789+=", hidden=32, layers=1)


def samples_of(rows: list[tuple[int, int]]) -> Batch:
    rng = np.random.default_rng(1)
    return Batch(
        len(rows),
        {
            "prompt_ids": Packed.from_rows([rng.integers(0, 12, p).tolist() for p, _ in rows], torch.int64),
            "response_ids": Packed.from_rows([rng.integers(0, 14, r).tolist() for _, r in rows], torch.int64),
        },
    )


SAMPLES = samples_of([(4, 3), (1, 9), (7, 1), (3, 5)])
OFFSETS = SAMPLES.packed("response_ids").offsets


def critic(slope: float = 0.3) -> LoadedModel:
    loaded = derive(load_model(SOURCE, Path()), "value")
    with torch.no_grad():
        loaded.model.head.weight.copy_(torch.linspace(-slope, slope, 32)[None])
    return loaded


def targets() -> Packed:
    return Packed(torch.linspace(-1, 1, int(OFFSETS[-1])), OFFSETS)


def step(trainer: Trainer, number: int) -> dict[str, float]:
    op = Train(model="critic", loss=(ValueClip(weight=1.0, clip=None),), optimizer=AdamW(lr=1e-2), minibatch=0)
    return trainer.train(SAMPLES, None, op, returns=targets(), seed=0, step=number)


# --- value models -----------------------------------------------------------------------------------------------------


def test_the_first_values_are_zero_and_the_body_is_a_copy() -> None:
    actor = load_model(SOURCE, Path())
    loaded = derive(actor, "value")
    assert isinstance(loaded.model, ValueHeadModel)
    trainer = Trainer(loaded, "fp32")
    assert torch.equal(trainer.values(SAMPLES).values, torch.zeros(18))
    for mine, theirs in zip(loaded.model.body.parameters(), actor.model.model.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(mine, theirs)
        assert mine.requires_grad
    before = copy.deepcopy(actor.model.state_dict())
    losses = [step(trainer, number)["critic/vf_loss"] for number in range(30)]
    assert losses[-1] < 0.3 * losses[0]
    assert all(torch.equal(value, before[name]) for name, value in actor.model.state_dict().items())


def test_a_value_stands_before_the_token_it_is_the_value_of() -> None:
    loaded = critic()
    got = Trainer(loaded, "fp32").values(SAMPLES)
    for index in range(SAMPLES.rows):
        prompt, response = SAMPLES.packed("prompt_ids").row(index), SAMPLES.packed("response_ids").row(index)
        hidden = loaded.model.body(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
        expected = loaded.model.head(hidden[len(prompt) - 1 : -1])[:, 0].detach()
        torch.testing.assert_close(got.row(index), expected, atol=1e-5, rtol=0)


def test_bf16_values_have_an_fp32_head() -> None:
    exact, rough = Trainer(critic(), "fp32").values(SAMPLES), Trainer(critic(), "bf16").values(SAMPLES)
    assert rough.values.dtype == torch.float32
    assert 0 < (exact.values - rough.values).abs().max() < 0.1


def test_saved_as_a_body_and_a_head_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    straight = Trainer(critic(), "fp32")
    for number in range(6):
        step(straight, number)
    first = Trainer(critic(), "fp32")
    for number in range(3):
        step(first, number)
    save_model(first.loaded, tmp_path)
    state = copy.deepcopy(first.state_dict())
    body = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(body).__name__ == "Qwen3Model"
    assert (tmp_path / VALUE_HEAD).is_file()
    assert (tmp_path / "tokenizer.json").is_file()
    resumed = critic(slope=9.0)
    load_weights(resumed, tmp_path)
    second = Trainer(resumed, "fp32")
    second.load_state_dict(state)
    for number in range(3, 6):
        step(second, number)
    pairs = zip(straight.loaded.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_frozen_value_model_does_not_learn() -> None:
    loaded = derive(critic(), "frozen")
    assert isinstance(loaded.model, ValueHeadModel)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


# --- reward models ----------------------------------------------------------------------------------------------------


def reward_folder(folder: Path, labels: int = 1, pad: int | None = 12) -> Path:
    actor = load_model(SOURCE, Path())
    torch.manual_seed(1)
    config = Qwen3Config(**{**actor.model.config.to_dict(), "num_labels": labels, "pad_token_id": pad})
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    actor.tokenizer.save_pretrained(folder)
    return folder


def scores_of(loaded: LoadedModel, samples: Batch, budget: int = 16384) -> np.ndarray:
    out = np.zeros(samples.rows, dtype=np.float32)
    for rows, ids, last in Sequences(samples, loaded.pad_id).rectangles(budget):
        with torch.no_grad():
            out[rows] = sequence_scores(loaded.model, "fp32", ids, last).numpy()
    return out


@pytest.mark.parametrize("budget", [1, 24, 16384])
def test_the_score_is_read_at_the_last_token(tmp_path: Path, budget: int) -> None:
    loaded = load_model(RewardModel(path=str(reward_folder(tmp_path))), Path())
    got = scores_of(loaded, SAMPLES, budget)
    for index in range(SAMPLES.rows):
        ids = torch.cat([SAMPLES.packed(name).row(index) for name in ("prompt_ids", "response_ids")])
        body = loaded.model.model(input_ids=ids[None]).last_hidden_state
        assert got[index] == pytest.approx(float(loaded.model.score(body[0, -1]).detach()), abs=1e-5)
        if ids[-1] != 12:  # transformers skips padding tokens at the end, ours is the very last token
            assert got[index] == pytest.approx(float(loaded.model(input_ids=ids[None]).logits.detach()), abs=1e-5)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_a_value_model_of_a_reward_model_starts_with_its_scores(tmp_path: Path) -> None:
    reward = load_model(RewardModel(path=str(reward_folder(tmp_path))), Path())
    value = derive(reward, "value")
    one_more = samples_of([(4, 3)])
    longer = Packed(torch.cat([one_more.packed("response_ids").values, torch.tensor([0])]), torch.tensor([0, 4]))
    values = Trainer(value, "fp32").values(one_more.with_columns(response_ids=longer)).values
    assert float(values[-1]) == pytest.approx(float(scores_of(reward, one_more)[0]), abs=1e-5)
    assert all(parameter.requires_grad for parameter in value.model.parameters())


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    actor = load_model(SOURCE, Path())
    save_model(actor, tmp_path)  # a language model has no score head
    with pytest.raises(RunFailure, match="lacks 1 of the model's tensors") as failure:
        load_model(RewardModel(path=str(tmp_path)), Path())
    assert failure.value.code == "RLF5001"
    assert "score.weight" in failure.value.notes[0]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RunFailure, match="has no weights") as failure:
        load_model(RewardModel(path=str(tmp_path)), Path())
    assert failure.value.code == "RLF5001"


def test_a_reward_model_has_one_output(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="has 2 outputs") as failure:
        load_model(RewardModel(path=str(reward_folder(tmp_path, labels=2))), Path())
    assert failure.value.code == "RLF5013"


def test_a_preset_has_no_weights() -> None:
    with pytest.raises(RunFailure, match="`qwen3_8b` is a preset, which has no weights") as failure:
        load_model(PresetModel(name="qwen3_8b"), Path())
    assert failure.value.code == "RLF4003"

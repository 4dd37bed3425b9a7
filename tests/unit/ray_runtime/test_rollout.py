from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlflow.backends.ray_runtime import rollout
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.decoder import DenseDecoder, GenericDecoder
from rlflow.backends.ray_runtime.models import LoadedModel, load_model, save_model
from rlflow.backends.ray_runtime.rollout import RolloutEngine, Sampler, response_lengths
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate, HfModel, TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")

ARCHITECTURES: list[Literal["qwen3", "llama"]] = ["qwen3", "llama"]
TEXTS = ["1+2=", "34+5=", "7", "100+200+300=", "34+5="]


def tiny(architecture: Literal["qwen3", "llama"] = "qwen3", **sizes: int) -> LoadedModel:
    source = TinyModel(architecture=architecture, alphabet="0123456789+=", hidden=32, **{"context": 64, **sizes})
    loaded = load_model(source, Path())
    with torch.no_grad():  # random weights give nearly uniform tokens; larger ones make every token's odds differ
        for parameter in loaded.model.parameters():
            parameter.mul_(3.0)
    return loaded


def prompts(loaded: LoadedModel, texts: list[str], uids: list[int] | None = None) -> Batch:
    return Batch(
        len(texts),
        {
            "uid": np.array(uids if uids is not None else range(len(texts)), dtype=np.int64),
            "record": [{"question": text} for text in texts],
            "prompt_ids": Packed.from_rows([loaded.encode(text) for text in texts], torch.int64),
            "prompt_text": texts,
        },
    )


def generate(loaded: LoadedModel, batch: Batch, compute: Literal["fp32", "bf16"] = "fp32", **options: Any) -> Batch:
    op = Generate(model="actor", **{"n": 4, "max_new": 12, **options})
    return RolloutEngine(loaded, compute).generate(batch, op, seed=3, step=5, version=9)


def responses(samples: Batch) -> list[list[int]]:
    column = samples.packed("response_ids")
    return [column.row(index).tolist() for index in range(samples.rows)]


@pytest.fixture(params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny(request.param)


def test_columns(loaded: LoadedModel) -> None:
    samples = generate(loaded, prompts(loaded, TEXTS, [40, 41, 42, 43, 44]), n=2)
    assert samples.rows == 10
    assert samples.array("uid").tolist() == [40, 40, 41, 41, 42, 42, 43, 43, 44, 44]
    assert samples.array("group").tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert samples.array("sample").tolist() == [0, 1] * 5
    assert samples.array("version").tolist() == [9] * 10
    assert samples.items("prompt_text")[2:4] == ["34+5=", "34+5="]
    assert samples.items("record")[3] == {"question": "34+5="}
    assert samples.packed("prompt_ids").row(7).tolist() == loaded.encode("100+200+300=")
    response, logprobs = samples.packed("response_ids"), samples.packed("logprobs")
    assert torch.equal(response.offsets, logprobs.offsets)
    assert (response.values.dtype, logprobs.values.dtype) == (torch.int64, torch.float32)
    for index, text in enumerate(samples.items("text")):
        assert text == loaded.tokenizer.decode(response.row(index), skip_special_tokens=True)


def test_the_fast_decoder_is_used_and_equals_the_models_own_forward(loaded: LoadedModel) -> None:
    fast, plain = DenseDecoder(loaded.model), GenericDecoder(loaded.model)
    engine = RolloutEngine(loaded, "fp32")
    assert isinstance(engine._decoder, DenseDecoder)
    ids = torch.tensor([[0, 0, 3, 4, 5], [1, 2, 3, 4, 5], [0, 0, 0, 0, 7]])
    lengths = torch.tensor([3, 5, 1])
    rows = torch.tensor([0, 0, 1, 2, 2])
    with torch.inference_mode():
        torch.testing.assert_close(fast.prefill(ids, lengths, 100), plain.prefill(ids, lengths, 100))
        for decoder in (fast, plain):
            decoder.select(rows)
        generator = torch.Generator().manual_seed(0)
        for step in range(90):  # past the first growth of the cache
            tokens = torch.randint(0, 12, (len(rows),), generator=generator)
            torch.testing.assert_close(fast.step(tokens), plain.step(tokens), atol=2e-5, rtol=1e-4)
            if step in (10, 70):
                rows = torch.arange(len(rows) - 1).flip(0)
                for decoder in (fast, plain):
                    decoder.select(rows)


def test_large_models_do_not_join_weights(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = responses(generate(loaded, prompts(loaded, TEXTS)))
    monkeypatch.setattr("rlflow.backends.ray_runtime.decoder._FUSE_LIMIT_BYTES", 0)
    assert responses(generate(loaded, prompts(loaded, TEXTS))) == expected


def test_greedy_equals_transformers_generate(loaded: LoadedModel) -> None:
    samples = generate(loaded, prompts(loaded, TEXTS), n=1, temperature=0.0, max_new=20)
    for index, text in enumerate(TEXTS):
        ids = torch.tensor([loaded.encode(text)])
        expected = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[
            0, ids.shape[1] :
        ]
        assert responses(samples)[index] == expected.tolist()


def test_a_model_without_a_fast_decoder(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=14, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=13, bos_token_id=None
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny().tokenizer.save_pretrained(tmp_path)
    model = load_model(HfModel(path=str(tmp_path)), Path())
    engine = RolloutEngine(model, "fp32")
    assert isinstance(engine._decoder, GenericDecoder)
    greedy = generate(model, prompts(model, TEXTS), n=1, temperature=0.0, max_new=10)
    for index, text in enumerate(TEXTS):
        ids = torch.tensor([model.encode(text)])
        expected = model.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        assert responses(greedy)[index] == expected[0, ids.shape[1] :].tolist()
    samples = generate(model, prompts(model, TEXTS), max_new=30)
    trained = Trainer(model, "fp32").logprobs(samples, 1.0)
    torch.testing.assert_close(trained.values, samples.packed("logprobs").values, atol=1e-5, rtol=0)


def test_a_sample_does_not_depend_on_its_batch(loaded: LoadedModel) -> None:
    together = responses(generate(loaded, prompts(loaded, TEXTS, [10, 11, 12, 13, 14])))
    turned = responses(generate(loaded, prompts(loaded, TEXTS[::-1], [14, 13, 12, 11, 10])))
    for index, text in enumerate(TEXTS):
        alone = responses(generate(loaded, prompts(loaded, [text], [10 + index])))
        assert alone == together[4 * index : 4 * index + 4] == turned[4 * (4 - index) :][:4]
    fewer = responses(generate(loaded, prompts(loaded, TEXTS, [10, 11, 12, 13, 14]), n=2))
    assert fewer == [row for index, row in enumerate(together) if index % 4 < 2]
    assert together[4:8] != together[16:20]  # the same prompt under another uid
    assert len({tuple(row) for row in together[:4]}) > 1


def test_compaction_and_waves_change_nothing(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = prompts(loaded, TEXTS * 2)
    expected = responses(generate(loaded, batch, n=4, max_new=30))
    lengths = sorted(len(row) for row in expected)
    assert lengths[0] < lengths[len(lengths) // 2] < 30  # rows do finish at different times
    for share, rows in ((10**9, 256), (0, 256), (4, 8)):  # at every finished row, never, in waves
        monkeypatch.setattr(rollout, "_COMPACT_SHARE", share)
        monkeypatch.setattr(rollout, "_MAX_ROWS", rows)
        assert responses(generate(loaded, batch, n=4, max_new=30)) == expected


def test_the_same_seed_repeats_bit_for_bit(loaded: LoadedModel) -> None:
    first, second = (generate(loaded, prompts(loaded, TEXTS)) for _ in range(2))
    assert torch.equal(first.packed("response_ids").values, second.packed("response_ids").values)
    assert torch.equal(first.packed("logprobs").values, second.packed("logprobs").values)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.6, 1.0, 1.3])
def test_behaviour_logprobs_are_the_trainers(loaded: LoadedModel, temperature: float) -> None:  # T16, G4, G9
    samples = generate(loaded, prompts(loaded, TEXTS), temperature=temperature, max_new=20)
    trained = Trainer(loaded, "fp32").logprobs(samples, temperature)
    assert torch.equal(trained.offsets, samples.packed("logprobs").offsets)
    torch.testing.assert_close(trained.values, samples.packed("logprobs").values, atol=1e-5, rtol=0)


def test_models_with_several_end_tokens(tmp_path: Path) -> None:  # J2
    save_model(tiny(), tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 8, 9]}))
    model = load_model(HfModel(path=str(tmp_path)), Path())
    samples = generate(model, prompts(model, TEXTS), max_new=30)
    for row, truncated in zip(responses(samples), samples.array("truncated"), strict=True):
        assert not set(row[:-1]) & set(model.eos_ids)
        assert truncated == (row[-1] not in model.eos_ids)
        assert len(row) == 30 or not truncated


@pytest.mark.parametrize(
    ("tokens", "eos", "length", "truncated"),
    [
        ([5, 6, 7], (1,), 3, True),  # J1: no end token; nothing is counted beyond the response
        ([5, 6, 1], (1,), 3, False),
        ([5, 8, 0, 0], (1, 8, 9), 2, False),  # J2
        ([5, 9, 0, 0], (1, 8, 9), 2, False),
        ([1, 1, 1], (1,), 1, False),
    ],
)
def test_response_lengths(tokens: list[int], eos: tuple[int, ...], length: int, truncated: bool) -> None:
    lengths, cut = response_lengths(torch.tensor([tokens]), eos)
    assert (lengths.tolist(), cut.tolist()) == ([length], [truncated])


def test_a_truncated_response_gets_no_end_token(loaded: LoadedModel) -> None:  # J4
    samples = generate(loaded, prompts(loaded, TEXTS), max_new=2)
    for row, truncated in zip(responses(samples), samples.array("truncated"), strict=True):
        if truncated:
            assert len(row) == 2
            assert not set(row) & set(loaded.eos_ids)


def test_one_new_token(loaded: LoadedModel) -> None:
    samples = generate(loaded, prompts(loaded, TEXTS), max_new=1)
    assert [len(row) for row in responses(samples)] == [1] * 20


def test_no_prompts(loaded: LoadedModel) -> None:
    assert generate(loaded, prompts(loaded, [])).rows == 0


def test_context_is_checked_with_both_numbers(loaded: LoadedModel) -> None:
    with pytest.raises(RunFailure, match=r"prompt 7 has 4 tokens.*max_new = 61.*65.*64 tokens") as failure:
        generate(loaded, prompts(loaded, ["1+2="], [7]), max_new=61)
    assert failure.value.code == "RLF5007"
    assert "60" in failure.value.help[0]
    assert generate(loaded, prompts(loaded, ["1+2="], [7]), max_new=60).rows == 4


def test_weights_changed_in_place_are_seen(loaded: LoadedModel) -> None:
    engine = RolloutEngine(loaded, "fp32")
    op = Generate(model="actor", n=2, max_new=8)
    batch = prompts(loaded, TEXTS)
    engine.generate(batch, op, seed=0, step=0, version=0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    got = engine.generate(batch, op, seed=0, step=0, version=1)
    fresh = RolloutEngine(loaded, "fp32").generate(batch, op, seed=0, step=0, version=1)
    assert torch.equal(got.packed("logprobs").values, fresh.packed("logprobs").values)


def test_bf16_copy_is_refreshed_by_load_weights(loaded: LoadedModel) -> None:
    engine = RolloutEngine(loaded, "bf16")
    op = Generate(model="actor", n=2, max_new=8)
    batch = prompts(loaded, TEXTS)
    old = engine.generate(batch, op, seed=0, step=0, version=0)
    trained = Trainer(loaded, "bf16").logprobs(old, 1.0)
    assert (trained.values - old.packed("logprobs").values).abs().max() < 0.2
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.5)
    stale = engine.generate(batch, op, seed=0, step=0, version=0)
    assert torch.equal(stale.packed("logprobs").values, old.packed("logprobs").values)
    engine.load_weights(1)
    assert engine.version == 1
    new = engine.generate(batch, op, seed=0, step=0, version=1)
    fresh = RolloutEngine(loaded, "bf16").generate(batch, op, seed=0, step=0, version=1)
    assert torch.equal(new.packed("logprobs").values, fresh.packed("logprobs").values)
    assert loaded.model.dtype == torch.float32


# --- the sampler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.126928), (1.0, -0.313262)])
def test_logprob_at_a_temperature(temperature: float, expected: float) -> None:  # T16
    chosen, logp = Sampler(temperature)(torch.tensor([[1.0, 0.0]]), torch.zeros(1, dtype=torch.float64))
    assert chosen.item() == 0
    assert logp.item() == pytest.approx(expected, abs=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    draws = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    logits = torch.log(torch.tensor([0.1, 0.0, 0.2, 0.7, 0.0])).expand(10_000, 5)
    chosen, _ = Sampler(1.0)(logits, draws)
    np.testing.assert_allclose(np.bincount(chosen, minlength=5) / 1e4, [0.1, 0, 0.2, 0.7, 0], atol=2e-4)


def test_the_largest_draw_takes_the_last_possible_token() -> None:
    logits = torch.log(torch.tensor([[0.3, 0.7, 0.0]]))
    chosen, _ = Sampler(1.0)(logits, torch.tensor([1 - 2.0**-52], dtype=torch.float64))
    assert chosen.item() == 1


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [(1.0, 2, {1, 3}), (0.6, 0, {1, 3}), (0.4, 0, {1}), (0.01, 0, {1}), (1.0, 0, {0, 1, 2, 3}), (0.6, 3, {1, 3})],
)
def test_truncated_sampling(top_p: float, top_k: int, kept: set[int]) -> None:
    logits = torch.log(torch.tensor([0.1, 0.45, 0.15, 0.3]))
    draws = torch.arange(0, 1, 0.01, dtype=torch.float64)
    chosen, logp = Sampler(1.0, top_p, top_k)(logits.expand(len(draws), 4), draws)
    assert set(chosen.tolist()) == kept
    torch.testing.assert_close(logp, logits[chosen])  # of the whole distribution


def test_greedy_takes_the_first_of_equals() -> None:
    chosen, logp = Sampler(0.0)(torch.tensor([[1.0, 2.0, 2.0]]), None)
    assert chosen.item() == 1
    assert logp.item() == pytest.approx(-math.log(2 + math.exp(-1)))


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_ids_that_are_no_token_are_never_sampled(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding padded from 14 to 24 rows, whose padding has the largest weights."""
    loaded = tiny()
    loaded.model.resize_token_embeddings(24, mean_resizing=False)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[14:].normal_(0.0, 0.5)
    batch = prompts(loaded, TEXTS)
    samples = generate(loaded, batch, n=50, **options)
    assert int(samples.packed("response_ids").values.max()) < 14
    if options.get("temperature") != 0.0:  # of the whole distribution, as those of the trainer
        trained = Trainer(loaded, "fp32").logprobs(samples, 1.0).values
        torch.testing.assert_close(samples.packed("logprobs").values, trained, atol=2e-5, rtol=1e-5)
    monkeypatch.setattr(loaded, "ids_without_token", ())
    assert int(generate(loaded, batch, n=50, **options).packed("response_ids").values.max()) >= 14


def test_ids_without_a_token_take_no_draw_however_likely() -> None:
    draws = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    logits = torch.tensor([0.0, 1.0, 500.0, 0.5]).expand(10_000, 4)
    chosen, _ = Sampler(1.0, never=torch.tensor([2]))(logits, draws)
    wanted = torch.softmax(torch.tensor([0.0, 1.0, float("-inf"), 0.5]), -1).numpy()
    np.testing.assert_allclose(np.bincount(chosen, minlength=4) / 1e4, wanted, atol=2e-4)

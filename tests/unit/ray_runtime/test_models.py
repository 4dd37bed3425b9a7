from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from rlflow.backends.ray_runtime.models import WEIGHT_FILES, LoadedModel, load_model, save_model
from rlflow.cluster.presets.architecture import Architecture
from rlflow.cluster.presets.from_config import facts_of_config, facts_of_tiny
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import HfModel, TinyModel

HERE = Path()


Kind = Literal["qwen3", "llama", "qwen3_moe"]
KINDS: list[Kind] = ["qwen3", "llama", "qwen3_moe"]


def tiny(architecture: Kind = "qwen3", alphabet: str = "0123456789+=", seed: int = 0) -> LoadedModel:
    experts, each = (4, 2) if architecture == "qwen3_moe" else (0, 0)
    source = TinyModel(
        architecture=architecture,
        alphabet=alphabet,
        hidden=32,
        layers=2,
        heads=4,
        init_seed=seed,
        experts=experts,
        experts_per_token=each,
    )
    return load_model(source, HERE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tiny(), tmp_path / "model")
    return tmp_path / "model"


def test_one_token_per_character() -> None:
    loaded = tiny()
    assert loaded.encode("12+3=") == [1, 2, 10, 3, 11]
    assert loaded.tokenizer("12+3=")["input_ids"] == [1, 2, 10, 3, 11]
    assert loaded.tokenizer.decode([1, 2, 10, 3, 11]) == "12+3="
    assert loaded.tokenizer.decode([5, *loaded.eos_ids, loaded.pad_id], skip_special_tokens=True) == "5"
    assert len({loaded.pad_id, *loaded.eos_ids}) == 2
    assert loaded.context == 256


def test_spaces_line_ends_and_non_ascii_survive() -> None:
    loaded = tiny(alphabet="ab \né")
    ids = loaded.encode("a  b\né a")
    assert len(ids) == 8
    assert loaded.tokenizer.decode(ids) == "a  b\né a"


def test_a_character_outside_the_alphabet_is_named() -> None:
    with pytest.raises(RunFailure, match=r"'x'.*'1x2='") as failure:
        tiny().encode("1x2=")
    assert failure.value.code == "RLF5002"


@pytest.mark.parametrize("architecture", KINDS)
def test_init_is_seeded_and_leaves_the_global_state(architecture: Kind) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = tiny(architecture), tiny(architecture), tiny(architecture, seed=1)
    assert torch.equal(torch.rand(3), expected)
    states = [loaded.model.state_dict() for loaded in (first, second, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert all(value.dtype == torch.float32 for value in states[0].values())
    assert not first.model.training


@pytest.mark.parametrize("alphabet", ["", "abca"])
def test_bad_alphabets(alphabet: str) -> None:
    with pytest.raises(RunFailure) as failure:
        tiny(alphabet=alphabet)
    assert failure.value.code == "RLF5013"


@pytest.mark.parametrize("architecture", KINDS)
def test_the_compiler_counts_the_parameters_that_there_are(architecture: Kind) -> None:
    experts, each = (4, 2) if architecture == "qwen3_moe" else (0, 0)
    facts = facts_of_tiny(architecture, 14, 32, 2, 4, 2, 128, 256, experts, each)
    model = tiny(architecture).model
    assert Architecture("actor", facts).params() == sum(p.numel() for p in model.parameters())
    assert facts_of_config(model.config.to_dict()) == facts


@pytest.mark.parametrize(("experts", "each"), [(0, 0), (4, 0), (4, 5)])
def test_experts_that_do_not_fit_together(experts: int, each: int) -> None:
    source = TinyModel(architecture="qwen3_moe", alphabet="ab", experts=experts, experts_per_token=each)
    with pytest.raises(RunFailure, match=f"experts_per_token {each} is not in 1 .. {experts}") as failure:
        load_model(source, HERE)
    assert failure.value.code == "RLF5013"


def test_sizes_that_do_not_fit_together() -> None:
    with pytest.raises(RunFailure, match="hidden 30, heads 4") as failure:
        load_model(TinyModel(architecture="llama", alphabet="ab", hidden=30), HERE)
    assert failure.value.code == "RLF5013"


@pytest.mark.parametrize("architecture", KINDS)
def test_a_saved_model_loads_everywhere(architecture: Kind, tmp_path: Path) -> None:
    loaded = tiny(architecture)
    save_model(loaded, tmp_path / "out" / "model")
    assert "rlflow" not in (tmp_path / "out" / "model" / "config.json").read_text()
    again = load_model(HfModel(path="out/model"), tmp_path)
    ids = torch.tensor([loaded.encode("12+3=")])
    expected = loaded.model(ids).logits
    assert torch.equal(again.model(ids).logits, expected)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    torch.testing.assert_close(plain(ids).logits, expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "model")("12+3=")["input_ids"] == ids[0].tolist()
    assert (again.eos_ids, again.pad_id, again.context) == (loaded.eos_ids, loaded.pad_id, loaded.context)
    assert again.encode("9") == [9]
    with pytest.raises(RunFailure, match="'x'"):
        again.encode("x")


def test_every_end_token_counts(folder: Path) -> None:  # J2
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [3, 1]}))
    end = tiny().eos_ids[0]
    assert load_model(HfModel(path=str(folder)), HERE).eos_ids == (1, 3, end)


def test_a_generation_config_that_breaks_transformers_rules_still_saves(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(HfModel(path=str(folder)), HERE)
    loaded.model.generation_config.do_sample = False
    loaded.model.generation_config.temperature = 0.3
    save_model(loaded, tmp_path / "again")
    assert load_model(HfModel(path="again"), tmp_path).eos_ids == loaded.eos_ids


def failure_of(path: Path | str, base: Path = HERE) -> RunFailure:
    with pytest.raises(RunFailure) as failure:
        load_model(HfModel(path=str(path)), base)
    return failure.value


def test_missing_folder(tmp_path: Path) -> None:
    got = failure_of("./models/nothing", tmp_path)
    assert got.code == "RLF5013"
    assert "./models/nothing" in got.message
    assert str(tmp_path) in got.notes[0]


def test_folder_without_config(tmp_path: Path) -> None:
    got = failure_of(tmp_path)
    assert (got.code, "config.json" in got.message) == ("RLF5013", True)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    got = failure_of(folder)
    assert got.code == "RLF5001"
    assert str(folder) in got.message
    assert all(name in got.notes[0] for name in WEIGHT_FILES)


def test_checkpoint_that_lacks_tensors(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (folder / "config.json").write_text(json.dumps(config))
    got = failure_of(folder)
    assert got.code == "RLF5001"
    assert "layers.2" in got.notes[0]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_files_are_no_traceback(folder: Path, name: str) -> None:
    (folder / name).write_text("{ not this")
    got = failure_of(folder)
    assert got.code == "RLF5013"
    assert str(folder) in got.message


def test_missing_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert failure_of(folder).code == "RLF5013"


def test_shape_mismatch(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    assert failure_of(folder).code == "RLF5013"
    shutil.rmtree(folder)


def test_a_model_with_another_head_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=14,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=0.01,
        pad_token_id=12,
        eos_token_id=13,
        bos_token_id=None,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    tiny().tokenizer.save_pretrained(tmp_path)
    got = failure_of(tmp_path)
    assert got.code == "RLF5013"
    assert "gemma2" in got.message

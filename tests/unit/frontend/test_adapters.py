"""`lora(...)` of a model: what it means, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.frontend.lower import Lowered, lower
from rlflow.grammar.parse import parse
from rlflow.ir import ops
from rlflow.ir.parser import parse_flow
from rlflow.ir.printer import print_flow

FLOW = """\
flow f(rank = 4) {
  data d = reasoning_gym("chain_sum", size = 9)
  model m = MODEL
  model r = frozen(m)
  reward e = scorer(d)
  step {
    s = m.generate(d.take(4 prompts), n = 2, max_new = 4 tokens)
    ref = REFERENCE.logprobs(s)
    m.train(s, advantages = group_normalize(e(s)), reference = ref, loss = ppo_clip(0.2) + 0.1 * kl(k3),
            optimizer = adamw(1e-3))
  }
}
"""
TINY = 'tiny(qwen3, alphabet = "0123456789", lora = LORA)'


def lowered(
    lora: str, model: str = TINY, reference: str = "r", base_dir: Path | None = None, sets: list[str] | None = None
) -> Lowered:
    text = FLOW.replace("MODEL", model).replace("LORA", lora).replace("REFERENCE", reference)
    return lower(parse(SourceFile("f.rlflow", text)), base_dir, overrides=sets or [])


def lora_of(found: Lowered) -> ops.Lora | None:
    source = found.flow.models["m"].source
    assert isinstance(source, ops.TinyModel | ops.HfModel | ops.PresetModel)
    return source.lora


def problems(*arguments: str, **named: object) -> list[Diagnostic]:
    with pytest.raises(CompileError) as failure:
        lowered(*arguments, **named)  # type: ignore[arg-type]
    return list(failure.value.diagnostics)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lora()", ops.Lora(rank=16, alpha=32.0, targets="all_linear")),
        ("lora(rank)", ops.Lora(rank=4, alpha=8.0, targets="all_linear")),
        ("lora(rank = 8, alpha = 4, targets = attention)", ops.Lora(rank=8, alpha=4.0, targets="attention")),
        ('lora(targets = "attention", init_seed = 3)', ops.Lora(rank=16, alpha=32.0, targets="attention", init_seed=3)),
        ('lora(targets = ["v_proj", "q_proj"])', ops.Lora(rank=16, alpha=32.0, targets=("v_proj", "q_proj"))),
        ('lora(targets = "q_proj", dropout = 0)', ops.Lora(rank=16, alpha=32.0, targets=("q_proj",))),
        ('lora(targets = ["layers.1.mlp.up_proj"])', ops.Lora(rank=16, alpha=32.0, targets=("layers.1.mlp.up_proj",))),
        ("none", None),
    ],
)
def test_what_is_written_is_what_is_meant(text: str, expected: ops.Lora | None) -> None:
    found = lowered(text)
    assert lora_of(found) == expected
    assert found.warnings == ()
    assert parse_flow(print_flow(found.flow)).models["m"].source == found.flow.models["m"].source


@pytest.mark.parametrize(
    "model", ['hf("somewhere/model", compute = bf16, lora = LORA)', 'preset("qwen3_8b", lora = LORA)', TINY]
)
def test_every_model_with_weights_takes_adapters(model: str) -> None:
    assert lora_of(lowered("lora(rank = 8)", model)) == ops.Lora(rank=8, alpha=16.0, targets="all_linear")


def test_settings_are_overridden() -> None:
    found = lora_of(lowered("lora(rank = 4)", sets=["m.lora.rank=2", 'm.lora.targets=["o_proj"]', "m.lora.alpha=3"]))
    assert found == ops.Lora(rank=2, alpha=3.0, targets=("o_proj",))
    assert lora_of(lowered("lora(rank = 4)", sets=["m.lora=none"])) is None


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("lora(dropout = 0.1)", "RLF1010", "`dropout` of `lora` must be 0, and is 0.1"),
        ("lora(rank = 0)", "RLF1010", "`rank` must be at least 1"),
        ("lora(rank = 1.5)", "RLF1007", "`rank` is a whole number"),
        ("lora(alpha = 0)", "RLF1010", "`alpha` must be above 0"),
        ("lora(rank = 4 tokens)", "RLF1005", "`rank` is a whole number without a unit"),
        ("lora(r = 4)", "RLF1003", "`r`"),
        ("lora(targets = atention)", "RLF1001", "`atention`"),
        ("lora(targets = [])", "RLF1007", "a list of module names"),
        ("lora(targets = [1])", "RLF1007", "a list of module names"),
        ("lora(targets = 3)", "RLF1007", "a list of module names"),
        ('lora(targets = ["q_proj", "q_proj"])', "RLF1002", "`targets` names `q_proj` twice"),
        ("16", "RLF1007", "`lora` is a call of `lora`, or `none`"),
        ("attention", "RLF1007", "`lora` is a call of `lora`, or `none`"),
        ("retry(2)", "RLF1007", "`lora` is a call of `lora`, or `none`"),
    ],
)
def test_what_is_refused(text: str, code: str, words: str) -> None:
    (found,) = problems(text)
    assert found.code == code
    assert words in found.message


def test_dropout_is_refused_with_the_reason() -> None:
    (found,) = problems("lora(dropout = 0.05)")
    assert "log-probabilities" in found.notes[0]


def test_layers_that_the_architecture_does_not_have() -> None:
    found = problems('lora(targets = ["q_prj", "up_proj", "lm_head"])')
    assert [d.code for d in found] == ["RLF1001", "RLF1001"]
    assert "linear layer of `m`" in found[0].message
    assert "q_proj" in " ".join(found[0].help)
    assert "o_proj" in " ".join(found[1].help + found[1].notes)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        sizes = {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
            "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 64, "head_dim": 8,
        }  # fmt: skip
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind, **sizes}), "utf-8")
        return tmp_path

    return make


def test_a_checkpoint_beside_the_file_is_checked(folder: Callable[[str], Path]) -> None:
    (found,) = problems('lora(targets = ["query"])', 'hf("model", lora = LORA)', base_dir=folder("llama"))
    assert found.code == "RLF1001"


def test_an_unknown_architecture_is_left_to_the_run(folder: Callable[[str], Path]) -> None:
    found = lowered('lora(targets = ["query"])', 'hf("model", lora = LORA)', base_dir=folder("something_new"))
    assert lora_of(found) == ops.Lora(rank=16, alpha=32.0, targets=("query",))


def test_the_actor_is_no_reference_of_itself() -> None:
    """Without a declared frozen copy nobody says that the adapters are to be off."""
    (found,) = problems("lora()", reference="m")
    assert found.code == "RLF1016"
    assert found.help == ("declare `model reference = frozen(m)`",)


def test_the_actor_is_no_reference_of_itself_by_way_of_a_sum() -> None:
    for column in ("1.0 * ref", "0.5 * ref + 0.5 * ref"):
        text = FLOW.replace("MODEL", TINY).replace("LORA", "lora()").replace("REFERENCE", "m")
        with pytest.raises(CompileError) as failure:
            lower(parse(SourceFile("f.rlflow", text.replace("reference = ref", f"reference = {column}"))), None)
        assert [d.code for d in failure.value.diagnostics] == ["RLF1016"]


def test_adapters_that_nothing_trains_are_warned_of() -> None:
    text = FLOW.replace("MODEL", TINY).replace("LORA", "none").replace("REFERENCE", "r")
    text = text.replace("frozen(m)", TINY.replace("LORA", "lora()"))
    (found,) = lower(parse(SourceFile("f.rlflow", text)), None).warnings
    assert (found.code, "the adapters of `r` are never trained" in found.message) == ("RLF1013", True)

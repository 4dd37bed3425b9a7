"""Prompts become ids: too long ones by the declared rule, one BOS whatever the template does, system messages kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlflow.backends.ray_runtime.data import DataSet, open_data
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import FileData

TURNS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
ONE_BOS = "{{ bos_token }}" + TURNS
NO_BOS = TURNS
TWO_BOS = "{{ bos_token }}{{ bos_token }}" + TURNS

SYSTEM = {"role": "system", "content": "be short"}
USER = {"role": "user", "content": "1+1="}
MODEL = {"role": "assistant", "content": "2"}


def tokenizer(template: str | None, *, adds_bos: bool = True) -> Any:
    """One token per character."""
    alphabet = ["<s>", "</s>", *sorted(set("abcdefghijklmnopqrstuvwxyz0123456789+= <>/"))]
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def opened(folder: Path, *prompts: Any, **options: Any) -> DataSet:
    (folder / "d.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "answer": i}) + "\n" for i, p in enumerate(prompts))
    )
    return open_data(FileData(path="d.jsonl", format="jsonl", answer="answer", **options), folder, "questions")


def failure(data: DataSet, tokenizer: Any, most: int | None) -> RunFailure:
    with pytest.raises(RunFailure) as caught:
        data.render(tokenizer, most)
    return caught.value


# --- N1: one prompt of 600 tokens, room for 512 -------------------------------------------------------------------


def three(folder: Path, **options: Any) -> DataSet:
    return opened(folder, "a" * 511, "b" * 87 + "c" * 512, "a" * 10, **options)


def test_error_names_the_row(tmp_path: Path) -> None:
    error = failure(three(tmp_path), tokenizer(None), 512)
    assert error.code == "RLF5007"
    assert error.message.startswith("d.jsonl:2: the prompt has 600 tokens, but only 512 tokens")
    assert "`too_long = drop`" in error.help[1]


def test_drop_leaves_the_row_out(tmp_path: Path) -> None:
    data = three(tmp_path, too_long="drop", shuffle=False)
    data.render(tokenizer(None), 512)
    assert len(data) == 2
    assert data.dropped == 1
    assert data.places == ["d.jsonl:1", "d.jsonl:3"]
    batch, _ = data.take(0, 3, seed=0)
    assert [record["answer"] for record in batch.items("record")] == [0, 2, 0]
    assert batch.packed("prompt_ids").lengths.tolist() == [512, 11, 512]
    facts = data.facts()
    assert (facts["rows"], facts["dropped"], facts["truncated"]) == (2, 1, 0)


def test_truncate_keeps_the_last_tokens(tmp_path: Path) -> None:
    made = tokenizer(None)
    data = three(tmp_path, too_long="truncate")
    data.render(made, 512)
    assert (len(data), data.truncated, data.dropped) == (3, 1, 0)
    assert data.prompt_ids is not None
    assert data.prompt_ids[1].tolist() == [made.convert_tokens_to_ids("c")] * 512
    assert data.prompt_texts[1].replace(" ", "") == "c" * 512
    assert data.prompt_ids[0].tolist()[0] == 0


def test_length_is_counted_after_the_template(tmp_path: Path) -> None:
    data = opened(tmp_path, [USER], "a", too_long="drop")
    data.render(tokenizer(ONE_BOS), 11)  # <s> <user> 1+1= > has 12
    assert (len(data), data.dropped) == (1, 1)


def test_nothing_left_is_an_error_whatever_the_rule(tmp_path: Path) -> None:
    for rule in ("error", "drop"):
        assert failure(opened(tmp_path, "abc", "abcd", too_long=rule), tokenizer(None), 3).code == "RLF5007"
    assert failure(opened(tmp_path, "abc", too_long="truncate"), tokenizer(None), 0).code == "RLF5007"


# --- N2: BOS and system messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [ONE_BOS, NO_BOS, TWO_BOS])
@pytest.mark.parametrize("chat", [[SYSTEM, USER], [USER], [SYSTEM, USER, MODEL, USER], [USER, MODEL, USER]])
def test_exactly_one_bos(tmp_path: Path, template: str, chat: list[dict[str, str]]) -> None:
    data = opened(tmp_path, chat)
    data.render(tokenizer(template), None)
    assert data.prompt_ids is not None
    ids = data.prompt_ids[0].tolist()
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_a_tokenizer_that_adds_no_bos_gets_none(tmp_path: Path) -> None:
    data = opened(tmp_path, [USER], "1+1=")
    data.render(tokenizer(NO_BOS, adds_bos=False), None)
    assert data.prompt_ids is not None
    assert all(0 not in ids.tolist() for ids in data.prompt_ids)


REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + ONE_BOS
LEAVES_OUT = (
    "{{ bos_token }}{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)
FOLDS_IN = (
    "{{ bos_token }}{% for m in messages if m['role'] != 'system' %}<user>"
    "{% if loop.first and messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }} {% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


@pytest.mark.parametrize("template", [REFUSES, LEAVES_OUT])
@pytest.mark.parametrize("system", [None, "be short"])
def test_a_template_without_a_system_role(tmp_path: Path, template: str, system: str | None) -> None:
    prompt = [USER] if system else [SYSTEM, USER]
    error = failure(opened(tmp_path, prompt, system=system), tokenizer(template), None)
    assert error.code == "RLF5015"
    assert error.message.startswith("d.jsonl:1: ")
    assert "no place for a system message" in error.message
    opened(tmp_path, [USER]).render(tokenizer(template), None)


def test_a_system_message_folded_into_the_users_is_fine(tmp_path: Path) -> None:
    data = opened(tmp_path, [{**SYSTEM, "content": " be short\n"}, USER])
    data.render(tokenizer(FOLDS_IN), None)
    assert data.prompt_texts == ["<s><user>be short 1+1="]


def test_a_template_that_refuses_every_chat_is_no_matter_of_the_system_message(tmp_path: Path) -> None:
    error = failure(opened(tmp_path, [SYSTEM, USER]), tokenizer("{{ raise_exception('never') }}"), None)
    assert error.code == "RLF5002"

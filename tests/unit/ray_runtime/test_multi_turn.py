"""Conversations: what is appended, what is masked, where they end, and that the cache goes on rightly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlflow.backends.ray_runtime import rollout
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.conversation import template_piece
from rlflow.backends.ray_runtime.decoder import DenseDecoder, GenericDecoder
from rlflow.backends.ray_runtime.environment_worker import Observation, Turn
from rlflow.backends.ray_runtime.generic_decoder import Parked
from rlflow.backends.ray_runtime.models import END_TOKEN, LoadedModel, load_model
from rlflow.backends.ray_runtime.randomness import uniforms
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.sampling import Sampler
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate, HfModel, TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")

ALPHABET = "0123456789+=?;"
TEXTS = ["1+2=", "34+5=", "7", "100+200+300=", "34+5="]
END = len(ALPHABET) + 1


def tiny(architecture: Literal["qwen3", "llama"] = "qwen3", **sizes: Any) -> LoadedModel:
    source = TinyModel(architecture=architecture, alphabet=ALPHABET, hidden=32, **{"context": 96, **sizes})
    loaded = load_model(source, Path())
    with torch.no_grad():  # random weights give nearly uniform tokens; larger ones make every token's odds differ
        for parameter in loaded.model.parameters():
            parameter.mul_(2.0)
    return loaded


@pytest.fixture(params=["qwen3", "llama", "gpt2"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    return make(request.param, tmp_path)


def make(kind: Literal["qwen3", "llama", "gpt2"], tmp_path: Path) -> LoadedModel:
    if kind != "gpt2":
        return tiny(kind)
    size = len(ALPHABET) + 2
    config = GPT2Config(
        vocab_size=size, n_positions=96, n_embd=32, n_layer=2, n_head=2, eos_token_id=END, bos_token_id=None
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny().tokenizer.save_pretrained(tmp_path)
    return load_model(HfModel(path=str(tmp_path)), Path())


class Answers:
    """An environment from a function of a turn; keeps what it was asked."""

    name = "answers"

    def __init__(self, function: Callable[[Turn], str | None]) -> None:
        self.function = function
        self.seen: list[list[Turn]] = []
        self.forgotten = 0

    def step(self, turns: Sequence[Turn]) -> list[Observation | None]:
        self.seen.append(list(turns))
        texts = [self.function(turn) for turn in turns]
        return [None if text is None else Observation(text) for text in texts]

    def forget(self) -> None:
        self.forgotten += 1


def prompts(loaded: LoadedModel, texts: list[str], uids: list[int] | None = None) -> Batch:
    return Batch(
        len(texts),
        {
            "uid": np.array(uids if uids is not None else range(len(texts)), dtype=np.int64),
            "record": [{"prompt": text, "answer": None} for text in texts],
            "prompt_ids": Packed.from_rows([loaded.encode(text) for text in texts], torch.int64),
            "prompt_text": texts,
        },
    )


def talk(
    loaded: LoadedModel,
    batch: Batch,
    answer: Callable[[Turn], str | None] | Answers,
    decoder: Any = None,
    **options: Any,
) -> Batch:
    engine = RolloutEngine(loaded, "fp32")
    if decoder is not None:
        engine._decoder = decoder
    op = Generate(model="actor", environment="game", **{"n": 4, "max_new": 40, "turns": 3, **options})
    environments = answer if isinstance(answer, Answers) else Answers(answer)
    return engine.generate(batch, op, seed=3, step=5, version=9, environments=environments)


def column(samples: Batch, name: str) -> list[list[int]]:
    packed = samples.packed(name)
    return [packed.row(index).tolist() for index in range(samples.rows)]


def by_length(turn: Turn) -> str | None:
    """Observations of different lengths, some empty, some none."""
    size = (len(turn.text) + turn.number + turn.uid) % 5
    return None if size == 4 else "0123456789;"[: size * 3]


# --- a model that follows a script -----------------------------------------------------------------------------------


class Scripted:
    """A decoder that continues each sequence by `next_token(ids)`, and checks that it is fed what it said."""

    def __init__(self, next_token: Callable[[list[int]], int]) -> None:
        self.next_token = next_token

    def drop(self) -> None:
        pass

    def refresh(self) -> None:
        pass

    def _logits(self) -> torch.Tensor:
        chosen = torch.tensor([self.next_token(row) for row in self.rows])
        return torch.nn.functional.one_hot(chosen, END + 1).float() * 50

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, max_new: int) -> torch.Tensor:
        self.rows = [row[len(row) - size :] for row, size in zip(ids.tolist(), lengths.tolist(), strict=True)]
        return self._logits()

    def select(self, rows: torch.Tensor) -> None:
        self.rows = [list(self.rows[row]) for row in rows.tolist()]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        return self._logits()

    def park(self, rows: torch.Tensor) -> Parked:
        kept = [list(self.rows[row]) for row in rows.tolist()]
        width = max(len(row) for row in kept)
        padded = torch.tensor([row + [-1] * (width - len(row)) for row in kept])
        return Parked([padded], [], torch.zeros(len(kept), dtype=torch.int64))

    def resume(
        self, parked: Sequence[Parked], ids: torch.Tensor, lengths: torch.Tensor, new: int, max_new: int
    ) -> torch.Tensor:
        stored = [row for part in parked for row in part.keys[0].tolist()]
        self.prefill(ids, lengths, max_new)
        first = ids.shape[1] - new
        for old, row, size in zip(stored, self.rows, lengths.tolist(), strict=True):
            cached = first - (ids.shape[1] - size)
            assert old[: max(cached, 0)] == row[: max(cached, 0)]
        return self._logits()


def script(loaded: LoadedModel, lines: dict[str, str]) -> Scripted:
    """`lines`: by what the model has read so far, what it says next; then it ends its turn."""

    def next_token(ids: list[int]) -> int:
        text = "".join("|" if token == END else ALPHABET[token] for token in ids)
        for read, said in sorted(lines.items(), key=lambda line: -len(line[0])):
            if text.startswith(read) and said.startswith(text[len(read) :]):
                rest = said[len(text) - len(read) :]
                return loaded.encode(rest[0])[0] if rest else END
        return END

    return Scripted(next_token)


LINES = {
    "1+2=": "1+2?",
    "1+2=1+2?|3;": "3",
    "34+5=": "?",
    "34+5=?|39;": "3?",
    "34+5=?|39;3?|0;": "39",
    "7": "7",
}


def calculator(turn: Turn) -> str | None:
    return {"1+2?": "3;", "?": "39;", "3?": "0;"}.get(turn.text)


def test_tokens_masks_and_text_are_exact() -> None:
    loaded = tiny()
    environment = Answers(calculator)
    batch = prompts(loaded, ["1+2=", "34+5=", "7"], [10, 11, 12])
    samples = talk(loaded, batch, environment, script(loaded, LINES), n=2, temperature=0.0)

    def ids(text: str) -> list[int]:
        return [END if character == "|" else ALPHABET.index(character) for character in text]

    expected = [ids("1+2?|3;3|"), ids("?|39;3?|0;39|"), ids("7|")]
    masks = [[1] * 5 + [0] * 2 + [1] * 2, [1] * 2 + [0] * 3 + [1] * 3 + [0] * 2 + [1] * 3, [1] * 2]
    assert column(samples, "response_ids") == [row for row in expected for _ in range(2)]
    assert column(samples, "mask") == [row for row in masks for _ in range(2)]
    assert samples.packed("mask").values.dtype == torch.int64
    assert samples.items("text") == ["1+2?3;3"] * 2 + ["?39;3?0;39"] * 2 + ["7"] * 2
    assert samples.array("turns").tolist() == [2, 2, 3, 3, 1, 1]
    assert samples.array("turns").dtype == np.int64
    assert not samples.array("truncated").any()
    logprobs, mask = samples.packed("logprobs").values, samples.packed("mask").values
    assert bool((logprobs[mask == 0] == 0).all())
    asked = [[(turn.uid, turn.index, turn.number, turn.text) for turn in turns] for turns in environment.seen]
    assert asked[1] == [(10, 0, 2, "3"), (10, 1, 2, "3"), (11, 0, 2, "3?"), (11, 1, 2, "3?")]
    assert len(asked) == 2  # nobody is asked after the third and last turn
    assert environment.seen[0][4].record == {"prompt": "7", "answer": None}
    assert environment.forgotten == 1


@pytest.mark.parametrize(
    ("max_new", "turns", "text", "truncated"),
    [
        (40, 1, "?", False),
        (40, 2, "?39;3?", False),
        (1, 3, "?", True),  # no end token
        (2, 3, "?", True),  # the end token fits, the observation does not
        (5, 3, "?", True),  # the observation fits, but no answer to it
        (6, 3, "?39;3", True),
        (7, 3, "?39;3?", True),
        (12, 3, "?39;3?0;39", True),
        (13, 3, "?39;3?0;39", False),
    ],
)
def test_where_a_conversation_ends(max_new: int, turns: int, text: str, truncated: bool) -> None:
    loaded = tiny()
    options = {"n": 1, "temperature": 0.0, "max_new": max_new, "turns": turns}
    samples = talk(loaded, prompts(loaded, ["34+5="]), calculator, script(loaded, LINES), **options)
    assert samples.items("text") == [text]
    assert samples.array("truncated").tolist() == [truncated]
    assert column(samples, "mask")[0][-1] == 1  # the last token is always the model's
    assert len(column(samples, "response_ids")[0]) <= max_new


def test_an_end_at_max_new_is_no_cut_when_the_environment_is_through() -> None:
    loaded = tiny()
    samples = talk(loaded, prompts(loaded, ["7"]), calculator, script(loaded, LINES), n=1, max_new=2, temperature=0.0)
    assert (samples.items("text"), samples.array("truncated").tolist()) == (["7"], [False])


# --- real models -----------------------------------------------------------------------------------------------------


def test_equals_a_single_turn_when_the_environment_ends_at_once(loaded: LoadedModel) -> None:
    op = Generate(model="actor", n=4, max_new=30)
    batch = prompts(loaded, TEXTS)
    single = RolloutEngine(loaded, "fp32").generate(batch, op, seed=3, step=5, version=9)
    many = talk(loaded, batch, lambda turn: None, max_new=30)
    assert set(many.columns) - set(single.columns) == {"mask", "turns"}
    for name, wanted in single.columns.items():
        got: Any = many.columns[name]
        if isinstance(wanted, Packed):
            assert torch.equal(many.packed(name).values, wanted.values), name
            assert torch.equal(many.packed(name).offsets, wanted.offsets), name
        else:
            assert list(got) == list(wanted), name
    assert bool(many.packed("mask").values.all())
    assert many.array("turns").tolist() == [1] * 20


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_the_continued_cache_gives_the_trainers_logprobs(loaded: LoadedModel, temperature: float) -> None:
    samples = talk(loaded, prompts(loaded, TEXTS), by_length, turns=5, max_new=60, temperature=temperature)
    mask = samples.packed("mask").values
    if temperature:
        assert len(set(samples.array("turns").tolist())) > 2
        assert 0 < int((mask == 0).sum()) < len(mask)
    trained = Trainer(loaded, "fp32").logprobs(samples, temperature).values
    behaviour = samples.packed("logprobs").values
    torch.testing.assert_close(trained[mask == 1], behaviour[mask == 1], atol=1e-5, rtol=0)
    assert bool((behaviour[mask == 0] == 0).all())


def test_every_token_is_drawn_with_the_number_of_its_place(loaded: LoadedModel) -> None:
    samples = talk(loaded, prompts(loaded, TEXTS, [10, 11, 12, 13, 14]), by_length, turns=5, max_new=60)
    ids, masks, asked = samples.packed("prompt_ids"), samples.packed("mask"), 0
    for row in range(samples.rows):
        response, mask = samples.packed("response_ids").row(row), masks.row(row) == 1
        with torch.no_grad():
            whole = loaded.model(torch.cat([ids.row(row), response])[None]).logits[0, len(ids.row(row)) - 1 : -1]
        draws = torch.from_numpy(uniforms(3, 5, int(samples.array("uid")[row]), row % 4, 60))[: len(response)]
        chosen, _ = Sampler(1.0)(whole, draws)
        assert torch.equal(chosen[mask], response[mask])
        asked += not bool(mask.all())
    assert asked > 5


def test_conversations_do_not_depend_on_their_batch(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"turns": 4, "max_new": 50}
    batch = prompts(loaded, TEXTS, [10, 11, 12, 13, 14])
    together = talk(loaded, batch, by_length, **options)
    for index, text in enumerate(TEXTS):
        alone = talk(loaded, prompts(loaded, [text], [10 + index]), by_length, **options)
        part = together.select(range(4 * index, 4 * index + 4))
        for name in ("response_ids", "mask"):
            assert column(alone, name) == column(part, name)
        assert alone.array("turns").tolist() == part.array("turns").tolist()
    for share, rows in ((10**9, 256), (0, 256), (4, 8)):  # at every finished row, never, in waves
        monkeypatch.setattr(rollout, "_COMPACT_SHARE", share)
        monkeypatch.setattr(rollout, "_MAX_ROWS", rows)
        again = talk(loaded, batch, by_length, **options)
        assert column(again, "response_ids") == column(together, "response_ids")


def test_both_decoders_resume_alike() -> None:
    model = tiny().model
    fast, plain = DenseDecoder(model), GenericDecoder(model)
    ids = torch.tensor([[0, 0, 3, 4, 5], [1, 2, 3, 4, 5], [0, 0, 0, 0, 7]])
    steps = torch.tensor([[1, 2, 3, 4]] * 3)
    longer = torch.tensor([[0, 0, 3, 4, 5, 1, 2, 8, 9, 7], [0, 0, 0, 0, 0, 0, 0, 7, 1, 6]])  # rows 0 and 2
    lengths = torch.tensor([8, 3])
    with torch.inference_mode():
        for decoder in (fast, plain):
            decoder.prefill(ids, torch.tensor([3, 5, 1]), 40)
            decoder.select(torch.arange(3))
            for step in range(4):
                decoder.step(steps[:, step])
        parked = [fast.park(torch.tensor([2])), fast.park(torch.tensor([1, 0])).select(torch.tensor([1]))]
        order = [1, 0]
        got = fast.resume(parked, longer[order], lengths[order], 3, 40)
        wanted = plain.resume([], longer[order], lengths[order], 3, 40)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
        for step in range(30):
            tokens = torch.tensor([step % 12, (step * 5) % 12])
            torch.testing.assert_close(fast.step(tokens), plain.step(tokens), atol=2e-5, rtol=1e-4)


# --- the observation's form -------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_the_templates_piece() -> None:
    tokenizer = tiny().tokenizer
    tokenizer.chat_template = CHATML
    piece = template_piece(tokenizer, Observation("42", "tool"), (END,))
    assert piece == "\n<|im_start|>tool\n42<|end|>\n<|im_start|>assistant\n"
    tokenizer.chat_template = CHATML.replace("<|end|>", "</s>")
    with pytest.raises(ValueError, match="does not end an assistant message with an end token"):
        template_piece(tokenizer, Observation("42"), (END,))


def test_a_chat_reads_the_observation_as_a_message() -> None:
    loaded = tiny()
    compact = "{% for m in messages %}{{ m.content + '<|end|>' + ';' }}{% endfor %}{{ '=' }}"
    loaded.tokenizer.chat_template = compact
    batch = prompts(loaded, ["34+5="])
    batch.items("record")[0]["prompt"] = [{"role": "user", "content": "34+5"}]
    environment = Answers(lambda turn: "39")
    lines = {"34+5=": "?", "34+5=?|;39|;=": "1"}
    samples = talk(loaded, batch, environment, script(loaded, lines), n=1, turns=2, temperature=0.0)
    said = "".join("|" if token == END else ALPHABET[token] for token in column(samples, "response_ids")[0])
    assert said == "?|;39|;=1|"
    assert column(samples, "mask")[0] == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert END_TOKEN not in samples.items("text")[0]


def test_an_observation_outside_the_alphabet_is_a_failure() -> None:
    loaded = tiny()
    with pytest.raises(RunFailure, match=r"returned the observation .* cannot read") as caught:
        talk(loaded, prompts(loaded, ["34+5="], [6]), lambda turn: "3x9", script(loaded, LINES), n=1, temperature=0.0)
    assert caught.value.code == "RLF5017"
    assert "turn 1 of sample 0 of the prompt with uid 6" in caught.value.message
    assert "'x'" in caught.value.notes[-1]


def test_generate_without_its_environment() -> None:
    loaded = tiny()
    op = Generate(model="actor", n=1, max_new=4, environment="game", turns=2)
    with pytest.raises(AssertionError, match="game"):
        RolloutEngine(loaded, "fp32").generate(prompts(loaded, ["7"]), op, seed=0, step=0, version=0)

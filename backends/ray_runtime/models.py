"""Models and tokenizers: a Hugging Face folder, or a tiny one made on the fly. Weights are always held in fp32."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlflow.backends.ray_runtime.attention import use_short_attention
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import HfModel, TinyModel

WEIGHT_FILES: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
END_TOKEN: Final = "<|end|>"
PAD_TOKEN: Final = "<|pad|>"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_NO_LIMIT = 1 << 30


@dataclass
class LoadedModel:
    """A causal language model with what sampling and training must know about its tokens."""

    model: PreTrainedModel
    """fp32 master weights, in eval mode for good: dropout would make trainer and rollout disagree."""
    tokenizer: PreTrainedTokenizerFast
    eos_ids: tuple[int, ...]
    """Every token that ends a response, ascending."""
    pad_id: int
    context: int
    """Largest number of tokens in one sequence."""

    def __post_init__(self) -> None:
        self._alphabet = _alphabet(self.tokenizer)
        use_short_attention(self.model)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. RLF5002 when a character tokenizer has no token for a character of it."""
        if self._alphabet is None:
            return list(self.tokenizer(text)["input_ids"])
        for character in text:
            if character not in self._alphabet:
                raise RunFailure(
                    "RLF5002",
                    f"character {character!r} of the prompt {_shorten(text)} is not in the model's alphabet",
                    help=("add the character to the model's alphabet, or remove it from the data",),
                )
        return [self._alphabet[character] for character in text]


def load_model(source: HfModel | TinyModel, base_dir: Path) -> LoadedModel:
    """The model a flow declares. A relative path is looked up below `base_dir`, the .rlflow file's folder.

    RunFailure: RLF5001 no or incomplete weights, RLF5013 anything else that keeps the model from loading.
    """
    return _make_tiny(source) if isinstance(source, TinyModel) else _load_folder(source, base_dir)


def save_model(loaded: LoadedModel, folder: Path) -> None:
    """Write a checkpoint that AutoModelForCausalLM and AutoTokenizer load: safetensors, tokenizer, configs."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        loaded.model.save_pretrained(folder)
    except ValueError:
        # Published generation configs may break transformers' own rules (a temperature without sampling); only the
        # token ids in them matter here.
        old = loaded.model.generation_config
        loaded.model.generation_config = GenerationConfig(
            eos_token_id=list(loaded.eos_ids), pad_token_id=loaded.pad_id, bos_token_id=old.bos_token_id
        )
        loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


# --- tiny models ---------------------------------------------------------------------------------------------------


def _make_tiny(source: TinyModel) -> LoadedModel:
    tokenizer = _character_tokenizer(source.alphabet)
    vocabulary = tokenizer.get_vocab()
    if source.hidden % source.heads or source.heads % source.kv_heads or (source.hidden // source.heads) % 2:
        raise RunFailure(
            "RLF5013",
            f"the tiny model's hidden {source.hidden}, heads {source.heads} and kv_heads {source.kv_heads} do not fit",
            notes=("heads must divide hidden into even parts, kv_heads must divide heads",),
        )
    eos, pad = vocabulary[END_TOKEN], vocabulary[PAD_TOKEN]
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": source.hidden,
        "intermediate_size": source.intermediate,
        "num_hidden_layers": source.layers,
        "num_attention_heads": source.heads,
        "num_key_value_heads": source.kv_heads,
        "head_dim": source.hidden // source.heads,
        "max_position_embeddings": source.context,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos,
        # Only the tokenizer knows the padding token. The model would give it an embedding of 0 that never learns, and
        # yet it can be sampled and read like any other token.
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
        torch.manual_seed(source.init_seed)
        model: PreTrainedModel = (
            Qwen3ForCausalLM(Qwen3Config(**settings))
            if source.architecture == "qwen3"
            else LlamaForCausalLM(LlamaConfig(**settings))
        )
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    return LoadedModel(model.to(torch.float32).eval(), tokenizer, (eos,), pad, source.context)


def _character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character, ids in the alphabet's order, then padding and end."""
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if repeated or not alphabet:
        raise RunFailure(
            "RLF5013",
            f"the alphabet has {repeated[0]!r} more than once" if repeated else "the alphabet is empty",
            help=("list every character of prompts and answers once",),
        )
    vocabulary = {character: index for index, character in enumerate([*alphabet, PAD_TOKEN, END_TOKEN])}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token=PAD_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=_NO_LIMIT,
    )


def _alphabet(tokenizer: PreTrainedTokenizerFast) -> dict[str, int] | None:
    """Ids by character of a character tokenizer, None for any other."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(getattr(backend, "model", None), tokenizer_models.WordLevel):
        return None
    special = set(tokenizer.all_special_tokens)
    words = {word: index for word, index in tokenizer.get_vocab().items() if word not in special}
    return words if all(len(word) == 1 for word in words) else None


# --- checkpoints ---------------------------------------------------------------------------------------------------


def _load_folder(source: HfModel, base_dir: Path) -> LoadedModel:
    folder = _find_folder(source.path, base_dir)
    if not (folder / "config.json").is_file():
        raise RunFailure(
            "RLF5013",
            f"`{folder}` is not a model folder: it has no config.json",
            help=("give the folder of a Hugging Face checkpoint",),
        )
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise RunFailure(
            "RLF5001",
            f"model folder `{folder}` has no weights",
            notes=("looked for " + ", ".join(WEIGHT_FILES),),
            help=("copy the checkpoint's weight files into the folder",),
        )
    if not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
        # transformers would make an empty tokenizer and say nothing.
        raise RunFailure(
            "RLF5013",
            f"model folder `{folder}` has no tokenizer",
            notes=("looked for " + ", ".join(TOKENIZER_FILES),),
        )
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the file's fault, the user gets one sentence
        raise _bad_model(folder, error) from error
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        # transformers would fill them with random numbers and only warn.
        raise RunFailure(
            "RLF5001",
            f"the checkpoint in `{folder}` lacks {len(missing)} of the model's tensors",
            notes=("missing: " + ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else ""),),
        )
    if not _head_is_linear(model):
        raise RunFailure(
            "RLF5013",
            f"model type `{model.config.model_type}` in `{folder}` is not supported",
            notes=("its logits are more than `lm_head` of the last hidden state (scaled or capped, say)",),
        )
    eos_ids = _end_tokens(model, tokenizer)
    if not eos_ids:
        raise RunFailure("RLF5013", f"neither the generation config nor the tokenizer in `{folder}` has an end token")
    pad = next((p for p in (tokenizer.pad_token_id, model.config.pad_token_id) if p is not None), eos_ids[0])
    context = getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT
    return LoadedModel(model.eval(), tokenizer, eos_ids, int(pad), int(context))


def _find_folder(path: str, base_dir: Path) -> Path:
    """The local folder, or the cached or downloaded snapshot when `path` is a hub name instead."""
    folder = base_dir / Path(path).expanduser()  # an absolute path replaces base_dir
    if folder.is_dir():
        return folder
    cause = ""
    if _HUB_NAME.fullmatch(path):
        from huggingface_hub import snapshot_download

        for offline in (True, False):
            try:
                return Path(snapshot_download(path, local_files_only=offline))
            except Exception as error:  # not cached, no network, no such name
                cause = _first_line(error)
    notes = (f"looked for the folder `{folder}`",)
    raise RunFailure(
        "RLF5013",
        f"model `{path}` not found",
        notes=(*notes, f"as a Hugging Face hub name: {cause}") if cause else notes,
        help=("give the path of a checkpoint folder, relative to the .rlflow file",),
    )


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for ids in (getattr(generation, "eos_token_id", None), model.config.eos_token_id, tokenizer.eos_token_id):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def _head_is_linear(model: PreTrainedModel) -> bool:
    """Whether logits = lm_head(hidden), tried on two tokens: the trainer computes them so, at response tokens only."""
    ids = torch.tensor([[0, 1]])
    try:
        with torch.no_grad():
            hidden = model.eval().get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            logits = model(input_ids=ids, use_cache=False).logits
            return bool(torch.allclose(model.lm_head(hidden), logits, atol=1e-4))
    except (AttributeError, TypeError):
        return False


def _bad_model(folder: Path, error: Exception) -> RunFailure:
    cause = f"{type(error).__name__}: {_first_line(error)}"
    return RunFailure("RLF5013", f"the model in `{folder}` does not load", notes=(cause,))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")

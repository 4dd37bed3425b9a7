"""Models and tokenizers: a Hugging Face folder, or a tiny one made on the fly. Weights are always held in fp32."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlflow.backends.ray_runtime.adapters import Adapters, twin
from rlflow.backends.ray_runtime.attention import use_short_attention
from rlflow.backends.ray_runtime.heads import (
    ValueHeadModel,
    load_head,
    load_value_weights,
    save_head,
    save_value_model,
    score_is_linear,
    value_head_on,
    value_model_of,
)
from rlflow.backends.ray_runtime.pretrained import WEIGHT_FILES as WEIGHT_FILES
from rlflow.backends.ray_runtime.pretrained import find_folder, read_folder
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import HfModel, PresetModel, RewardModel, TinyModel

END_TOKEN: Final = "<|end|>"
PAD_TOKEN: Final = "<|pad|>"
_NO_LIMIT = 1 << 30


@dataclass
class LoadedModel:
    """A causal language, value or reward model with what sampling and training must know about its tokens."""

    model: PreTrainedModel | ValueHeadModel
    """fp32 master weights, in eval mode for good: dropout would make trainer and rollout disagree."""
    tokenizer: PreTrainedTokenizerFast
    eos_ids: tuple[int, ...]
    """Every token that ends a response, ascending."""
    pad_id: int
    context: int
    """Largest number of tokens in one sequence."""
    adapters: Adapters | None = None
    """What is trained instead of the weights."""
    critic: ValueHeadModel | None = None
    """The value model whose body is this model's own; trained with it."""

    def __post_init__(self) -> None:
        self._alphabet = _alphabet(self.tokenizer)
        use_short_attention(self.model)

    @cached_property
    def ids_without_token(self) -> tuple[int, ...]:
        """Ids below the model's vocabulary size that the tokenizer does not know, ascending: many a checkpoint pads its
        embedding. None ends a response or stands for a text, so sampling never takes one."""
        known = {*self.tokenizer.get_vocab().values(), *self.eos_ids}
        return tuple(i for i in range(int(self.model.config.vocab_size)) if i not in known)

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


def load_model(source: HfModel | TinyModel | RewardModel | PresetModel, base_dir: Path) -> LoadedModel:
    """The model a flow declares. A relative path is looked up below `base_dir`, the .rlflow file's folder.

    RunFailure: RLF5001 no or incomplete weights, RLF4003 an architecture without weights, RLF5013 anything else that
    keeps the model from loading.
    """
    if isinstance(source, PresetModel):
        raise RunFailure(
            "RLF4003",
            f"the model `{source.name}` is a preset, which has no weights to run with",
            help=("give a checkpoint with hf(...), or compile and simulate only",),
        )
    if isinstance(source, RewardModel):
        return _load_reward_folder(find_folder(source.path, base_dir))
    loaded = _make_tiny(source) if isinstance(source, TinyModel) else _load_folder(find_folder(source.path, base_dir))
    if source.lora is not None:
        loaded.adapters = Adapters(loaded.model, source.lora)
    return loaded


def derive(loaded: LoadedModel, kind: Literal["frozen", "value", "shared"]) -> LoadedModel:
    """Another model from the first weights of `loaded`: a copy never trained, or one with a value head.

    With adapters the weights are frozen already: the copy is modules of its own, which a trainer may cut, over the
    tensors of the model without them. `shared` is a value head on the body of `loaded` itself, which knows it as its
    `critic` from then on.
    """
    base = loaded.model if loaded.adapters is None else loaded.adapters.base
    derived = copy.copy(loaded)
    derived.adapters = derived.critic = None
    if kind == "shared":
        derived.model = loaded.critic = value_head_on(loaded.model)
    elif kind == "value":
        derived.model = value_model_of(base)
    else:
        derived.model = twin(base) if loaded.adapters is not None else copy.deepcopy(base).requires_grad_(False)
    return derived


def save_model(loaded: LoadedModel, folder: Path, merged: bool = True) -> None:
    """Write a checkpoint that AutoModelForCausalLM and AutoTokenizer load: safetensors, tokenizer, configs.

    A value model: see heads.py; the head of a critic on the model's own body goes beside it. A model with adapters: the
    adapters in `adapter/`, and unless `merged` is false the weights with the adapters added.
    """
    folder.mkdir(parents=True, exist_ok=True)
    loaded.tokenizer.save_pretrained(folder)
    if isinstance(loaded.model, ValueHeadModel):
        save_value_model(loaded.model, folder)
        return
    if loaded.critic is not None:
        save_head(loaded.critic, folder)
    model = loaded.model
    if loaded.adapters is not None:
        loaded.adapters.save(folder)
        if not merged:
            return
        model = loaded.adapters.merged()
    save_configs(model, loaded, folder)
    names = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    # A tied head is the embedding: it is written once, under the embedding's name.
    write_weights({name: tensor for name, tensor in model.state_dict().items() if name not in names}, folder)


def save_configs(model: PreTrainedModel, loaded: LoadedModel, folder: Path) -> None:
    """The files of a folder that are neither weights nor tokenizer."""
    model.config.architectures = [type(model).__name__]  # other programs choose the class by it
    model.config.save_pretrained(folder)
    try:
        model.generation_config.save_pretrained(folder)
    except ValueError:
        # Published generation configs may break transformers' own rules (a temperature without sampling); only the
        # token ids in them matter here.
        GenerationConfig(
            eos_token_id=list(loaded.eos_ids),
            pad_token_id=loaded.pad_id,
            bos_token_id=model.generation_config.bos_token_id,
        ).save_pretrained(folder)


def write_weights(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Weights as safetensors, in several files where they are large, as AutoModel loads them.

    transformers' own `save_pretrained` writes on the first rank of a process group only, and on others it returns
    without a word; which rank writes is decided here.
    """
    save_torch_state_dict(tensors, folder, filename_pattern="model{suffix}.safetensors", max_shard_size="5GB")


def load_weights(loaded: LoadedModel, folder: Path) -> None:
    """Overwrite the weights with those that `save_model` wrote, bit for bit."""
    if isinstance(loaded.model, ValueHeadModel):
        load_value_weights(loaded.model, folder)
        return
    if loaded.critic is not None:
        load_head(loaded.critic, folder)
    if loaded.adapters is not None:
        loaded.adapters.load(folder)
        return
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded.model.load_state_dict(saved.state_dict())


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
    if source.architecture == "qwen3_moe" and not 1 <= source.experts_per_token <= source.experts:
        raise RunFailure(
            "RLF5013",
            f"the tiny model's experts_per_token {source.experts_per_token} is not in 1 .. {source.experts} (experts)",
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
        model: PreTrainedModel
        if source.architecture == "qwen3_moe":
            experts = {
                "num_experts": source.experts,
                "num_experts_per_tok": source.experts_per_token,
                "moe_intermediate_size": source.intermediate,
                "norm_topk_prob": True,
            }
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts))
        elif source.architecture == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**settings))
        else:
            model = LlamaForCausalLM(LlamaConfig(**settings))
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


def _load_folder(folder: Path) -> LoadedModel:
    model, tokenizer = read_folder(folder, AutoModelForCausalLM)
    if not _head_is_linear(model):
        raise RunFailure(
            "RLF5013",
            f"model type `{model.config.model_type}` in `{folder}` is not supported",
            notes=("its logits are more than `lm_head` of the last hidden state (scaled or capped, say)",),
        )
    eos_ids = _end_tokens(model, tokenizer)
    if not eos_ids:
        raise RunFailure("RLF5013", f"neither the generation config nor the tokenizer in `{folder}` has an end token")
    return _loaded(model, tokenizer, eos_ids)


def _load_reward_folder(folder: Path) -> LoadedModel:
    model, tokenizer = read_folder(folder, AutoModelForSequenceClassification)
    if model.config.num_labels != 1:
        raise RunFailure(
            "RLF5013",
            f"the model in `{folder}` has {model.config.num_labels} outputs, a reward model has one",
            help=("use a checkpoint for sequence classification with num_labels = 1",),
        )
    if not score_is_linear(model):
        raise RunFailure(
            "RLF5013",
            f"model type `{model.config.model_type}` in `{folder}` is not supported as a reward model",
            notes=("its output is not `score` of the last hidden state at the last token",),
        )
    return _loaded(model.requires_grad_(False), tokenizer, _end_tokens(model, tokenizer))


def _loaded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, eos_ids: tuple[int, ...]) -> LoadedModel:
    pad = next((p for p in (tokenizer.pad_token_id, model.config.pad_token_id, *eos_ids) if p is not None), 0)
    context = getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT
    return LoadedModel(model.eval(), tokenizer, eos_ids, int(pad), int(context))


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


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")

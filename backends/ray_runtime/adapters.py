"""Low-rank adapters (LoRA) of a model: peft's layers for training, and the weights that they amount to.

Three models look at one set of frozen tensors: the trained one, whose linear layers carry adapters; `base`, which has
none and is what `frozen(model)` computes with; and copies with the adapters added in (`merged`), for sampling and for
the checkpoint that people take away. A merged weight is always made anew from the frozen one, so an adapter is never
applied twice.

A trainer that cuts the trained model (tensor parallelism, FSDP) leaves `base` behind. What a rank then has of an
adapter is as `rlflow.reshard.adapters` says, under the same names: `LAYER.lora_A.weight` [rank, in] and
`LAYER.lora_B.weight` [out, rank].
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from rlflow.backends.ray_runtime.data_sources import package
from rlflow.backends.ray_runtime.devices.swap import host_copy
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Lora

FOLDER: Final = "adapter"
"""Below the model's folder: transformers applies an adapter that it finds beside merged weights once more."""
BASE_DIGEST: Final = "base.sha256"
_WEIGHTS: Final = "adapter_model.safetensors"
NAME: Final = "default"
_PREFIX: Final = "base_model.model."
"""Of every name in a file of peft's."""
_PARTS: Final = ("lora_A", "lora_B")
_ATTENTION: Final = ("attn", "attention")


class Adapters:
    """The adapters of one model. Making them changes `model` in place: peft's layers take the place of the linear ones.

    Raises RunFailure: RLF5012 without peft, RLF5013 for a layer that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, lora: Lora) -> None:
        peft = package("peft", "torch")
        targets = target_layers(model, lora.targets)
        self.lora = lora
        self._base: PreTrainedModel | None = twin(model).requires_grad_(False)
        self._digest = self._fingerprint = ""
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=_short_names(model, targets),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
            torch.manual_seed(lora.init_seed)
            self._peft = peft.get_peft_model(model, config)
        model.eval()
        self._layers = {name: model.get_submodule(name) for name in targets}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}
        """Of all A and B of the whole model, by the names of reshards."""

    @property
    def base(self) -> PreTrainedModel:
        """The model without adapters, on the same tensors; not after `leave_base`."""
        assert self._base is not None, "the model was cut"
        return self._base

    def leave_base(self) -> None:
        """The trained model is about to be cut: keep no whole weights, only their digest."""
        self.base_digest()
        self.fingerprint()
        self._base = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """A and B of every adapted layer as this rank has them, live and without gradients: float32, by name."""
        return {
            f"{name}.{part}.weight": getattr(layer, part)[NAME].weight.detach()
            for name, layer in self._layers.items()
            for part in _PARTS
        }

    @property
    def layers(self) -> tuple[str, ...]:
        """The adapted layers, by their names in `base`."""
        return tuple(self._layers)

    def scaling(self, layer: str) -> float:
        """alpha / rank of a layer."""
        return float(self._layers[layer].scaling[NAME])

    def effective(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every adapted layer's name in `base` and its weight W + (alpha / rank) B A, float32 [out, in]."""
        with torch.no_grad():
            for name, layer in self._layers.items():
                a, b = (getattr(layer, part)[NAME].weight for part in _PARTS)
                yield name, add_adapter(layer.get_base_layer().weight, a, b, self.scaling(name))

    def merged(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A model of plain layers that computes the same. At float32 it shares every tensor but the adapted ones."""
        model: PreTrainedModel = twin(self.base)
        if dtype != torch.float32:
            model = cast(copy.deepcopy(model), dtype)
        for name, weight in self.effective():
            model.get_submodule(name).weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        return model.requires_grad_(False)

    def write_merged(self, model: PreTrainedModel) -> str:
        """Bring a merged model up to date, in place and in its own precision; returns a digest of what it was given.

        The digest is that of the float32 weights, which a step that moves an adapter changes even where bf16 does not
        resolve the change. It is as fast as reading the weights: a sum of their bit patterns.
        """
        digest = hashlib.sha256()
        with torch.no_grad():
            for name, weight in self.effective():
                model.get_submodule(name).weight.copy_(weight)
                digest.update(bit_sum(name, weight))
        return digest.hexdigest()

    # --- files -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write `adapter/` in peft's format, and the digest of the weights that it belongs to. `tensors`: all A and B
        of the whole model by the names of reshards, where this rank has parts of them."""
        target = folder / FOLDER
        found = self.tensors() if tensors is None else tensors
        state = {_in_peft(name): found[name] for name in self.shapes}
        # peft would look up the base model's embedding size on the hub.
        self._peft.save_pretrained(str(target), state_dict=state, save_embedding_layers=False)
        (target / BASE_DIGEST).write_text(self.base_digest() + "\n", "utf-8")

    def load(self, folder: Path) -> None:
        """Take over, bit for bit, the adapters that `save` wrote. RLF5010 when they belong to other weights."""
        self.check_base(folder)
        saved, mine = read_adapters(folder), self.tensors()
        check_shapes(folder, saved, self.shapes)
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(saved[name])

    def check_base(self, folder: Path) -> None:
        """RLF5010 when the adapters of a checkpoint were trained beside other weights."""
        source = folder / FOLDER
        written = (source / BASE_DIGEST).read_text("utf-8").strip()
        if written != self.base_digest():
            raise RunFailure(
                "RLF5010",
                f"the adapter in `{source}` was trained beside other weights than the model's",
                notes=(f"sha256 of the frozen weights then {written[:16]}..., now {self.base_digest()[:16]}...",),
                help=("put the old model back, or start a new run from the checkpoint's merged weights",),
            )

    def merged_tensors(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `merged` has, by name, from all tensors of the trained model under their names in it."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in whole.items():
            if ".lora_" in name:
                continue
            layer = name.removesuffix(".base_layer.weight")
            if layer != name:
                a, b = (whole[parameter_name(f"{layer}.{part}.weight")] for part in _PARTS)
                tensor = add_adapter(tensor, a, b, self.scaling(layer))
            found[plain_name(name)] = tensor
        return found

    def base_digest(self) -> str:
        """sha256 (hex) of the frozen weights. Computed once: they never change."""
        if not self._digest:
            digest = hashlib.sha256()
            for parameter in self.base.parameters():
                digest.update(host_copy(parameter).view(torch.uint8).numpy())
            self._digest = digest.hexdigest()
        return self._digest

    def fingerprint(self) -> str:
        """What tells frozen weights from others as fast as they are read, for pools that each load their own: a
        sha256 (hex) of every weight's sum of bit patterns. Computed once."""
        if not self._fingerprint:
            digest = hashlib.sha256()
            for name, parameter in self.base.named_parameters():
                digest.update(bit_sum(name, parameter))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def add_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + (alpha / rank) B A: float32 [out, in], of a whole layer or of any part that A and B are cut like.

    Everyone who samples adds with these operations in this order, which are those of peft's `get_delta_weight`: what is
    whole on two pools is the same bits on both.
    """
    return weight + (b @ a) * scaling


def bit_sum(name: str, weight: torch.Tensor) -> bytes:
    """A float32 weight's name and the sum of its bit patterns."""
    return f"{name} {int(weight.detach().view(torch.int32).sum(dtype=torch.int64))}\n".encode()


def read_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """A and B of the whole model that `Adapters.save` wrote into a model's folder, by the names of reshards."""
    saved = load_file(folder / FOLDER / _WEIGHTS)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in saved.items()}


def check_shapes(folder: Path, saved: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError for the adapters of another model."""
    if {name: tuple(tensor.shape) for name, tensor in saved.items()} != dict(wanted):
        raise ValueError(f"{folder / FOLDER / _WEIGHTS} holds the adapters of other layers, or of another rank")


def parameter_name(name: str) -> str:
    """The trained model's name of an A or B that reshards call `name`."""
    layer, part, _ = name.rsplit(".", 2)
    return f"{layer}.{part}.{NAME}.weight"


def plain_name(parameter: str) -> str:
    """A frozen weight's name in the model without adapters."""
    return parameter.replace(".base_layer.", ".")


def _in_peft(name: str) -> str:
    return f"{_PREFIX}{parameter_name(name)}"


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another module tree over the very tensors of `model`."""
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The weights in another precision, in place. Buffers stay: rotary frequencies that are rounded to bf16 are some
    radians off at the thousandth position."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def target_layers(model: PreTrainedModel, targets: str | tuple[str, ...]) -> list[str]:
    """Names of the linear layers of the decoder that `targets` means, in the model's order. RLF5013 when it has none.

    The head is none of them: where it is tied to the embedding, an adapter on it could not be merged.
    """
    decoder = model.get_decoder()
    inside = {id(module) for module in decoder.modules()}
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside]
    if targets == "all_linear":
        chosen = linear
    elif targets == "attention":
        chosen = [n for n in linear if any(word in part for part in n.split(".")[:-1] for word in _ATTENTION)]
    else:
        missing = [t for t in targets if not any(_ends(name, t) for name in linear)]
        if missing:
            raise _no_layer(model, linear, f"has no linear layer `{missing[0]}` in its decoder")
        chosen = [name for name in linear if any(_ends(name, target) for target in targets)]
    if not chosen:
        raise _no_layer(model, linear, f"has no linear layers that `{targets}` means")
    return chosen


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _no_layer(model: PreTrainedModel, linear: list[str], what: str) -> RunFailure:
    there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    return RunFailure(
        "RLF5013",
        f"model type `{model.config.model_type}` {what}",
        notes=(f"it has {there}" if there else "it has none at all",),
        help=("name some of these in `targets` of `lora`",) if there else (),
    )


def _short_names(model: PreTrainedModel, layers: list[str]) -> list[str]:
    """Last parts of the names, as people write them, where they mean exactly these layers; else the whole names."""
    short = {name.rpartition(".")[2] for name in layers}
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in short]
    return sorted(short) if meant == layers else layers

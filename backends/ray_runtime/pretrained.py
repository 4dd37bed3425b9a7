"""Finding and reading the folder of a Hugging Face checkpoint, with what is wrong with it in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from rlflow.diagnostics.diagnostic import RunFailure

WEIGHT_FILES: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def find_folder(path: str, base_dir: Path) -> Path:
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


def read_folder(folder: Path, auto: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model (of the class `auto` chooses, fp32) and tokenizer of a checkpoint folder. RLF5001, RLF5013."""
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
        model, info = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
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
    return model, tokenizer


def _bad_model(folder: Path, error: Exception) -> RunFailure:
    cause = f"{type(error).__name__}: {_first_line(error)}"
    return RunFailure("RLF5013", f"the model in `{folder}` does not load", notes=(cause,))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

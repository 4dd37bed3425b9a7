"""Time of one GRPO training step: rlflow against trl's GRPOTrainer, same model, data, reward and settings.

    python -m venv venv-trl && venv-trl/bin/pip install "trl==1.16.*" torch
    python benchmarks/grpo_step_vs_trl.py --trl-python venv-trl/bin/python

A step is: 8 prompts x 8 samples generated, 32 new tokens each, a Python reward, group-normalised advantages, one AdamW
update of a clipped loss without a reference (lr 1e-6, fp32, gradient norm clipped at 1), metrics logged. Each round
runs both sides in fresh processes, in turn first and second; nothing is compared across commands. Warm-up steps at the
start of each process are left out. See README.md for what is counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vs_trl import Work, add_arguments, compare

ALPHABET = "0123456789+-*/=() .,:?abcdefghijklmnopqrstuvwxyz"
WORK = Work(prompts=8, samples=8, max_new=32, precision="fp32")


def prepare(folder: Path, hidden: int, layers: int) -> Work:
    """Write what both sides read, with a Qwen3 checkpoint of random weights.

    The tokenizer's end token is one id beyond the model's vocabulary, so it is never sampled and every response has
    exactly MAX_NEW tokens on both sides.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: index for index, token in enumerate([*ALPHABET, "<|pad|>", "<|end|>"])}
    pad, end = vocabulary["<|pad|>"], vocabulary["<|end|>"]
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<|pad|>", eos_token="<|end|>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=end,  # one less than the tokenizer's
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    questions = [f"{a}+{b}=" for a in range(10, 42) for b in range(10, 42)]
    WORK.write(folder, questions)
    return WORK


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of one GRPO step, rlflow against trl.")
    add_arguments(parser, rounds=3, steps=20, warmup=3)
    parser.add_argument("--hidden", type=int, default=64, help="the model's width (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="the model's layers (default %(default)s)")
    arguments = parser.parse_args()
    title = f"Qwen3, hidden {arguments.hidden}, {arguments.layers} layers"
    compare(arguments, title, lambda folder: prepare(folder, arguments.hidden, arguments.layers))


if __name__ == "__main__":
    main()

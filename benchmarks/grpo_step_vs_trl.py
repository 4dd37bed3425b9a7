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
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, MAX_NEW = 8, 8, 32
LEARNING_RATE = 1e-6
THREADS = os.cpu_count() or 1  # what `rlflow run` gives to the one rank of this flow
ALPHABET = "0123456789+-*/=() .,:?abcdefghijklmnopqrstuvwxyz"
REWARDS = '''
def digits(completion):
    """The share of digits in the response, so that a model of random weights gets different scores."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def digits_batched(completions, **columns):
    return [digits(completion) for completion in completions]
'''
FLOW = f"""
flow bench {{
  data  questions = jsonl("data.jsonl", shuffle = false)
  model actor     = hf("model")
  reward share    = python("bench_rewards:digits")

  step {{
    batch   = questions.take({PROMPTS} prompts)
    samples = actor.generate(batch, n = {SAMPLES}, max_new = {MAX_NEW} tokens, temperature = 1.0)
    score   = share(samples)
    adv     = group_normalize(score)
    actor.train(samples, advantages = adv, loss = ppo_clip(0.2), optimizer = adamw(lr = {LEARNING_RATE}))
  }}
}}
"""


def prepare(folder: Path, hidden: int, layers: int) -> None:
    """Write what both sides read: `model` (a Qwen3 checkpoint), `data.jsonl`, `bench_rewards.py`.

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
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": q}) + "\n" for q in questions), encoding="utf-8")
    (folder / "bench_rewards.py").write_text(REWARDS, encoding="utf-8")
    (folder / "bench.rlflow").write_text(FLOW, encoding="utf-8")


# --- the two sides: seconds of every step ----------------------------------------------------------------------------


def measure_trl(folder: Path, steps: int) -> list[float]:
    """Seconds from the end of one step to the end of the next, as GRPOTrainer's callbacks see them."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(THREADS)
    sys.path.insert(0, str(folder))
    from bench_rewards import digits_batched

    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text("utf-8").splitlines()]
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        scores: list[float] = digits_batched(**columns)
        return scores

    settings = GRPOConfig(
        output_dir=str(folder / "trl-out"),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=MAX_NEW,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,  # off on both sides: it would only cost time here
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    assert len(lengths) == steps * PROMPTS * SAMPLES, f"{len(lengths)} samples in {steps} steps"
    assert set(lengths) == {MAX_NEW}, f"responses of {sorted(set(lengths))} tokens"
    return [end - start for start, end in pairwise(ends)]


def measure_rlflow(folder: Path, steps: int) -> list[float]:
    """Seconds from the start of one step to the start of the next in the trace of a real `rlflow run`: Ray, reward
    processes, metrics and all."""
    run = folder / f"run-{time.time_ns()}"
    command = [sys.executable, "-m", "rlflow", "run", str(folder / "bench.rlflow"), "--plain"]
    command += ["--steps", str(steps + 1), "--run-dir", str(run)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        data = json.loads(line)["data"]
        assert data["response_length/min"] == data["response_length/max"] == MAX_NEW, data
    events = json.loads((run / "trace.json").read_text("utf-8"))["traceEvents"]
    starts = [event["ts"] / 1e6 for event in events if event.get("cat") == "step"]
    return [end - start for start, end in pairwise(starts)]


SIDES = {"rlflow": measure_rlflow, "trl": measure_trl}

# --- the comparison -------------------------------------------------------------------------------------------------


def run_side(side: str, python: str, folder: Path, steps: int) -> list[float]:
    """Measure in a fresh process of `python`; SystemExit with its output when it fails."""
    repository = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(THREADS),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH", "")])),
    }
    output = folder / "seconds.json"
    output.unlink(missing_ok=True)
    command = [python, __file__, "--side", side, "--folder", str(folder), "--steps", str(steps)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0 or not output.is_file():
        sys.exit(f"{side} failed with exit status {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    seconds: list[float] = json.loads(output.read_text("utf-8"))
    return seconds


def versions(python: str, packages: tuple[str, ...]) -> str:
    code = (
        "import sys, importlib.metadata as m; print('Python ' + sys.version.split()[0], *"
        f"[p + ' ' + m.version(p) for p in {packages!r}], sep=', ')"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def compare(arguments: argparse.Namespace) -> None:
    pythons = {"rlflow": sys.executable, "trl": str(arguments.trl_python)}
    steps = arguments.warmup + arguments.steps
    measured: dict[str, list[float]] = {"rlflow": [], "trl": []}
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as name:
        folder = Path(name)
        prepare(folder, arguments.hidden, arguments.layers)
        for number in range(arguments.rounds):
            order = list(pythons) if number % 2 == 0 else list(pythons)[::-1]
            for side in order:
                seconds = run_side(side, pythons[side], folder, steps)[arguments.warmup :]
                measured[side] += seconds
                print(f"round {number + 1} {side:>6}: median {statistics.median(seconds) * 1e3:7.1f} ms", flush=True)
    print(f"rlflow: {versions(sys.executable, ('torch', 'transformers', 'ray'))}")
    print(f"trl:    {versions(str(arguments.trl_python), ('trl', 'torch', 'transformers'))}")
    print(f"Qwen3, hidden {arguments.hidden}, {arguments.layers} layers; {PROMPTS} x {SAMPLES} x {MAX_NEW} tokens")
    for side, seconds in measured.items():
        low, _, high = statistics.quantiles(seconds, n=4)
        median = statistics.median(seconds)
        print(
            f"{side:>6}: median {median * 1e3:7.1f} ms, middle half {low * 1e3:.1f} .. {high * 1e3:.1f} ms, "
            f"fastest {min(seconds) * 1e3:.1f} ms, {len(seconds)} steps"
        )
    ratio = statistics.median(measured["trl"]) / statistics.median(measured["rlflow"])
    print(f"trl / rlflow = {ratio:.2f} (above 1: rlflow is faster)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of one GRPO step, rlflow against trl.")
    parser.add_argument("--trl-python", type=Path, help="the Python of a virtual environment with trl")
    for name, default, words in (
        ("--rounds", 3, "runs of each side"),
        ("--steps", 20, "measured steps per run"),
        ("--warmup", 3, "steps left out per run"),
        ("--hidden", 64, "the model's width"),
        ("--layers", 2, "the model's layers"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{words} (default %(default)s)")
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        seconds = SIDES[arguments.side](arguments.folder, arguments.steps)
        (arguments.folder / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
    elif arguments.trl_python is None:
        parser.error("--trl-python is needed")
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

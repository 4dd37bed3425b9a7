"""What the comparisons with trl share: the two sides, each in a process of its own, and what is printed of them.

A side's step is measured by two clocks. Wall time is what a user waits; on a machine that others use it says little.
Processor time is what the step costs: of trl its one process, of rlflow all processes of the run, which are the driver,
the rank, the reward workers and Ray's own. It counts work that rlflow does beside the step on other cores, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

WORK = "work.json"
_POLL_S = 0.02
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
REWARDS = '''
def digits(completion):
    """The share of digits in the response, so that samples get different scores."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def digits_batched(completions, **columns):
    return [digits(completion) for completion in completions]
'''


@dataclass(frozen=True)
class Work:
    """What a step is. In the folder of a comparison lie `model` (a checkpoint), `data.jsonl` and what `write` adds."""

    prompts: int
    samples: int
    max_new: int
    precision: str
    """fp32 or bf16: products in bf16 over fp32 weights"""
    learning_rate: float = 1e-6

    def flow(self) -> str:
        compute = ", compute = bf16" if self.precision == "bf16" else ""
        return f"""
flow bench {{
  data  questions = jsonl("data.jsonl", shuffle = false)
  model actor     = hf("model"{compute})
  reward share    = python("bench_rewards:digits")

  step {{
    batch   = questions.take({self.prompts} prompts)
    samples = actor.generate(batch, n = {self.samples}, max_new = {self.max_new} tokens, temperature = 1.0)
    score   = share(samples)
    adv     = group_normalize(score)
    actor.train(
      samples,
      advantages = adv,
      loss = ppo_clip(0.2),
      optimizer = adamw(lr = {self.learning_rate}, weight_decay = 0.0),
    )
  }}
}}
"""

    def write(self, folder: Path, prompts: list[str]) -> None:
        (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
        (folder / "bench_rewards.py").write_text(REWARDS, encoding="utf-8")
        (folder / "bench.rlflow").write_text(self.flow(), encoding="utf-8")
        (folder / WORK).write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass
class Measured:
    """Of the steps after the warm-up: seconds of each, processor seconds of the mean one, and its stages."""

    wall: list[float]
    processor: float
    stages: dict[str, float]


# --- the two sides ---------------------------------------------------------------------------------------------------


def measure_trl(folder: Path, work: Work, steps: int, warmup: int) -> Measured:
    """From the end of one step to the end of the next, as GRPOTrainer's callbacks see them."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.path.insert(0, str(folder))
    from bench_rewards import digits_batched

    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text("utf-8").splitlines()]
    ends: list[tuple[float, float]] = []
    generated: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, *args: Any, **options: Any) -> Any:
            started = time.process_time()
            found = super()._generate(*args, **options)
            generated.append(time.process_time() - started)
            return found

    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        scores: list[float] = digits_batched(**columns)
        return scores

    settings = GRPOConfig(
        output_dir=str(folder / "trl-out"),
        per_device_train_batch_size=work.prompts * work.samples,
        num_generations=work.samples,
        max_completion_length=work.max_new,
        max_steps=steps,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,  # off on both sides: it would only cost time here
        bf16=work.precision == "bf16",
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    assert len(lengths) == steps * work.prompts * work.samples, f"{len(lengths)} samples in {steps} steps"
    assert set(lengths) == {work.max_new}, f"responses of {sorted(set(lengths))} tokens"
    counted = ends[warmup:]
    processor = (counted[-1][1] - counted[0][1]) / (len(counted) - 1)
    made = statistics.mean(generated[warmup:])
    stages = {"generate": made, "everything else": processor - made}
    return Measured([end[0] - start[0] for start, end in pairwise(counted)], processor, stages)


def measure_rlflow(folder: Path, work: Work, steps: int, warmup: int) -> Measured:
    """From the start of one step to the start of the next in the trace of a real `rlflow run`: Ray, reward processes,
    metrics and all."""
    run = folder / f"run-{time.time_ns()}"
    command = [sys.executable, "-m", "rlflow", "run", str(folder / "bench.rlflow"), "--plain"]
    command += ["--steps", str(steps + 1), "--run-dir", str(run)]
    with (folder / "rlflow.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        marks = _watch(process, run / "metrics.jsonl", warmup, steps)
    assert process.returncode == 0, (folder / "rlflow.log").read_text("utf-8")
    assert len(marks) == 2, "the run ended too soon to be measured"
    spent = (marks[1][1] - marks[0][1]) / (marks[1][0] - marks[0][0])
    for line in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        data = json.loads(line)["data"]
        assert data["response_length/min"] == data["response_length/max"] == work.max_new, data
    events = json.loads((run / "trace.json").read_text("utf-8"))["traceEvents"]
    starts = [event["ts"] / 1e6 for event in events if event.get("cat") == "step"][warmup:]
    wall = [end - start for start, end in pairwise(starts)]
    stages: dict[str, float] = defaultdict(float)
    for event in events:
        kind = event.get("cat")
        if kind in ("step", None) or not starts[0] <= event["ts"] / 1e6 < starts[-1] or "dur" not in event:
            continue
        stages[f"{event['name']} ({kind})"] += event["dur"] / 1e6 / len(wall)
    return Measured(wall, spent, dict(stages))


def _watch(process: subprocess.Popen[bytes], metrics: Path, warmup: int, steps: int) -> list[tuple[int, float]]:
    """Twice, after the warm-up and at the end: steps on record, and processor seconds of a process and all below it."""
    marks: list[tuple[int, float]] = []
    known: dict[int, float] = {}

    def look() -> None:
        while process.poll() is None:
            time.sleep(_POLL_S)
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if (not marks and lines > warmup) or (len(marks) == 1 and lines >= steps):
                for number in _family(process.pid):
                    known[number] = max(known.get(number, 0.0), _processor_seconds(number))
                marks.append((lines, sum(known.values())))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return marks


def _family(root: int) -> list[int]:
    """A process and all that it or one of them started."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children[int(_stat(int(entry.name))[1])].append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += children[found[-1]]
    return found


def _stat(number: int) -> list[str]:
    """The fields of /proc/NUMBER/stat behind the name: state, parent, ..."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()


def _processor_seconds(number: int) -> float:
    with contextlib.suppress(OSError):
        fields = _stat(number)
        return (int(fields[11]) + int(fields[12])) * _TICK_S
    return 0.0


SIDES: dict[str, Callable[[Path, Work, int, int], Measured]] = {"rlflow": measure_rlflow, "trl": measure_trl}

# --- the comparison --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int, steps: int, warmup: int) -> None:
    parser.add_argument("--trl-python", type=Path, required=True, help="the Python of a virtual environment with trl")
    for name, default, words in (
        ("--rounds", rounds, "runs of each side"),
        ("--steps", steps, "measured steps per run"),
        ("--warmup", warmup, "steps left out per run"),
        ("--threads", 1, "torch threads of each side"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{words} (default %(default)s)")


def compare(arguments: argparse.Namespace, title: str, prepare: Callable[[Path], Work]) -> None:
    """Run the sides in turns and print what they took."""
    pythons = {"rlflow": sys.executable, "trl": str(arguments.trl_python)}
    measured: dict[str, list[Measured]] = {"rlflow": [], "trl": []}
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as name:
        work = prepare(Path(name))
        for number in range(arguments.rounds):
            for side in list(pythons) if number % 2 == 0 else list(pythons)[::-1]:
                found = _run_side(side, pythons[side], Path(name), arguments)
                measured[side].append(found)
                print(
                    f"round {number + 1} {side:>6}: wall median {_ms(statistics.median(found.wall))}, "
                    f"processor {_ms(found.processor)}",
                    flush=True,
                )
    print(f"rlflow: {_versions(sys.executable, ('torch', 'transformers', 'ray'))}")
    print(f"trl:    {_versions(str(arguments.trl_python), ('trl', 'torch', 'transformers'))}")
    print(f"{title}; {work.prompts} x {work.samples} x {work.max_new} tokens; {work.precision}", end="; ")
    print(f"{arguments.threads} thread(s), {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}")
    for side, found in measured.items():
        wall = [seconds for one in found for seconds in one.wall]
        low, high = _quartiles(wall)
        print(
            f"{side:>6}: wall median {_ms(statistics.median(wall))}, middle half {_ms(low)} .. {_ms(high)}, "
            f"fastest {_ms(min(wall))}, {len(wall)} steps; processor median "
            f"{_ms(statistics.median(one.processor for one in found))}"
        )
        clock = "wall" if side == "rlflow" else "processor"
        print(f"        where the time goes ({clock}, mean of a step):")
        for stage in found[0].stages:
            print(f"        {_ms(statistics.median(one.stages.get(stage, 0.0) for one in found)):>12}  {stage}")
    sides = measured["rlflow"], measured["trl"]
    for clock, numbers in (
        ("wall, median", [statistics.median(s for one in side for s in one.wall) for side in sides]),
        ("wall, fastest", [min(s for one in side for s in one.wall) for side in sides]),
        ("processor", [statistics.median(one.processor for one in side) for side in sides]),
    ):
        print(f"rlflow / trl, {clock}: {numbers[0] / numbers[1]:.2f}")
    by_round = [ours.processor / theirs.processor for ours, theirs in zip(*sides, strict=True)]
    print(f"rlflow / trl, processor, by round: {', '.join(f'{ratio:.2f}' for ratio in by_round)}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def _run_side(side: str, python: str, folder: Path, arguments: argparse.Namespace) -> Measured:
    """Measure in a fresh process of `python`; SystemExit with its output when it fails."""
    repository = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),  # rlflow gives as many to its one rank
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH", "")])),
    }
    output = folder / "measured.json"
    output.unlink(missing_ok=True)
    steps = arguments.warmup + arguments.steps
    command = [python, __file__, side, str(folder), str(steps), str(arguments.warmup)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0 or not output.is_file():
        sys.exit(f"{side} failed with exit status {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    return Measured(**json.loads(output.read_text("utf-8")))


def _versions(python: str, packages: tuple[str, ...]) -> str:
    code = (
        "import sys, importlib.metadata as m; print('Python ' + sys.version.split()[0], *"
        f"[p + ' ' + m.version(p) for p in {packages!r}], sep=', ')"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """One side: SIDE FOLDER STEPS WARMUP."""
    side, name, steps, warmup = sys.argv[1:]
    folder = Path(name)
    work = Work(**json.loads((folder / WORK).read_text("utf-8")))
    found = SIDES[side](folder, work, int(steps), int(warmup))
    (folder / "measured.json").write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()

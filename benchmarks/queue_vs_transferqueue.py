"""Samples per second through rlflow's DistQueue and through TransferQueue (SimpleStorage): put + get of one batch.

    python -m venv venv-tq && venv-tq/bin/pip install torch "transferqueue==0.1.11"
    python benchmarks/queue_vs_transferqueue.py --other-python venv-tq/bin/python

Both sides, one after the other in this run: a producer process and a consumer process (Ray actors of one local Ray),
the same 512 samples of lognormal length (sigma 1) with three fields per token (int64 ids, float32 log-probs, int64
mask), built before the clock starts in the form that the side takes: packed arrays here, jagged nested tensors there.
Timed in the producer: the put. Timed in the consumer: asking for 512 samples, getting the three fields, and a sum over
each, so that no side may leave the bytes where they are. Not timed: the checks that the sums are right, and clearing
(here `done`, which is not waited for, is timed with the get). The first rounds are left out.

What a sample costs. Here: its id, group and length in one call to the actor and its place in the answer; the three
fields of the batch are one object in shared memory, read without a copy. There: a record in the controller, and its
three tensors sent over ZMQ to the storage units, and back in the get.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

SAMPLES, MEDIAN_TOKENS, MOST_TOKENS = 512, 400, 8192
FIELDS = {"ids": np.int64, "logprobs": np.float32, "mask": np.int64}
WARM_UP = 3


def batch(number: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Lengths int64 [samples] and the packed fields of one batch, the same on both sides."""
    random = np.random.default_rng(number)
    lengths = random.lognormal(np.log(MEDIAN_TOKENS), 1.0, SAMPLES).astype(np.int64).clip(1, MOST_TOKENS)
    return lengths, {name: random.integers(0, 100, lengths.sum()).astype(dtype) for name, dtype in FIELDS.items()}


def sums_of(number: int) -> dict[str, float]:
    return {name: float(values.sum(dtype=np.float64)) for name, values in batch(number)[1].items()}


# --- rlflow ----------------------------------------------------------------------------------------------------------


class OurEnd:
    def __init__(self, spec: Any, actors: list[Any]) -> None:
        from rlflow.backends.ray_runtime.dist_queue.client import DistQueue

        self.queue = DistQueue(spec, actors)

    def put(self, number: int) -> tuple[float, int]:
        from rlflow.backends.ray_runtime.dist_queue.columns import Ragged
        from rlflow.backends.ray_runtime.dist_queue.rows import RowFacts

        lengths, fields = batch(number)
        offsets = np.cumsum([0, *lengths.tolist()])
        rows = range(number * SAMPLES, (number + 1) * SAMPLES)
        started = time.perf_counter()
        facts = RowFacts(tuple(rows), tuple(row // 8 for row in rows), lengths=tuple(lengths.tolist()))
        sent = self.queue.put("rollout", facts, {name: Ragged(values, offsets) for name, values in fields.items()})
        return time.perf_counter() - started, sent

    def get(self, number: int) -> tuple[float, dict[str, float]]:
        started = time.perf_counter()
        reading = self.queue.take("train", SAMPLES)
        found = {}
        for name, column in reading.columns().items():
            found[name] = float(column.values.sum(dtype=np.float64))  # type: ignore[union-attr]
        self.queue.done("train", reading.groups)
        return time.perf_counter() - started, found


def ours(shards: int) -> tuple[Any, Any]:
    import ray

    from rlflow.backends.ray_runtime.dist_queue.client import start_queue
    from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec

    spec = EdgeSpec(
        "bench", ("rollout",), {"train": tuple(FIELDS)}, SAMPLES * max(2, shards), 8, deadline_s=120, shards=shards
    )
    actors = start_queue(spec)
    end = ray.remote(num_cpus=0)(OurEnd)
    return end.remote(spec, actors), end.remote(spec, actors)


# --- TransferQueue ---------------------------------------------------------------------------------------------------


class TheirEnd:
    def __init__(self) -> None:
        import transfer_queue

        transfer_queue.init()
        self.client = transfer_queue.get_client()

    def ready(self) -> bool:
        return True

    def put(self, number: int) -> tuple[float, int]:
        import torch
        from tensordict import TensorDict

        lengths, fields = batch(number)
        columns = {
            name: torch.nested.as_nested_tensor(
                list(torch.split(torch.from_numpy(values), lengths.tolist())), layout=torch.jagged
            )
            for name, values in fields.items()
        }
        data = TensorDict(columns, batch_size=(SAMPLES,))
        started = time.perf_counter()
        self.client.put(data=data, partition_id=f"step_{number}")
        return time.perf_counter() - started, 0

    def get(self, number: int) -> tuple[float, dict[str, float]]:
        import torch

        started = time.perf_counter()
        meta = self.client.get_meta(
            data_fields=list(FIELDS), batch_size=SAMPLES, partition_id=f"step_{number}", task_name="train"
        )
        data = self.client.get_data(meta)
        found = {}
        for name in FIELDS:
            column = data[name]
            values = column.values() if column.is_nested else column
            found[name] = float(values.sum(dtype=torch.float64))
        seconds = time.perf_counter() - started
        self.client.clear_samples(meta)
        return seconds, found


def theirs() -> tuple[Any, Any]:
    import ray

    end = ray.remote(num_cpus=0)(TheirEnd)
    first = end.remote()
    ray.get(first.ready.remote())  # the first starts the controller and the storage units, the second joins them
    return first, end.remote()


# --- the run ---------------------------------------------------------------------------------------------------------


def side(name: str, repeats: int, shards: int) -> dict[str, Any]:
    """Seconds per round of one side, in this process's environment."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    producer, consumer = theirs() if name == "theirs" else ours(shards)
    puts, gets, sent = [], [], 0
    for number in range(WARM_UP + repeats):
        put_s, sent = ray.get(producer.put.remote(number))
        get_s, found = ray.get(consumer.get.remote(number))
        if found != sums_of(number):
            raise SystemExit(f"{name}: batch {number} arrived as {found}, sent was {sums_of(number)}")
        if number >= WARM_UP:
            puts.append(put_s)
            gets.append(get_s)
    ray.shutdown()
    return {"put": puts, "get": gets, "bytes": sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other-python", help="python of the environment that has transferqueue")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shards", type=int, nargs="*", default=[1], help="actors of our queue; several are compared")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--only-shards", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(args.side, args.repeats, args.only_shards)))
        return
    runs = [(f"rlflow, {n} actor{'s' * (n > 1)}", sys.executable, "ours", n) for n in args.shards]
    if args.other_python:
        runs.append(("TransferQueue", args.other_python, "theirs", 1))
    lengths, fields = batch(0)
    packed, padded = (
        sum(v.nbytes for v in fields.values()),
        sum(int(lengths.max()) * SAMPLES * np.dtype(dtype).itemsize for dtype in FIELDS.values()),
    )
    print(f"{SAMPLES} samples, {lengths.mean():.0f} tokens at the mean, {lengths.max()} at most, {packed / 1e6:.1f} MB")
    rates: dict[str, float] = {}
    for label, python, name, shards in runs:
        command = [python, __file__, "--side", name, "--repeats", str(args.repeats), "--only-shards", str(shards)]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "TQ_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{label} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        put, get = (statistics.median(found[part]) for part in ("put", "get"))
        whole = statistics.median(a + b for a, b in zip(found["put"], found["get"], strict=True))
        rates[label] = SAMPLES / whole
        print(f"{label:18} put {put * 1e3:7.1f} ms  get {get * 1e3:7.1f} ms  {rates[label]:9.0f} samples/s (medians)")
        if found["bytes"]:
            last = batch(WARM_UP + args.repeats - 1)[0]
            full = padded / int(lengths.max()) * int(last.max())
            share, ideal = found["bytes"] / full, last.mean() / last.max()
            print(f"{'':18} bytes sent / padded = {share:.3f}, mean / max = {ideal:.3f}")
    if args.other_python:
        print(f"ratio {rates[runs[0][0]] / rates['TransferQueue']:.1f}")


if __name__ == "__main__":
    main()

"""Processes with a gloo group between them, started once for a test file. A job is a function `f(*arguments)` of a
module below tests/, run by the first so many of them at once; its results come back in rank order."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE = timedelta(seconds=60)


class Workers:
    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, job: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """AssertionError with the traceback of every rank on which the job fails, or a note that it does not end."""
        for pipe in self._pipes[:ranks]:
            pipe.send((job, arguments))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(1.5 * DEADLINE.total_seconds()):
                errors.append(f"rank {rank} does not answer")
                continue
            result, error = pipe.recv()
            results.append(result)
            if error:
                errors.append(f"rank {rank}:\n{error}")
        assert not errors, "\n".join(errors)
        return results


@contextmanager
def started(count: int) -> Iterator[Workers]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.ray_runtime.parallel.jobs"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, Path(folder) / "store", theirs), daemon=True)
            process.start()
            pipes.append(mine)
            processes.append(process)
        try:
            yield Workers(pipes)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(5)
                process.kill()


def _serve(rank: int, count: int, store: Path, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=count, timeout=DEADLINE)
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((job(*arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))

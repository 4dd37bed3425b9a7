"""Where data rows come from: JSON Lines, Parquet, reasoning-gym. Each reader yields (place, row), where a place is
what a message calls the row: `train.jsonl:17`. Nothing here needs torch.
"""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlflow.diagnostics.diagnostic import RunFailure, did_you_mean
from rlflow.ir.ops import GymData


def read_bytes(path: Path, shown: str, name: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else [])
        raise RunFailure(
            "RLF5015",
            f"data `{name}`: cannot read `{shown}`",
            notes=(f"looked at `{path}`", error.strerror or describe(error)),
            help=() if near is None else (f"did you mean `{near}`?",),
        ) from None
    if not content.strip():
        raise RunFailure("RLF5015", f"data `{name}`: `{shown}` is empty")
    return content


def jsonl_rows(content: bytes, shown: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every line that is not blank."""
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        place = f"{shown}:{number}"
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise RunFailure(
                "RLF5002",
                f"{place}: not UTF-8 (byte {line[error.start]:#04x} at column {error.start + 1})",
                notes=(shorten(line.decode("utf-8", errors="replace")),),
            ) from None
        if not text:
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            one_array = number == 1 and text.startswith("[")
            where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            what = error.msg if isinstance(error, json.JSONDecodeError) else describe(error)
            raise RunFailure(
                "RLF5002",
                f"{place}: not JSON: {what[:1].lower()}{what[1:]}{where}",
                notes=(shorten(text),),
                help=("JSON Lines has one object on each line, without a list around them",) if one_array else (),
            ) from None
        if not isinstance(row, dict):
            raise RunFailure(
                "RLF5002", f"{place}: the row is {type(row).__name__}, not an object", notes=(shorten(text),)
            )
        yield place, row


def parquet_rows(content: bytes, shown: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row, values as plain Python (`to_pylist`)."""
    pa = package("pyarrow", "torch")
    parquet = package("pyarrow.parquet", "torch")
    try:
        table = parquet.read_table(pa.BufferReader(content))
        rows = table.to_pylist()
    except (pa.ArrowException, ValueError, OSError) as error:
        raise RunFailure("RLF5015", f"`{shown}` is not a readable Parquet file", notes=(describe(error),)) from None
    for number, row in enumerate(rows):
        yield f"{shown}: row {number}", row


def gym_rows(source: GymData, name: str) -> list[tuple[str, dict[str, Any]]]:
    """(place, row) of every task: question, answer, metadata. Raises RLF5015 for an unknown task or option."""
    gym = package("reasoning_gym", "examples")
    tasks = package("reasoning_gym.factory", "examples").DATASETS
    shown = f'reasoning_gym("{source.task}")'
    if source.task not in tasks:
        near = did_you_mean(source.task, tasks)
        raise RunFailure(
            "RLF5015",
            f"data `{name}`: reasoning-gym has no task `{source.task}`",
            notes=(f"it has {len(tasks)} tasks",),
            help=() if near is None else (f"did you mean `{near}`?",),
        )
    options = dict(source.options)
    known = {option.name for option in fields(tasks[source.task][1])}
    for option in options:
        if option not in known:
            near = did_you_mean(option, known)
            raise RunFailure(
                "RLF5015",
                f"data `{name}`: task `{source.task}` has no option `{option}`",
                notes=("its options: " + ", ".join(f"`{word}`" for word in sorted(known)),),
                help=() if near is None else (f"did you mean `{near}`?",),
            )
    try:
        dataset = gym.create_dataset(source.task, size=source.size, seed=source.seed, **options)
        entries = [dict(dataset[index]) for index in range(source.size)]
    except Exception as error:  # tasks check their options with asserts and raise whatever they like
        raise RunFailure(
            "RLF5015",
            f"data `{name}`: {shown} cannot be generated with these options",
            notes=(describe(error),),
            trace=traceback.format_exc(),
        ) from None
    return [(f"{shown}: row {row}", entry) for row, entry in enumerate(entries)]


def package(module: str, extra: str) -> Any:
    """The imported module; RLF5012 when its package is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0].replace("_", "-")
        raise RunFailure(
            "RLF5012",
            f"the package `{name}` is needed but cannot be imported",
            notes=(describe(error),),
            help=(f'pip install "rlflow-dsl[{extra}]"',),
        ) from None


def shorten(value: object, limit: int = 120) -> str:
    """`value` as text on one line, the middle left out when it is longer than `limit` characters."""
    text = value if isinstance(value, str) else repr(value)
    text = json.dumps(text[: limit * 4] + text[-limit:] if len(text) > limit * 5 else text, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]}"


def describe(error: BaseException) -> str:
    """`ValueError: what it said`, on one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__

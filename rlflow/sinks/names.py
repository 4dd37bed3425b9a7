"""The sinks that there are, by the names that `--log` takes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlflow.diagnostics import RunFailure
from rlflow.diagnostics.diagnostic import did_you_mean
from rlflow.sinks.apart import SinkApart
from rlflow.sinks.sink import RunInfo, Sink


@dataclass(frozen=True, slots=True)
class Known:
    """`package`: what must be importable; `extra`: of rlflow-dsl, which brings it; `opener`: MODULE:FUNCTION; `apart`:
    in a process of its own."""

    package: str
    extra: str
    opener: str
    apart: bool = False


SINKS: dict[str, Known] = {
    "tensorboard": Known("tensorboardX", "tensorboard", "rlflow.sinks.to_tensorboard:open_sink"),
    "prometheus": Known("ray", "ray", "rlflow.backends.ray_runtime.prometheus:open_sink"),
    "wandb": Known("wandb", "wandb", "rlflow.sinks.to_wandb:open_sink", apart=True),
    "swanlab": Known("swanlab", "swanlab", "rlflow.sinks.to_swanlab:open_sink", apart=True),
    "mlflow": Known("mlflow", "mlflow", "rlflow.sinks.to_mlflow:open_sink", apart=True),
}


def sink_names(words: Iterable[str]) -> tuple[str, ...]:
    """The names in words that may each hold several, with commas between; none twice. RLF5060 for one that is not
    known, RLF5061 for one whose package is not installed."""
    names = tuple(dict.fromkeys(name.strip() for word in words for name in word.split(",") if name.strip()))
    for name in names:
        known = SINKS.get(name)
        if known is None:
            raise _unknown(name)
        if importlib.util.find_spec(known.package) is None:
            raise RunFailure(
                "RLF5061",
                f"logging to {name} needs the package `{known.package}`, which is not installed",
                help=(f'pip install "rlflow-dsl[{known.extra}]"',),
            )
    return names


def open_sink(name: str, info: RunInfo) -> Sink:
    """The sink as a run uses it; of one in a process of its own only the process. Raises what it raises."""
    if SINKS[name].apart:
        return SinkApart(name, info)
    return opener(name)(info)


def opener(name: str) -> Callable[[RunInfo], Sink]:
    """What opens a sink. Importing it may take seconds."""
    module, _, function = SINKS[name].opener.partition(":")
    found: Callable[[RunInfo], Sink] = getattr(importlib.import_module(module), function)
    return found


def _unknown(name: str) -> RunFailure:
    near = did_you_mean(name, SINKS)
    extra = "" if near is None else f' it comes with pip install "rlflow-dsl[{SINKS[near].extra}]"'
    return RunFailure(
        "RLF5060",
        f"metrics cannot be logged to `{name}`",
        notes=("there are " + ", ".join(SINKS), "metrics.jsonl is always written"),
        help=() if near is None else (f"did you mean `{near}`?{extra}",),
    )

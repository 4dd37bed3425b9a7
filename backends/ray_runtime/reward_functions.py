"""Calling a reward function by the names of its parameters. Nothing here needs torch or ray.

A function gets what its parameters are called; every name is optional, `**columns` gets the data row's columns:

  per sample   prompt: as in the data, a string or messages · response, completion, completions, solution_str: the
               decoded response · answer, ground_truth: the answer column · record: the whole data row · tokens,
               completion_ids: the response's token ids · prompt_ids · any column of the data by its name
  batched      a function with `prompts`, or with `completions` but no `prompt`: lists over samples of `prompts`,
               `completions`, `prompt_ids`, `completion_ids` and of every column, whole groups together. A completion is
               a string for a string prompt and [{"role": "assistant", "content": ...}] for messages

These cover verl (`data_source, solution_str, ground_truth, extra_info`), AReaL (`prompt, completions, prompt_ids,
completion_ids, **columns`) and TRL (`prompts, completions, **columns`). A coroutine function is run to its end.

A score is a number or a bool, or a dict with the number under `score` and extras beside it (numbers,
bools and text; anything else is kept as text). None instead of the number says that the reward does not apply to the
sample; a NaN or an infinity that was computed is an error.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.backends.ray_runtime.data_sources import shorten
from rlflow.diagnostics.diagnostic import RunFailure, did_you_mean
from rlflow.ir.columns import is_batched

LARGEST_SCORE = 3.4e38


@dataclass(frozen=True, slots=True)
class Sample:
    """What a reward may see of one sample. `uid` and `index` (place in the group) only name it in messages."""

    uid: int
    index: int
    record: dict[str, Any]
    text: str
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()


Scored = tuple[float | None, dict[str, Any]]
"""A finite score, or None where the reward does not apply, and the extras beside it."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward that was found: `score` calls it on samples.

    `names` are its parameters that can be given by name, `required` those without a default; `columns` says that it
    takes **keywords.
    """

    name: str
    function: Callable[..., Any]
    names: frozenset[str]
    required: frozenset[str]
    columns: bool

    @property
    def batched(self) -> bool:
        """Takes lists over samples, and wants whole groups in one call."""
        return is_batched(self.names)

    @property
    def wants_tokens(self) -> bool:
        return bool(self.names & {"tokens", "completion_ids", "prompt_ids"})

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """The samples' scores. Raises what the function raises, and RunFailure RLF5005 for a result that is none,
        RLF5014 for a parameter that no column fills."""
        if not self.batched:
            return [self._scored(self._call(self._sample_arguments(sample))) for sample in samples]
        results = self._call(self._batch_arguments(samples))
        if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__"):
            raise self._wrong_result(f"returned {type(results).__name__}, not a list with one score per sample")
        if len(results) != len(samples):
            raise self._wrong_result(f"returned {len(results)} scores for {len(samples)} samples")
        return [self._scored(result) for result in results]

    def _call(self, arguments: dict[str, Any]) -> Any:
        result = self.function(**arguments)
        return asyncio.run(_finish(result)) if inspect.isawaitable(result) else result

    def _sample_arguments(self, sample: Sample) -> dict[str, Any]:
        record = sample.record
        offered: dict[str, Any] = {
            **dict.fromkeys(("data_source", "extra_info")),
            **record,
            **dict.fromkeys(("response", "completion", "completions", "solution_str"), sample.text),
            **dict.fromkeys(("answer", "ground_truth"), record["answer"]),
            **dict.fromkeys(("tokens", "completion_ids"), sample.response_ids),
            "prompt_ids": sample.prompt_ids,
            "record": record,
        }
        return self._arguments(offered, record)

    def _batch_arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        records = [sample.record for sample in samples]
        columns = {name: [record.get(name) for record in records] for record in records for name in record}
        offered: dict[str, Any] = {
            **columns,
            "prompts": [record["prompt"] for record in records],
            "completions": [
                sample.text
                if isinstance(sample.record["prompt"], str)
                else [{"role": "assistant", "content": sample.text}]
                for sample in samples
            ],
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
        }
        return self._arguments(offered, columns)

    def _arguments(self, offered: dict[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        missing = sorted(self.required - offered.keys())
        if missing:
            near = did_you_mean(missing[0], offered)
            raise RunFailure(
                "RLF5014",
                f"reward `{self.name}` has a parameter `{missing[0]}`, but the data has no such column",
                notes=("columns present: " + ", ".join(f"`{name}`" for name in columns),),
                help=() if near is None else (f"did you mean `{near}`?",),
            )
        arguments = {name: offered[name] for name in self.names if name in offered}
        return {**columns, **arguments} if self.columns else arguments

    def _scored(self, result: Any) -> Scored:
        extras: dict[str, Any] = {}
        if isinstance(result, Mapping):
            if "score" not in result:
                raise self._wrong_result(f"returned a dict without `score`: {shorten(dict(result))}")
            extras = {str(key): _plain(value) for key, value in result.items() if key != "score"}
            result = result["score"]
        simple = (bool, int, float, str, type(None))
        extras = {key: value if isinstance(value, simple) else shorten(value) for key, value in extras.items()}
        if result is None:
            return None, extras
        result = _plain(result)
        if not isinstance(result, numbers.Real):
            raise self._wrong_result(f"returned {type(result).__name__}, not a number: {shorten(result)}")
        score = float(result)
        if not math.isfinite(score):
            raise self._wrong_result(f"returned {score}, which is not a finite number")
        if abs(score) > LARGEST_SCORE:
            raise self._wrong_result(f"returned {score:g}; scores are kept as 32-bit floats, up to {LARGEST_SCORE:g}")
        return score, extras

    def _wrong_result(self, what: str) -> RunFailure:
        return RunFailure(
            "RLF5005",
            f"reward `{self.name}` {what}",
            help=(
                'return a number, or {"score": number, ...}, for every sample; None where the reward does not apply',
            ),
        )


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _plain(value: Any) -> Any:
    """The number in a numpy scalar or a zero-dimensional array or tensor; any other value as it is."""
    return value.item() if getattr(value, "shape", None) == () else value

"""A profile: the measured seconds of a flow's stages on one machine, as canonical JSON.

Times are whole microseconds. What a stage took is a median over steps after a warm-up, with the quartiles beside it and
with what it was measured for: rows, tokens and the conditions under which it holds.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from pydantic import Field, computed_field, model_validator

from rlflow.plan_parts import PlanPart

FORMAT: Final = "rlflow.profile"
FORMAT_VERSION: Final = "1.1"
_COMPUTED = ("us_per_row", "us_per_token")


class MachineFacts(PlanPart):
    """What the measured machine is."""

    system: str
    architecture: str
    processor: str
    """The name that the processor gives itself."""
    cpus: int = Field(gt=0)
    memory_bytes: int = Field(ge=0)
    """0 = not known."""


class EngineProfile(PlanPart):
    """One engine of a generate stage, in microseconds: a step of b samples with K tokens of context together takes
    step_us + b sample_us + K token_us; reading n tokens of contexts within a step adds n prefill_token_us."""

    step_us: float = Field(ge=0, allow_inf_nan=False)
    sample_us: float = Field(ge=0, allow_inf_nan=False)
    token_us: float = Field(ge=0, allow_inf_nan=False)
    prefill_token_us: float = Field(ge=0, allow_inf_nan=False)


class LengthsProfile(PlanPart):
    """Lognormal lengths of responses, in tokens; `sigma` of the logarithm, 0: all have the mean."""

    mean: float = Field(ge=1, allow_inf_nan=False)
    """After the cut at `max_new`."""
    sigma: float = Field(ge=0, allow_inf_nan=False)
    """Before the cut."""
    prompt_share: float = Field(ge=0, le=1)
    """Of the variance of the logarithm, what the samples of a prompt have in common."""


class StageProfile(PlanPart):
    """One stage. Every time is of one step, on the slowest rank."""

    stage: str
    phase: str
    """`step`, or the name of an evaluation."""
    conditions: dict[str, str]
    """What must be the same for the numbers to hold, in words."""
    us: int = Field(ge=0)
    """Median. Of a Python function: from its start to its result, which other stages overlap with."""
    low_us: int = Field(ge=0)
    """Lower quartile."""
    high_us: int = Field(ge=0)
    """Upper quartile."""
    steps: int = Field(gt=0)
    """Times that it was measured."""
    rows: int | None = Field(default=None, gt=0)
    """Of one step, on all ranks; None = known only while running."""
    tokens: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Median of prompt and response tokens of one step, on all ranks; None for stages that do not count them."""
    prompt_tokens: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Mean of a row, where `tokens` counts rows of generated samples."""
    max_new: int | None = Field(default=None, gt=0)
    """Longest response, of those rows."""
    epochs: int = Field(default=1, gt=0)
    call_us: int = Field(default=0, ge=0)
    """Of a Python function: what handing over its samples and fetching its result takes of the pool that calls it."""
    publish_us: int = Field(default=0, ge=0)
    """Of a training: what making its weights the newest takes."""
    engine: EngineProfile | None = None
    """Of a generate stage, by what its engine recorded."""
    lengths: LengthsProfile | None = None
    """Of a generate stage's responses, where they were imposed."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def us_per_row(self) -> float | None:
        return None if self.rows is None else round(self.us / self.rows, 3)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def us_per_token(self) -> float | None:
        return None if self.tokens is None else round(self.us / self.tokens, 3)

    @model_validator(mode="before")
    @classmethod
    def _without_rates(cls, raw: Any) -> Any:
        """Rates are for the reader of the file; they follow from the rest."""
        return {key: value for key, value in raw.items() if key not in _COMPUTED} if isinstance(raw, dict) else raw


class Profile(PlanPart):
    format: Literal["rlflow.profile"] = FORMAT
    format_version: str = FORMAT_VERSION
    rlflow_version: str
    flow: str
    cluster: str
    machine: MachineFacts
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the packages that ran it."""
    seed: int
    steps: int = Field(gt=0)
    """That were run."""
    warm_up: int = Field(ge=0)
    """The first of them, which do not count."""
    step_us: int = Field(ge=0)
    """Median of a whole step."""
    step_low_us: int = Field(ge=0)
    step_high_us: int = Field(ge=0)
    stages: tuple[StageProfile, ...]

    def to_json(self) -> str:
        """Canonical text: sorted keys, two-space indent, final newline."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False) + "\n"

    def find(self, stage: str) -> StageProfile | None:
        return next((entry for entry in self.stages if entry.stage == stage), None)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile; ValueError (pydantic's ValidationError included) when it is not one this version reads."""
        try:
            raw: Any = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"the key `format` is not `{FORMAT}`")
        version = str(raw.get("format_version", ""))
        if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
            raise ValueError(f"its format is {version or 'unknown'}; this rlflow reads {FORMAT_VERSION}")
        found = cls.model_validate(raw)
        names = [entry.stage for entry in found.stages]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"it has the stage `{twice[0]}` twice")
        return found

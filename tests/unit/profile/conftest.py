"""Profiles whose numbers are chosen: stages of a flow as it is, with times and lengths stated by the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.ir.flow import reads_model
from rlflow.ir.ops import Score, Train
from rlflow.passes.analysis.conditions import conditions_of, size_of
from rlflow.profile.machine import this_machine
from rlflow.profile.table import Profile, StageProfile

MakeProfile = Callable[..., Profile]
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(text: str, name: str = "sums.rlflow") -> Path:
        file = tmp_path / name
        file.write_text(text, "utf-8")
        return file

    return make


@pytest.fixture
def make_profile() -> MakeProfile:
    def make(
        path: Path,
        us: Mapping[str, int],
        *,
        call_us: int = 0,
        publish_us: int = 0,
        prompt: int = 6,
        response: int = 5,
        overrides: tuple[str, ...] = (),
    ) -> Profile:
        """Prompts of `prompt` tokens and responses of `response`."""
        checked = driver.check(path, driver.Options(overrides=overrides))
        flow = checked.flow
        entries = []
        for name, taken in us.items():
            node = flow.nodes[name]
            size = size_of(flow, node)
            counts = reads_model(node.op) is not None and size.rows is not None
            entries.append(
                StageProfile(
                    stage=name,
                    phase=node.phase,
                    conditions=conditions_of(flow, node),
                    us=taken,
                    low_us=taken,
                    high_us=taken,
                    steps=3,
                    rows=size.rows,
                    tokens=float(size.rows * (prompt + response)) if counts and size.rows else None,
                    prompt_tokens=float(prompt) if counts else None,
                    max_new=size.max_new,
                    epochs=size.epochs,
                    call_us=call_us if isinstance(node.op, Score) else 0,
                    publish_us=publish_us if isinstance(node.op, Train) else 0,
                )
            )
        return Profile(
            rlflow_version="0",
            flow=flow.name,
            cluster=checked.lowered.cluster.name,
            machine=this_machine(),
            seed=0,
            steps=5,
            warm_up=2,
            step_us=1,
            step_low_us=1,
            step_high_us=1,
            stages=tuple(entries),
        )

    return make

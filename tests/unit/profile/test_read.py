"""The file of a profile: what it holds comes back, and what is no profile, or of something else, is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.diagnostics import RunFailure
from rlflow.profile.machine import this_machine
from rlflow.profile.read import read_profile, refuse_foreign
from rlflow.profile.table import MachineFacts, Profile, StageProfile

STAGE = StageProfile(
    stage="s", phase="step", conditions={"operation": "generate"}, us=600, low_us=500, high_us=800, steps=4, rows=20,
    tokens=150.0, prompt_tokens=4.0, max_new=3,
)  # fmt: skip
MACHINE = MachineFacts(system="Linux", architecture="x86_64", processor="Some CPU", cpus=4, memory_bytes=2**33)
PROFILE = Profile(
    rlflow_version="0.1.0", flow="f", cluster="local", machine=MACHINE, seed=0, steps=6, warm_up=2, step_us=900,
    step_low_us=800, step_high_us=1000, stages=(STAGE,),
)  # fmt: skip

whole = st.integers(0, 10**12)
entries = st.builds(
    StageProfile,
    stage=st.text(min_size=1),
    phase=st.text(),
    conditions=st.dictionaries(st.text(), st.text(), max_size=3),
    us=whole,
    low_us=whole,
    high_us=whole,
    steps=st.integers(1, 9),
    rows=st.none() | st.integers(1, 10**9),
    tokens=st.none() | st.floats(0.5, 1e12),
    prompt_tokens=st.none() | st.floats(0, 1e6),
    max_new=st.none() | st.integers(1, 10**6),
    epochs=st.integers(1, 9),
    call_us=whole,
    publish_us=whole,
)


@given(st.lists(entries, max_size=3, unique_by=lambda entry: entry.stage))
@settings(max_examples=40, deadline=None)
def test_what_is_written_comes_back(stages: list[StageProfile]) -> None:
    profile = PROFILE.model_copy(update={"stages": tuple(stages)})
    text = profile.to_json()
    assert Profile.from_json(text) == profile
    assert Profile.from_json(text).to_json() == text


def test_rates_are_for_the_reader() -> None:
    raw = json.loads(PROFILE.to_json())
    assert raw["stages"][0]["us_per_row"] == 30.0
    assert raw["stages"][0]["us_per_token"] == 4.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "rlflow.plan"}, "format"),
        ({"format_version": "2.0"}, "2.0"),
        ({"surprise": 1}, "surprise"),
        ({"steps": "many"}, "steps"),
        ({"stages": [json.loads(STAGE.model_dump_json()) | {"us": -1}]}, "us"),
        ({"stages": [json.loads(STAGE.model_dump_json()) | {"tokens": float("inf")}]}, "tokens"),
        ({"stages": [json.loads(STAGE.model_dump_json())] * 2}, "twice"),
    ],
)
def test_what_is_no_profile_is_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(json.loads(PROFILE.to_json()) | change), "utf-8")
    with pytest.raises(RunFailure) as caught:
        read_profile(file)
    assert caught.value.code == "RLF4005"
    assert said in " ".join(caught.value.notes)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_bytes_that_are_no_profile(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(raw)
    with pytest.raises(RunFailure, match="is not a profile") as caught:
        read_profile(file)
    assert caught.value.code == "RLF4005"


@pytest.mark.parametrize(
    ("flow", "cluster", "machine", "said"),
    [
        ("g", "local", MACHINE, "flow"),
        ("f", "pod", MACHINE, "cluster"),
        ("f", "local", MACHINE.model_copy(update={"cpus": 2}), "cpus: 4 was measured, here is 2"),
        ("f", "local", MACHINE.model_copy(update={"processor": "Other"}), "processor"),
    ],
)
def test_a_profile_of_something_else_is_refused(flow: str, cluster: str, machine: MachineFacts, said: str) -> None:
    with pytest.raises(RunFailure) as caught:
        refuse_foreign(PROFILE, flow, cluster, machine)
    assert caught.value.code == "RLF4006"
    assert said in " ".join(caught.value.notes)


def test_a_profile_of_the_same_thing_is_taken() -> None:
    refuse_foreign(PROFILE, "f", "local", MACHINE.model_copy(update={"memory_bytes": 1}))
    on_cluster = PROFILE.model_copy(update={"cluster": "pod"})
    refuse_foreign(on_cluster, "f", "pod", MACHINE.model_copy(update={"cpus": 2}))


def test_the_machine_is_itself() -> None:
    assert this_machine() == this_machine()
    assert this_machine().cpus >= 1

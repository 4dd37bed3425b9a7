"""`rlflow show` of every example is one screen that says who runs where, how it is sharded, how long a step takes and what
limits it, memory, bytes that move, and what is promised about staleness."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.amounts import gib, seconds, size
from rlflow.backends.visualizers.summary import MAX_LINES, describe_guarantee, summary_text
from rlflow.backends.visualizers.words import describe_layout
from rlflow.cli import main
from rlflow.plan import Layout, Plan

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.rlflow"))
PANGU = ROOT / "examples" / "pangu_ultra_moe.rlflow"
SCREEN = 50


@cache
def plan_of(path: Path) -> Plan:
    return driver.compile(path)


@cache
def four_supernodes() -> Plan:
    """Pangu Ultra MoE on four CloudMatrix384, with twice the devices in both pools."""
    text = PANGU.read_text("utf-8").replace("hosts = 2 *", "hosts = 4 *")
    text = text.replace("1024 devices", "2048 devices").replace("512 devices", "1024 devices")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / PANGU.name
        source.write_text(text, "utf-8")
        return driver.compile(source)


def words(text: str) -> str:
    return " ".join(text.split())


def says_what_matters(plan: Plan, text: str) -> None:
    """Every fact, whole: nothing of it is cut or left out."""
    found = words(text)
    for pool in plan.pools:
        assert f"{pool.name}: {len(pool.ranks)} " in found
    for stage in plan.stages:
        assert stage.id in found
        if stage.layout is not None and stage.layout != Layout():
            assert describe_layout(stage.layout) in found
    if plan.cadence is None:
        assert "the period of a step is not known" in found
    else:
        assert f"a step every {seconds(plan.cadence.us)}; bottleneck: {plan.cadence.cycle[0]}" in found
    assert "memory of a device at its fullest:" in found
    for memory in plan.memory:
        assert f"{memory.pool} {gib(memory.peak)} of {gib(memory.capacity)}" in found
    assert "moved every step:" in found
    for reshard in plan.reshards:
        assert f"weights of {reshard.model} {reshard.source}->{reshard.target} {size(reshard.received)}" in found
    for channel in plan.channels:
        assert words(describe_guarantee(channel)) in found
    assert "stops after" in found


@pytest.mark.parametrize("width", [80, 112])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_one_screen(path: Path, width: int) -> None:
    text = summary_text(plan_of(path), width)
    assert len(text.splitlines()) <= MAX_LINES <= SCREEN
    assert max(map(len, text.splitlines())) <= width
    says_what_matters(plan_of(path), text)


@pytest.mark.parametrize("width", [80, 112])
def test_four_supernodes(width: int) -> None:
    plan = four_supernodes()
    assert sum(len(pool.ranks) for pool in plan.pools if pool.device == "npu") == 3072
    text = summary_text(plan, width)
    assert len(text.splitlines()) <= SCREEN
    says_what_matters(plan, text)


def test_full_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", str(PANGU), "--full"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    says_what_matters(plan_of(PANGU), text)
    assert "see --full" not in text
    assert "…" not in text
    for program in plan_of(PANGU).programs:
        for number in range(1, len(program.step) + 1):
            assert f"  {number}." in text
    assert len(text.splitlines()) > SCREEN


def test_into_a_pipe_it_is_wider_than_80(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with pytest.raises(SystemExit):
        main(["show", str(PANGU)])
    assert capsys.readouterr().out == summary_text(plan_of(PANGU), 112)

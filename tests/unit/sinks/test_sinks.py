"""Metrics on their way to other places: what fails there stays there, and is told once."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlflow.diagnostics import RunFailure
from rlflow.sinks import fan_out, names
from rlflow.sinks.apart import SinkApart, SinkDied
from rlflow.sinks.fan_out import Sinks
from rlflow.sinks.names import SINKS, Known, sink_names
from rlflow.sinks.sink import RunInfo, Sink

DATA = {"critic/score/mean": 0.5, "queue/a->b/depth": 1.0, "pool/a/wait_s/put:a->b": 1.5, "x": float("nan")}


class Kept:
    """Keeps what it gets; fails at a row, or waits for ever."""

    def __init__(self, fails_at: int = 0, hangs: bool = False) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.ended = ""
        self._fails_at, self._hangs = fails_at, hangs
        self.release = threading.Event()

    def log(self, step: int, data: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise SystemExit("the server said no")
        if self._hangs:
            self.release.wait(30)
        self.rows.append((step, data))

    def close(self, status: str) -> None:
        self.ended = status


def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waiting: int = 100, **sinks: Kept) -> Sinks:
    monkeypatch.setattr(fan_out, "open_sink", lambda name, info: sinks[name])
    return Sinks(sinks, RunInfo("sums", tmp_path), waiting)


# --- names -----------------------------------------------------------------------------------------------------------


def test_names_come_with_commas_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert sink_names(["tensorboard, wandb", "mlflow,wandb"]) == ("tensorboard", "wandb", "mlflow")
    assert sink_names([]) == ()


def test_unknown_names_give_the_nearest() -> None:
    with pytest.raises(RunFailure) as failure:
        sink_names(["tensorbord"])
    assert failure.value.code == "RLF5060"
    assert failure.value.help == ('did you mean `tensorboard`? it comes with pip install "rlflow-dsl[tensorboard]"',)
    with pytest.raises(RunFailure) as failure:
        sink_names(["zzz"])
    assert failure.value.help == ()
    assert "wandb" in failure.value.notes[0]


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.SINKS, "gone", Known("no_such_package_at_all", "gone-extra", "x:y"))
    with pytest.raises(RunFailure) as failure:
        sink_names(["gone"])
    assert failure.value.code == "RLF5061"
    assert failure.value.help == ('pip install "rlflow-dsl[gone-extra]"',)


def test_every_extra_is_in_the_package() -> None:
    import tomllib

    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    assert {known.extra for known in SINKS.values()} <= set(extras["optional-dependencies"])


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_sink_that_fails_is_told_once_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad = Kept(), Kept(fails_at=2)
    sinks = opened(monkeypatch, tmp_path, good=good, bad=bad)
    failures = []
    for step in range(1, 6):
        failures += sinks.row(step, DATA)
        time.sleep(0.01)
    failures += sinks.close("finished")
    assert [(f.code, f.message, f.notes) for f in failures] == [
        ("RLF5062", "logging to bad has stopped", ("SystemExit: the server said no",))
    ]
    assert [step for step, _ in good.rows] == [1, 2, 3, 4, 5]
    assert good.ended == "finished"
    assert [step for step, _ in bad.rows] == [1]


def test_a_sink_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = Kept(hangs=True)
    sinks = opened(monkeypatch, tmp_path, waiting=3, slow=slow)
    started = time.monotonic()
    failures = [failure for step in range(1, 8) for failure in sinks.row(step, DATA)]
    assert [f.message for f in failures] == ["logging to slow has stopped: it is 3 rows behind"]
    assert sinks.close("finished", 0.1) == []
    assert time.monotonic() - started < 5
    slow.release.set()

    slow = Kept(hangs=True)
    sinks = opened(monkeypatch, tmp_path, slow=slow)
    sinks.row(1, DATA)
    assert "has not ended in time" in sinks.close("finished", 0.1)[0].message
    slow.release.set()


def test_a_sink_that_does_not_open_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str, info: RunInfo) -> Sink:
        raise OSError("no key")

    monkeypatch.setattr(fan_out, "open_sink", refuse)
    with pytest.raises(RunFailure) as failure:
        Sinks(["wandb"], RunInfo("sums", tmp_path))
    assert (failure.value.code, failure.value.message) == ("RLF5062", "logging to wandb does not start")
    assert failure.value.notes == ("OSError: no key",)


# --- a process of its own --------------------------------------------------------------------------------------------

PLUGIN = """\
import json, os, sys, time
from rlflow.sinks.names import SINKS, Known

class Mine:
    def __init__(self, info):
        print("noise of the library")
        self.out = open(info.folder / "got.jsonl", "a")
    def log(self, step, data):
        if step == 3:
            raise ValueError("row 3 is odd")
        self.out.write(json.dumps([step, data, os.getpid()]) + "\\n"); self.out.flush()
    def close(self, status):
        self.out.write(json.dumps(status) + "\\n"); self.out.close()

def open_sink(info):
    if info.flow == "closed":
        raise RuntimeError("no way in")
    return Mine(info)

SINKS["mine"] = Known("json", "mine", "mine_sink:open_sink", apart=True)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sink `mine`, known in processes that are started from here too."""
    (tmp_path / "mine_sink.py").write_text(PLUGIN, "utf-8")
    (tmp_path / "sitecustomize.py").write_text("import mine_sink\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def got(folder: Path) -> list[object]:
    return [json.loads(line) for line in (folder / "got.jsonl").read_text("utf-8").splitlines()]


def test_a_process_writes_rows_and_its_noise_is_in_a_log(plugin: Path) -> None:
    sink = SinkApart("mine", RunInfo("sums", plugin, {"seed": 7}))
    sink.wait_open()
    sink.log(1, DATA)
    sink.log(2, DATA)
    sink.close("finished")
    rows = got(plugin)
    assert [row[0] for row in rows[:2]] == [1, 2]  # type: ignore[index]
    assert rows[0][2] != os.getpid()  # type: ignore[index]
    assert rows[2] == "finished"
    assert "noise of the library" in (plugin / "logs" / "log-mine.log").read_text("utf-8")


def test_a_process_says_why_it_fails(plugin: Path) -> None:
    sink = SinkApart("mine", RunInfo("closed", plugin))
    with pytest.raises(SinkDied, match=r"RuntimeError: no way in; its log: .*log-mine\.log"):
        sink.wait_open()
    sink = SinkApart("mine", RunInfo("sums", plugin))
    sink.wait_open()
    sink.log(3, DATA)
    with pytest.raises(SinkDied, match="ValueError: row 3 is odd"):
        sink.close("finished")
    sink.kill()


def test_a_driver_that_is_killed_leaves_a_sink_that_is_closed(plugin: Path) -> None:
    sink = SinkApart("mine", RunInfo("sums", plugin))
    sink.wait_open()
    sink.log(1, DATA)
    stdin = sink._process.stdin
    assert stdin is not None
    stdin.close()  # as the end of the driver does
    assert sink._process.wait(20) == 0
    assert got(plugin)[-1] == "failed"


# --- the real ones, where they are installed --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SINKS if name != "prometheus"])
def test_a_real_sink_writes_offline_and_goes_on_after_a_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(SINKS[name].package) is None:
        pytest.skip(f"{SINKS[name].package} is not installed")
    for variable in ("WANDB_MODE", "SWANLAB_MODE", "MLFLOW_TRACKING_URI", "TENSORBOARD_DIR"):
        monkeypatch.delenv(variable, raising=False)
    for first in (1, 3):
        sinks = Sinks([name], RunInfo("sums", tmp_path, {"seed": 7}, first > 1, first))
        assert [failure for step in range(first, 5) for failure in sinks.row(step, DATA)] == []
        assert sinks.row(4, {"val/held/mean": 0.25}) == []  # an evaluation comes after its step
        assert sinks.close("finished") == []
    written = [path for path in tmp_path.rglob("*") if path.is_file() and "logs" not in path.parts]
    assert max(path.stat().st_size for path in written) > 100, written
    if name == "tensorboard":
        assert [step for step, tag in scalars(written) if tag == "critic/score/mean"] == [1, 2, 3, 4, 3, 4]


def scalars(files: list[Path]) -> list[tuple[int, str]]:
    """(step, tag) of the event files, by the format of TensorBoard's records."""
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-not-found]

    found = []
    for file in sorted(files, key=lambda path: path.stat().st_mtime_ns):
        raw, place = file.read_bytes(), 0
        while place < len(raw):
            (length,) = struct.unpack_from("<Q", raw, place)
            event = Event.FromString(raw[place + 12 : place + 12 + length])
            found += [(event.step, value.tag) for value in event.summary.value]
            place += 12 + length + 4
    return found

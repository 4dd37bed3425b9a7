"""The plan file: canonical, complete, versioned, refused when it is not one; and the order of its instructions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rlflow.diagnostics import RunFailure
from rlflow.driver import Options, changed_sources, check, compile, find_base_dir, load_plan, plan_of
from rlflow.plan import FORMAT_VERSION, Plan

FLOW = """\
flow f {
  data d = jsonl("a.jsonl")
  data other = reasoning_gym("chain_sum", size = 9, beta = 2, alpha = [1, 2])
  model m = hf("m", compute = bf16)
  model r = frozen(m)
  reward e = python("rewards:exact", on_error = retry(2))
  reward own = scorer(other)
  step {
    b = d.take(4 prompts)
    s = m.generate(b, n = 2, max_new = 4 tokens)
    one = e(s)
    two = e(s)
    ref = r.logprobs(s)
    adv = group_normalize(one)
    more = group_normalize(two)
    m.train(s, advantages = adv + more, reference = ref, loss = ppo_clip() + kl(), optimizer = adamw(1e-3), minibatch = 4 samples)
  }
  evaluate held every 2 steps { rows = other.all() a = m.generate(rows, max_new = 1 token) g = own(a) }
  evaluate last { a = m.generate(d.all(), max_new = 1 token) g = e(a) h = e(a) }
  stop after 3 steps
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n', "utf-8")
    (tmp_path / "rewards.py").write_text("def exact(): pass\n", "utf-8")
    path = tmp_path / "f.rlflow"
    path.write_text(FLOW, "utf-8")
    return path


@pytest.fixture
def plan(file: Path) -> Plan:
    return compile(file)


# --- canonical -------------------------------------------------------------------------------------------------------


def test_round_trip(plan: Plan) -> None:
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


def test_keys_are_sorted_and_the_text_ends_in_a_newline(plan: Plan) -> None:
    text = plan.to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def test_same_bytes_whatever_the_hash_seed(file: Path) -> None:
    """Sets and dicts of strings come in another order under another seed; the plan must not."""
    texts = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-m", "rlflow", "compile", "f.rlflow"],
            cwd=file.parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        texts.add(done.stdout)
    assert len(texts) == 1


def decided(plan: Plan) -> Any:
    """What is executed: everything but places in the source, its digest, and the order of declarations."""

    def without_places(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_places(v) for k, v in value.items() if k not in ("span", "because", "sources")}
        if isinstance(value, list):
            return [without_places(item) for item in value]
        return value

    raw = without_places(plan.model_dump(mode="json"))
    for kind in ("data", "models", "rewards"):
        raw[kind] = sorted(raw[kind], key=lambda declaration: str(declaration["name"]))
    return raw


def test_order_of_declarations_changes_nothing_that_is_executed(file: Path, plan: Plan) -> None:
    lines = FLOW.splitlines()
    head, declarations, tail = lines[:1], lines[1:7], lines[7:]
    for order in (declarations[::-1], declarations[3:] + declarations[:3]):
        file.write_text("\n".join([*head, *order, *tail]) + "\n", "utf-8")
        assert decided(compile(file)) == decided(plan)


def test_layout_and_comments_change_only_places(file: Path, plan: Plan) -> None:
    file.write_text("# more\n\n" + FLOW.replace("  ", "      "), "utf-8")
    again = compile(file)
    assert decided(again) == decided(plan)
    assert again.sources != plan.sources


def test_position_of_settings_and_evaluations_does_not_matter(file: Path, plan: Plan) -> None:
    file.write_text(
        FLOW.replace("  stop after 3 steps\n", "").replace("flow f {", "flow f { stop after 3 steps"), "utf-8"
    )
    assert decided(compile(file)) == decided(plan)


# --- refused ---------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def set_(path: str, value: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        target: Any = raw
        *parents, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        for word in parents:
            target = target[word]
        target[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_("extra", 1), "extra"),
        (set_("stages.0.extra", 1), "extra"),
        (set_("stages.0.op.extra", 1), "extra"),
        (set_("models.0.source.extra", 1), "extra"),
        (set_("stages.1.op.n", "x"), "n"),
        (set_("stages.0.op.kind", "tak"), "kind"),
        (set_("programs.0.step.0.kind", "jump"), "kind"),
        (set_("format_version", "2.0"), f"plan format 2.0 is not readable; this rlflow reads {FORMAT_VERSION}"),
        (set_("format_version", None), "plan format None is not readable"),
        (set_("format", "rlflow.plam"), "`format` is not `rlflow.plan`"),
        (set_("seed", "x"), "seed"),
        (set_("stages.0.pool", "x"), "stage b names the unknown pool x"),
        (set_("stages.0.op.data", "x"), "stage b names the unknown data set x"),
        (set_("stages.1.inputs.prompts", "x"), "stage s names the unknown stage x"),
        (set_("stages.1.op.model", "x"), "stage s names the unknown model x"),
        (set_("stages.2.op.reward", "x"), "stage one names the unknown reward x"),
        (set_("models.1.source.of", "x"), "model r names the unknown model x"),
        (set_("rewards.1.source.data", "x"), "reward own names the unknown data set x"),
        (set_("programs.0.pool", "x"), "a program names the unknown pool x"),
        (set_("programs.0.step.0.stage", "x"), "instruction take:b names the unknown stage x"),
        (set_("channels.0.model", "x"), "a channel names the unknown model x"),
        (set_("channels.0.readers", ["x"]), "a channel names the unknown stage x"),
        (set_("sources", []), "it names no source"),
    ],
)  # fmt: skip
def test_refused(change: Change, says: str, plan: Plan) -> None:
    raw = json.loads(plan.to_json())
    change(raw)
    with pytest.raises(ValueError, match=re.escape(says)):
        Plan.from_json(json.dumps(raw))


def test_minor_versions_are_read(plan: Plan) -> None:
    raw = json.loads(plan.to_json())
    raw["format_version"] = FORMAT_VERSION.split(".")[0] + ".99"
    assert Plan.from_json(json.dumps(raw)).flow == "f"


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "3", '"x"', "{", "NaN", "[" * 100_000, '{"format": "rlflow.plan"}', "\x00", "é"]
)
def test_what_is_no_plan(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json, pydantic and we ourselves raise it)
        Plan.from_json(text)
    path = tmp_path / "plan.json"
    path.write_text(text, "utf-8")
    with pytest.raises(RunFailure) as caught:
        load_plan(path)
    assert caught.value.code == "RLF4001"
    assert "rlflow compile" in caught.value.help[0]


def test_plan_in_another_encoding_is_no_plan(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(plan.to_json().encode("utf-16"))
    with pytest.raises(RunFailure):
        load_plan(path)


def test_plan_cannot_be_changed(plan: Plan) -> None:
    with pytest.raises(ValueError, match="frozen"):
        plan.seed = 4


# --- schema and content ----------------------------------------------------------------------------------------------


def test_json_schema_describes_the_file(plan: Plan) -> None:
    schema = Plan.model_json_schema(mode="serialization")
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    raw = json.loads(plan.to_json())
    assert list(validator.iter_errors(raw)) == []
    for change in (set_("extra", 1), set_("stages.1.op.n", "x"), set_("programs.0.step.0.kind", "jump")):
        broken = json.loads(plan.to_json())
        change(broken)
        assert list(validator.iter_errors(broken))


def test_instructions_follow_slots_with_waits_before_the_first_reader(plan: Plan) -> None:
    (program,) = plan.programs
    assert [instruction.id for instruction in program.step] == [
        "take:b",
        "run:s",
        "run:one",
        "run:two",
        "run:ref",
        "run:m.train.old",
        "wait:one",
        "run:adv",
        "wait:two",
        "run:more",
        "run:sum",
        "run:m.train",
        "publish:m",
        "checkpoint",
    ]
    assert [(e.name, e.every, [i.id for i in e.instructions]) for e in program.evaluations] == [
        ("held", 2, ["take:held.rows", "run:held.a", "run:held.g", "wait:held.g"]),
        ("last", 0, ["take:last.d.all", "run:last.a", "run:last.g", "run:last.h", "wait:last.g", "wait:last.h"]),
    ]


def test_every_asynchronous_run_is_waited_for_once(plan: Plan) -> None:
    functions = {stage.id for stage in plan.stages if stage.pool == "cpu"}
    (program,) = plan.programs
    for instructions in (program.step, *(e.instructions for e in program.evaluations)):
        started = [i.stage for i in instructions if i.kind == "run" and i.stage in functions]
        waited = [i.stage for i in instructions if i.kind == "wait"]
        assert sorted(started) == sorted(waited)


def test_channel(plan: Plan) -> None:
    (channel,) = plan.channels
    assert (channel.model, channel.source, channel.max_staleness) == ("m", "m.train", 0)
    assert channel.readers == ("s", "m.train.old", "held.a", "last.a")
    assert channel.transport == "cast", "bf16 readers hold a copy"


def test_fp32_weights_are_the_trained_tensors_themselves(file: Path) -> None:
    plan = compile(file, Options(overrides=("m.compute=fp32",)))
    assert [channel.transport for channel in plan.channels] == ["alias"]
    assert plan.overrides == ("m.compute=fp32",)


def test_save_every_is_written(file: Path) -> None:
    plan = compile(file, Options(overrides=("save.every=2",)))
    checkpoint = plan.programs[0].step[-1]
    assert (checkpoint.kind, checkpoint.because.reason, checkpoint.because.inserted_by) == ("checkpoint", "written", "")


def test_stages_and_models_are_found_by_name(plan: Plan) -> None:
    assert plan.stage("s").op.kind == "generate"
    assert plan.model("r").trainable is False
    with pytest.raises(KeyError):
        plan.stage("x")
    with pytest.raises(KeyError):
        plan.model("x")


# --- sources ---------------------------------------------------------------------------------------------------------


def test_sources_are_the_flow_and_its_reward_files(file: Path, plan: Plan) -> None:
    assert [Path(source.path).name for source in plan.sources] == ["f.rlflow", "rewards.py"]
    assert changed_sources(plan, file.parent) == []
    (file.parent / "rewards.py").write_text("def exact(): return 1\n", "utf-8")
    assert [Path(path).name for path in changed_sources(plan, file.parent)] == ["rewards.py"]
    file.unlink()
    assert len(changed_sources(plan, file.parent)) == 2


def test_base_dir_is_found_beside_a_moved_plan(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of(check("f.rlflow"), Options())
    assert plan.sources[0].path == "f.rlflow"
    monkeypatch.chdir("/")
    inner = tmp_path / "runs" / "one"
    assert find_base_dir(plan, inner / "plan.json") == tmp_path
    with pytest.raises(RunFailure) as caught:
        find_base_dir(plan)
    assert caught.value.code == "RLF4002"

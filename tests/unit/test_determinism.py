"""The same program gives the same plan, byte for byte; and what is executed does not depend on the order of what is
independent."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.diagnostics import SourceFile
from rlflow.grammar import nodes
from rlflow.grammar.parse import parse
from rlflow.grammar.printer import print_tree
from rlflow.plan import Plan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.rlflow"))
COMPILE_ALL = """
import hashlib, sys
from rlflow import driver
for name in sys.argv[1:]:
    print(name, hashlib.sha256(driver.compile(f"examples/{name}.rlflow").to_json().encode()).hexdigest())
"""


def test_plans_are_byte_equal_under_three_hash_seeds() -> None:
    """Sets and dicts of strings come in another order under another seed."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", COMPILE_ALL, *NAMES],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    ]
    assert len(runs[0].splitlines()) == len(NAMES)
    assert runs[1:] == runs[:1] * 2


# --- permutations ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("permuted")
    for name in ("data", "rewards.py", "environments.py"):
        (folder / name).symlink_to(EXAMPLES / name)
    return folder / "f.rlflow"


def tree_of(name: str) -> nodes.Program:
    return parse(SourceFile("f.rlflow", (EXAMPLES / f"{name}.rlflow").read_text("utf-8")))


def compiled(place: Path, tree: nodes.Program) -> Plan:
    place.write_text(print_tree(tree), "utf-8")
    return driver.compile(place)


def with_items(tree: nodes.Program, items: Sequence[Any]) -> nodes.Program:
    """The program with these items in its flow."""
    return replace(
        tree, items=tuple(replace(i, items=tuple(items)) if isinstance(i, nodes.Flow) else i for i in tree.items)
    )


def executed(plan: Plan) -> Any:
    """Everything that a run reads: without places in the source, its digest, and the order of declarations."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if k not in ("span", "because", "sources")}
        return [plain(item) for item in value] if isinstance(value, list) else value

    raw = plain(plan.model_dump(mode="json"))
    for kind in ("data", "models", "rewards", "environments"):
        raw[kind] = sorted(raw.get(kind) or [], key=lambda declaration: str(declaration["name"]))
    return raw


@pytest.mark.parametrize("name", NAMES)
def test_order_of_declarations(name: str, place: Path) -> None:
    """Models may point forward to what they are copies of, rewards to their data."""
    tree = tree_of(name)
    (flow,) = tree.flows
    wanted = executed(compiled(place, tree))
    chance = random.Random(name)
    orders = [flow.items[::-1], *(tuple(chance.sample(flow.items, len(flow.items))) for _ in range(5))]
    for order in orders:
        assert executed(compiled(place, with_items(tree, order))) == wanted


def test_order_of_programs_parts(place: Path) -> None:
    """Flow, schedule and cluster in any order."""
    text = """
    flow f {
      data sums = reasoning_gym("chain_sum", size = 64)
      model actor = hf("m")
      reward exact = scorer(sums)
      step {
        samples = actor.generate(sums.take(8 prompts), n = 4, max_new = 8 tokens)
        score = exact(samples)
        actor.train(samples, advantages = group_normalize(score), loss = ppo_clip(0.2), optimizer = adamw(lr = 1e-4))
      }
    }
    schedule f on pod { pool main = 4 devices place actor on main place exact on cpu with workers = 2 }
    cluster pod { host = 8 * ascend_910b }
    """
    tree = parse(SourceFile("f.rlflow", text))
    plans = [executed(compiled(place, replace(tree, items=order))) for order in itertools.permutations(tree.items)]
    assert all(plan == plans[0] for plan in plans)


STATEMENTS = """
flow f {
  data sums = reasoning_gym("chain_sum", size = 64)
  model actor = hf("m")
  model first = frozen(actor)
  model critic = value(actor)
  reward exact = scorer(sums)
  reward neat = python("os.path:join")
  step {
    samples = actor.generate(sums.take(8 prompts), n = 4, max_new = 8 tokens)
    score = exact(samples)
    other = neat(samples)
    ref = first.logprobs(samples)
    v = critic.values(samples)
    critic.train(samples, returns = returns(score, v), values = v, loss = value_clip(), optimizer = adamw(lr = 1e-4))
    actor.train(samples, advantages = gae(score + other, v), reference = ref, loss = ppo_clip(0.2) + kl(k3),
                optimizer = adamw(lr = 1e-4))
  }
}
"""


def test_order_of_independent_statements(place: Path) -> None:
    """What stands next to each other without reading each other may stand in any order: the same is executed, every
    stage after what it reads. Stages of one pool that could run at once keep the order in which they are written."""
    tree = parse(SourceFile("f.rlflow", STATEMENTS))
    (flow,) = tree.flows
    (step,) = (item for item in flow.items if isinstance(item, nodes.Step))
    first, free, last = step.body[:1], step.body[1:5], step.body[5:]
    plans = []
    for order in itertools.permutations(free):
        body = replace(step, body=(*first, *order, *last))
        plans.append(compiled(place, with_items(tree, [body if item is step else item for item in flow.items])))
    in_step = [runs(plan) for plan in plans]
    assert len(in_step) == 24
    assert all(sorted(stages) == sorted(in_step[0]) for stages in in_step)
    for stages in in_step:
        at = {stage: index for index, stage in enumerate(stages)}
        assert all(at["samples"] < at[reader] < at["actor.train"] for reader in ("score", "other", "ref", "v"))
        assert at["v"] < at["critic.train"]
        assert max(at["score"], at["other"]) < min(at["ref"], at["v"]), (
            "Python stages start first, so that they overlap"
        )
    assert {executed_text(plan) for plan in plans} == {executed_text(plans[0])}


def runs(plan: Plan) -> list[str]:
    """The stages of a step in the order in which they are started."""
    return [instruction.stage for program in plan.programs for instruction in program.step if instruction.kind == "run"]


def executed_text(plan: Plan) -> str:
    """All that the plan says but the order of its lists."""

    def unordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: unordered(item) for key, item in value.items() if key not in ("id", "slot")}
        return sorted((unordered(item) for item in value), key=str) if isinstance(value, list) else value

    return str(unordered(executed(plan)))

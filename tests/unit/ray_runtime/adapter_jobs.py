"""The ranks of all pools of a plan, in processes without Ray: they load their models, and weights are published."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime import merged_adapters
from rlflow.backends.ray_runtime.adapters import Adapters, parameter_name
from rlflow.backends.ray_runtime.checkpoint import load_checkpoint, save_checkpoint
from rlflow.backends.ray_runtime.engine import weights_digest
from rlflow.backends.ray_runtime.local_weights import renew, whole_tensors
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.models import load_model
from rlflow.backends.ray_runtime.parallel.sharded import plain
from rlflow.backends.ray_runtime.residency import residency_of
from rlflow.backends.ray_runtime.state import RankState
from rlflow.backends.ray_runtime.world import World
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import AdamW, Generate, Nll, Train
from rlflow.plan import MoveObject, Plan, ReshardWeights, RunStage
from tests.unit.ray_runtime.parallel import models
from tests.unit.ray_runtime.parallel.workers import DEADLINE


@dataclass
class Found:
    """On one rank."""

    pool: str
    received: int = 0
    """Bytes, of one publish."""
    sent: int = 0
    versions: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    """Of what is sampled from, at the start and after every publish."""
    apart: float = 0.0
    """Of what is sampled from, from the merged weights of a whole model: the largest difference."""
    dtype: str = ""


def state_of(plan: Plan, folder: Path, other_base: bool = False) -> RankState:
    """Of this process. `other_base`: on the pool that samples the frozen weights are others."""
    pools = {pool.name: len(pool.ranks) for pool in plan.pools if pool.device != "functions"}
    world = World("", 0, pools, DEADLINE)
    number = dist.get_rank()
    world.pool = next(pool for pool in pools if number in world.ranks(pool))
    world.rank = number - world.ranks(world.pool)[0]
    if other_base and world.pool == "rollout":
        models = tuple(
            m if m.name != "actor" else m.model_copy(update={"source": replace(m.source, init_seed=7)})  # type: ignore[type-var]
            for m in plan.models
        )
        plan = plan.model_copy(update={"models": models})
    if world.size > 1:
        world.group = world.between(world.ranks(world.pool), "pool")
    state = RankState(plan, world.pool, world.rank, world.size, folder, seed=0)
    state.join(world)
    state.load_models()
    return state


def trained_to(adapters: Adapters, version: int) -> dict[str, torch.Tensor]:
    """All A and B of a version, as if it had been trained."""
    generator = torch.Generator().manual_seed(version)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in adapters.shapes.items()}


def published(plan_json: str, folder: str, publishes: int, resume: bool = False) -> Found:
    """Publish versions 1 .. `publishes`, read each, and write a checkpoint; or go on from it."""
    plan = Plan.from_json(plan_json)
    state = state_of(plan, Path(folder))
    trained = load_model(plan.model("actor").source, Path(folder))  # type: ignore[arg-type]
    assert trained.adapters is not None
    model = state.models["actor"]
    trains = state.trains("actor")
    found = Found(state.pool)
    if resume:
        load_checkpoint(state, Path(folder) / "checkpoints", publishes)
    for channel in state.channels.values():
        channel.start(*(publishes, 2 * publishes) if resume else (0, publishes + 1))
    digests = [] if model.engine is None else [model.engine.digest]
    versions = [] if model.engine is None else [model.engine.version]
    for version in range(1, publishes + 1):
        whole = trained_to(trained.adapters, version)
        with torch.no_grad():
            for name, tensor in trained.adapters.tensors().items():
                tensor.copy_(whole[name])
        if resume:
            continue
        if trains:
            assert model.trainer is not None
            state.before_update("actor")
            model.trainer.load_full({parameter_name(name): tensor for name, tensor in whole.items()})
            state.publish("actor")
        for reshard in plan.reshards:
            if state.pool == reshard.target and reshard.model == "actor":
                state.receive("actor", reshard.readers, version + 1, evaluation=False)
        if model.engine is not None:
            digests.append(model.engine.digest)
            versions.append(model.engine.version)
    for channel in state.channels.values():
        channel.close()
        found.sent += channel.moved.sent
        found.received += channel.moved.received
    if not resume:
        _save(state, Path(folder) / "checkpoints", publishes)
    if model.trainer is not None:
        _same_trainer(state, trained.adapters)
    if model.engine is not None:
        found.apart, found.dtype = _apart(state, trained.adapters)
    found.digests, found.versions = tuple(digests), tuple(versions)
    return found


def frozen_copies(plan_json: str, folder: str) -> tuple[int, int, float]:
    """Of the reference's tensors on this rank: how many there are, how many of them it has for itself; and how far its
    log-probabilities are from those of the policy before it is trained, at most."""
    state = state_of(Plan.from_json(plan_json), Path(folder))
    policy, reference = state.models["actor"].trainer, state.models["reference"].trainer
    assert policy is not None
    assert reference is not None
    theirs, mine = ({plain(p).data_ptr() for p in t.sharded.parameters.values()} for t in (policy, reference))
    batch = models.samples(8)
    before = policy.logprobs(batch, 1.0).values
    found = reference.logprobs(batch, 1.0).values
    with torch.no_grad():
        for tensor in policy.local_tensors().values():
            tensor.add_(0.1)
    assert not torch.allclose(before, policy.logprobs(batch, 1.0).values, atol=1e-3)
    assert torch.equal(found, reference.logprobs(batch, 1.0).values)
    return len(mine), len(mine - theirs), float((before - found).abs().max())


def swapped(plan_json: str, folder: str, steps: int) -> list[dict[str, tuple[int, int]]]:
    """Walk through the steps of the pool that samples, with what its plan moves: of every stage, of every object of
    the table, the bytes that are on the device and those that the plan has there."""
    plan = Plan.from_json(plan_json)
    state = state_of(plan, Path(folder))
    model = state.models["actor"]
    trained = load_model(plan.model("actor").source, Path(folder))  # type: ignore[arg-type]
    assert trained.adapters is not None
    for channel in state.channels.values():
        channel.start(0, steps)
    if model.engine is None:
        assert model.trainer is not None
        for version in range(1, steps):
            whole = trained_to(trained.adapters, version)
            state.before_update("actor")
            model.trainer.load_full({parameter_name(name): tensor for name, tensor in whole.items()})
            state.publish("actor")
        for channel in state.channels.values():
            channel.close()
        return []
    residency = residency_of(state)
    assert residency is not None
    found: list[dict[str, tuple[int, int]]] = []
    for step in range(1, steps + 1):
        metrics = StepMetrics(plan, state.pool, 0)
        if step > 1:
            for name, tensor in trained.adapters.tensors().items():
                tensor.copy_(trained_to(trained.adapters, step - 1)[name])
        for instruction in plan.program(state.pool).step:
            if isinstance(instruction, MoveObject):
                residency.move(instruction, step)
                continue
            residency.before(instruction)
            if isinstance(instruction, ReshardWeights):
                state.receive("actor", instruction.readers, step, evaluation=False)
            elif isinstance(instruction, RunStage) and isinstance(plan.stage(instruction.stage).op, Generate):
                assert _apart(state, trained.adapters)[0] < 1e-6, step
            metrics.events.append({})
            residency.after(instruction, step, metrics)
            if isinstance(instruction, RunStage):
                entry = residency.ledger.entries[-1]
                found.append({name: (size, entry.planned[name]) for name, size in entry.measured.items()})
    return found


def _save(state: RankState, folder: Path, step: int) -> None:
    """Pool after pool writes its part."""
    everyone = state.all.between(tuple(range(state.all.total)), "saved")
    pools = [stage.pool for stage in state.plan.stages if isinstance(stage.op, Train)]
    for pool in dict.fromkeys(pools):
        if state.pool == pool:
            save_checkpoint(state, folder, step, merged=True, is_last_part=lambda _, p=pool: p == pools[-1])  # type: ignore[misc]
        dist.barrier(everyone)


def _same_trainer(state: RankState, adapters: Adapters) -> None:
    """What trains, or predicts beside what samples, has the published adapters."""
    trainer = state.models["actor"].trainer
    assert trainer is not None
    expected = {parameter_name(name): tensor for name, tensor in adapters.tensors().items()}
    for name, parameter in trainer.sharded.parameters.items():
        if name in expected:
            for whole, mine in trainer.sharded.pieces(name):
                assert torch.equal(parameter.detach()[mine], expected[name][whole]), name


def refused(plan_json: str, folder: str, broken: bool = False) -> tuple[str, str, tuple[str, ...]]:
    """Why a run ends whose pools loaded other weights; or, if `broken`, one whose sampler leaves adapters out."""
    plan = Plan.from_json(plan_json)
    try:
        state = state_of(plan, Path(folder), other_base=not broken)
        if broken and state.models["actor"].engine is None:
            return "", "", ()  # only the pool that samples hears of it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merged_adapters, "add_adapter", lambda weight, *_: weight)
            for version in range(1, 4):
                channel = state.channels[plan.reshards[0].id]
                state.deliver(channel, version, lambda tensors, v=version: [t.fill_(v) for t in tensors.values()])  # type: ignore[misc]
    except RunFailure as failure:
        return failure.code, failure.message, failure.help
    raise AssertionError("it is not refused")


def trained_and_resumed(plan_json: str, folder: str) -> list[str]:
    """Digests of what this rank trains after four steps in a row, and after two, a checkpoint and two."""
    plan = Plan.from_json(plan_json)
    batch = models.samples(8)
    op = Train(model="actor", loss=(Nll(weight=1.0),), optimizer=AdamW(lr=1e-2), minibatch=8)
    found = []
    state = state_of(plan, Path(folder))
    for part in range(2):
        trainer = state.models["actor"].trainer
        assert trainer is not None
        mesh, critic = state.models["actor"].mesh, state.models["actor"].loaded.critic
        head = {} if critic is None else critic.head.state_dict()
        if not part:
            for tensor in head.values():
                tensor.fill_(0.25)
        mine = np.arange(8) if mesh is None else np.arange(mesh.dp_rank, 8, mesh.layout.dp)
        for step in range(2 * part, 4):
            if step == 2 and not part:
                save_checkpoint(state, Path(folder) / "checkpoints", 2)
            trainer.train(batch.select(mine), None, op, seed=0, step=step, rows=mine)
        found.append(weights_digest({**trainer.local_tensors(), **head}))
        if not part:
            state = state_of(plan, Path(folder))
            load_checkpoint(state, Path(folder) / "checkpoints", 2)
    return found


def _apart(state: RankState, adapters: Adapters) -> tuple[float, str]:
    model = state.models["actor"]
    assert model.engine is not None
    mine = model.engine.local_tensors()
    merged = adapters.merged()
    expected = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    if model.engine_mesh is None:
        expected = whole_tensors(merged)
    else:
        renew(expected, merged, model.engine_mesh)
    dtype = next(iter(mine.values())).dtype
    apart = max(float((mine[n].float() - t.to(dtype).float()).abs().max()) for n, t in expected.items())
    return apart, str(dtype)

"""What the workers of tests/unit/ray_runtime/parallel run. Every function is called on all ranks of a layout."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.adapters import Adapters
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.models import LoadedModel, derive
from rlflow.backends.ray_runtime.parallel import executor
from rlflow.backends.ray_runtime.parallel.legal import refuse_impossible
from rlflow.backends.ray_runtime.parallel.mesh import Mesh, make_mesh
from rlflow.backends.ray_runtime.parallel.sharded import plain
from rlflow.backends.ray_runtime.parallel.weights import reshard_views
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.cluster.presets.architecture import Architecture
from rlflow.cluster.presets.from_config import facts_of_config
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import Layout
from rlflow.ir.ops import AdamW, Entropy, Kl, Lora, PpoClip, Train, ValueClip
from rlflow.reshard.catalogue import catalogue as catalogue_of
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage
from tests.unit.ray_runtime.parallel import models
from tests.unit.ray_runtime.parallel.workers import DEADLINE

ROWS = 11
LOSS = (PpoClip(weight=1.0, clip_low=0.2, clip_high=0.2), Kl(weight=0.1, estimator="k3"), Entropy(weight=-0.01))
AXES = ("tp", "pp", "dp", "cp", "replica", "ep", "etp", "experts", "expert_dp", "stage", "ends", "world")


def mesh_members(layout: Layout, ranks: tuple[int, ...]) -> dict[str, list[int]]:
    """Per axis the places in the layout of the members of this rank's group, found by talking to them."""
    mesh = make_mesh(layout, ranks, timeout=DEADLINE)
    found = {}
    for axis in AXES:
        group = getattr(mesh, axis)
        if group is None:
            continue
        places = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(places, torch.tensor([mesh.rank]), group=group)
        found[axis] = [int(place) for place in places]
    return found


def unlike_pasts(layout: Layout) -> int:
    """A mesh over all ranks, of which some have made groups of their own before: the sum of all ranks."""
    if dist.get_rank() < 2:
        make_mesh(Layout(tp=2), (1, 0), timeout=DEADLINE)
    mesh: Mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=mesh.world)
    return int(total)


def against_one_process(
    kind: str, layout: Layout, changes: dict[str, Any], options: dict[str, Any], compute: Literal["fp32", "bf16"]
) -> dict[str, Any]:
    """Train the same model on a layout and in one process; largest differences by what differs.

    Differences are relative to the largest magnitude of what is compared.
    """
    sharding = sharding_of(models.make(kind, **changes), layout)
    executor.MUCH = options.pop("pack_above", 0.1)
    rows = np.arange(ROWS)
    batch = models.samples(ROWS)
    advantages = np.linspace(-1.0, 1.2, ROWS)
    reference = models.tokens_beside(batch, 5)
    op = Train(model="actor", loss=LOSS, optimizer=AdamW(lr=2e-3, weight_decay=0.05), **{"minibatch": 5, **options})

    alone = Trainer(models.make(kind, **changes), compute)
    mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    spread = Trainer(models.make(kind, **changes), compute, mesh)
    mine = rows[(rows * 7 % 11) % layout.dp == mesh.dp_rank]
    found: dict[str, Any] = {"names": _names(spread, mesh, alone)}

    def both(train_op: Train, step: int) -> tuple[dict[str, float], dict[str, float]]:
        one = alone.train(batch, advantages, train_op, seed=0, step=step, reference=reference)
        part, beside = batch.select(mine), reference.select(mine)
        many = spread.train(part, advantages[mine], train_op, seed=0, step=step, reference=beside, rows=mine)
        return one, many

    still = replace(op, optimizer=AdamW(lr=0.0), minibatch=0, max_grad_norm=0.0)
    one, many = both(still, 0)
    found["metrics"] = max(_apart(one[name], many[name]) for name in one)
    found["gradients"] = _gradients_apart(alone, spread, mesh)
    found["logprobs"] = _predictions_apart(alone, spread, batch, mine)
    for step in range(1, 4):
        one, many = both(op, step)
        found[f"step {step}"] = max(_apart(one[f"actor/{m}"], many[f"actor/{m}"]) for m in ("loss", "grad_norm"))
    found["weights"] = 0.0
    wanted = dict(alone.loaded.model.named_parameters())
    for name, whole in spread.full_tensors():
        assert (whole is None) == (mesh.rank > 0)
        if whole is not None:
            found["weights"] = max(found["weights"], _apart(wanted.pop(name).detach(), whole))
    assert mesh.rank or not wanted, f"missing {list(wanted)}"
    found["digests"] = [
        (name, repr(sharding.pieces(mesh.rank, name)), hashlib.sha256(view.detach().contiguous().numpy()).hexdigest())
        for name, view in spread.local_tensors().items()
    ]
    spread.load_full({name: tensor.detach() for name, tensor in alone.loaded.model.named_parameters()})
    found["loaded"] = _predictions_apart(alone, spread, batch, mine)
    return found


def sharding_of(loaded: LoadedModel, layout: Layout) -> Sharding:
    """What reshard expects every rank to hold."""
    facts = facts_of_config(loaded.model.config.to_dict())
    assert facts is not None
    storage = Storage(vocabulary_multiple=layout.tp, dtype="float32", mtp=False)
    return Sharding(catalogue_of(Architecture("small", facts)), layout, storage)


def bf16_errors(layout: Layout) -> tuple[float, float]:
    """Largest differences of gradients from one fp32 process: of one bf16 process, and of this rank's part."""
    batch = models.samples(ROWS)
    op = Train(model="actor", loss=LOSS[:1], optimizer=AdamW(lr=0.0), minibatch=0, max_grad_norm=0.0)
    mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    exact, alone = Trainer(models.make("qwen3"), "fp32"), Trainer(models.make("qwen3"), "bf16")
    spread = Trainer(models.make("qwen3"), "bf16", mesh)
    mine = np.arange(ROWS)[np.arange(ROWS) % layout.dp == mesh.dp_rank]
    advantages = np.linspace(-1.0, 1.2, ROWS)
    for trainer in (exact, alone):
        trainer.train(batch, advantages, op, seed=0, step=0)
    spread.train(batch.select(mine), advantages[mine], op, seed=0, step=0, rows=mine)
    assert all(tensor.dtype == torch.float32 for tensor in spread.local_tensors().values())
    pairs = zip(exact.loaded.model.parameters(), alone.loaded.model.parameters(), strict=True)
    return max(_apart(a.grad, b.grad) for a, b in pairs), _gradients_apart(exact, spread, mesh)


def with_and_without_mesh(layout: Layout) -> bool:
    """Whether a trainer with a mesh gets the very weights that one with a group gets."""
    batch = models.samples(ROWS)
    op = Train(model="actor", loss=LOSS[:1], optimizer=AdamW(lr=0.01), minibatch=4)
    mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    mine = np.arange(ROWS)[np.arange(ROWS) % layout.dp == mesh.dp_rank]
    weights = []
    for trainer in (Trainer(models.make("qwen3"), "fp32", mesh), Trainer(models.make("qwen3"), "fp32")):
        for step in range(2):
            trainer.train(batch.select(mine), np.ones(len(mine)), op, seed=0, step=step, rows=mine, group=mesh.dp)
        weights.append(torch.cat([p.detach().reshape(-1) for p in trainer.loaded.model.parameters()]))
    return torch.equal(*weights)


def tied_ends(layout: Layout, microbatch_tokens: int) -> list[str]:
    """Digests of the tied embedding that this rank holds, before training and after every step; none in the middle."""
    trainer = Trainer(
        models.make("qwen3", num_hidden_layers=4), "fp32", make_mesh(layout, range(layout.size), timeout=DEADLINE)
    )
    batch, found = models.samples(ROWS), []
    op = Train(model="actor", loss=LOSS[:1], optimizer=AdamW(lr=0.01), minibatch=4, microbatch_tokens=microbatch_tokens)
    for step in range(5):
        if step:
            trainer.train(batch, np.linspace(-1.0, 1.2, ROWS), op, seed=0, step=step)
        held = trainer.local_tensors().get("model.embed_tokens.weight")
        if held is not None:
            found.append(hashlib.sha256(held.detach().contiguous().numpy()).hexdigest())
    return found


def refusal(kind: str, layout: Layout, lora: bool = False) -> RunFailure:
    try:
        loaded = models.make(kind)
        if lora:
            loaded.adapters = Adapters(loaded.model, Lora(rank=4, alpha=8.0, targets="attention"))
        refuse_impossible(loaded, layout)
    except RunFailure as failure:
        return failure
    raise AssertionError(f"{layout} is not refused")


def _names(spread: Trainer, mesh: Mesh, alone: Trainer) -> str:
    """How this rank's tensors differ from what reshard expects; empty when they do not."""
    sharding = sharding_of(alone.loaded, mesh.layout)
    wanted = {
        name: tuple(sharding.local_shape(mesh.rank, local)) for name, local in sharding.local_tensors(mesh.rank).items()
    }
    have = {name: tuple(tensor.shape) for name, tensor in spread.local_tensors().items()}
    wrong = {
        name: (wanted.get(name), have.get(name)) for name in {*wanted, *have} if wanted.get(name) != have.get(name)
    }
    whole = dict(alone.loaded.model.named_parameters())
    canonical = {view: t for name, tensor in whole.items() for view, t in reshard_views(name, tensor.detach())}
    for name, tensor in spread.local_tensors().items():
        for piece in sharding.pieces(mesh.rank, name):
            at, local = (tuple(slice(*bounds) for bounds in box) for box in (piece.box, piece.local))
            if not torch.equal(canonical[name][at], tensor[local]):
                wrong[name] = "values"
    return repr(wrong) if wrong else ""


def _gradients_apart(alone: Trainer, spread: Trainer, mesh: Mesh) -> float:
    sharded = spread._parts.sharded
    wanted = dict(alone.loaded.model.named_parameters())
    moved = spread._parts.updates.moved
    worst = 0.0
    if len(moved) != len(sharded.parameters):
        return worst  # one flat part of all: compared by what it does to the weights
    for (name, _), local in zip(sharded.parameters.items(), moved, strict=True):
        for whole, mine in sharded._pieces(sharded.specs[name], mesh.place):
            worst = max(worst, _apart(wanted[name].grad[whole], local.grad[mine], wanted[name].grad))
    return worst


def _predictions_apart(alone: Trainer, spread: Trainer, batch: Batch, mine: np.ndarray) -> float:
    wanted = alone.logprobs(batch, 0.9).select(mine).values
    return _apart(wanted, spread.logprobs(batch.select(mine), 0.9).values)


def _apart(wanted: Any, found: Any, scale: torch.Tensor | None = None) -> float:
    wanted, found = torch.as_tensor(wanted), torch.as_tensor(found)
    if not wanted.numel():
        return 0.0
    largest = max(float((wanted if scale is None else scale).detach().abs().max()), 1e-6)
    return float((wanted - found).detach().abs().max()) / largest


def _trained(trainer: Trainer, mesh: Mesh, steps: range) -> None:
    batch = models.samples(ROWS)
    op = Train(model="actor", loss=LOSS[:1], optimizer=AdamW(lr=0.01), minibatch=4)
    mine = np.arange(ROWS)[np.arange(ROWS) % mesh.layout.dp == mesh.dp_rank]
    for step in steps:
        trainer.train(batch.select(mine), np.ones(len(mine)), op, seed=0, step=step, rows=mine)


def moments(layout: Layout) -> tuple[int, int]:
    """Elements of this rank's optimizer state, and of the whole model's weights."""
    mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    trainer = Trainer(models.make("qwen3"), "fp32", mesh)
    _trained(trainer, mesh, range(1))
    state = trainer.state_dict()["optimizer"]["state"].values()
    whole = sum(p.numel() for p in models.make("qwen3").model.parameters())
    return sum(t.numel() for entry in state for name, t in entry.items() if name != "step"), whole


def saved_and_resumed(layout: Layout) -> bool:
    """Whether three steps in a row, and one, a restart, and two give the same weights."""
    mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    through = Trainer(models.make("qwen3"), "fp32", mesh)
    _trained(through, mesh, range(3))
    before = Trainer(models.make("qwen3"), "fp32", mesh)
    _trained(before, mesh, range(1))
    whole: list[Any] = [{name: tensor for name, tensor in before.full_tensors()}]
    dist.broadcast_object_list(whole, src=0, group=mesh.world)
    after = Trainer(models.make("qwen3"), "fp32", mesh)
    after.load_full(whole[0])
    after.load_state_dict(before.state_dict())
    _trained(after, mesh, range(1, 3))
    pairs = zip(through.local_tensors().values(), after.local_tensors().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def critic_against_one_process(layout: Layout, shared: bool) -> float:
    """Values and losses of a value model, or of a value head on the policy's body: the largest relative difference."""
    batch = models.samples(ROWS)
    returns = Packed(models.tokens_beside(batch, 6).values + 2.0, batch.packed("response_ids").offsets)
    mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    mine = np.arange(ROWS)[np.arange(ROWS) % layout.dp == mesh.dp_rank]
    terms = (*(LOSS[:1] if shared else ()), ValueClip(weight=0.5, clip=0.2))
    op = Train(model="actor", loss=terms, optimizer=AdamW(lr=2e-3), minibatch=5)
    worst = 0.0
    trainers = []
    for on in (None, mesh):
        policy = models.make("qwen3")
        critic = derive(policy, "shared" if shared else "value")
        with torch.no_grad():
            critic.model.head.weight.add_(0.1)
        trainers.append((Trainer(policy if shared else critic, "fp32", on), critic))
    (alone, _), (spread, _) = trainers
    for step in range(3):
        values = Packed(torch.zeros_like(returns.values), returns.offsets)
        one = alone.train(batch, np.ones(ROWS), op, seed=0, step=step, returns=returns, values=values)
        part = {"returns": returns.select(mine), "values": values.select(mine), "rows": mine}
        many = spread.train(batch.select(mine), np.ones(len(mine)), op, seed=0, step=step, **part)
        worst = max(worst, *(_apart(one[name], many[name]) for name in one if "clipfrac" not in name))
    if not shared:
        wanted = alone.values(batch).select(mine).values
        worst = max(worst, _apart(wanted, spread.values(batch.select(mine)).values))
    return worst


def adapters_against_one_process(kind: str, layout: Layout, changes: dict[str, Any], compute: str) -> dict[str, Any]:
    """Losses, log-probabilities and merged weights of a model with LoRA: the largest relative differences. And whether
    this rank has the same frozen weights as before, and moments of adapters alone."""
    batch = models.samples(ROWS)
    op = Train(model="actor", loss=LOSS[:1], optimizer=AdamW(lr=1e-2), minibatch=5)
    mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    mine = np.arange(ROWS)[np.arange(ROWS) % layout.dp == mesh.dp_rank]
    trainers = []
    for on in (None, mesh):
        loaded = models.make(kind, **changes)
        loaded.adapters = Adapters(loaded.model, Lora(rank=4, alpha=8.0, targets="all_linear"))
        trainers.append(Trainer(loaded, compute, on))  # type: ignore[arg-type]
    alone, spread = trainers
    frozen = _frozen(spread)
    losses = 0.0
    for step in range(3):
        one = alone.train(batch, np.linspace(-1, 1, ROWS), op, seed=0, step=step)
        many = spread.train(batch.select(mine), np.linspace(-1, 1, ROWS)[mine], op, seed=0, step=step, rows=mine)
        losses = max(losses, *(_apart(one[name], many[name]) for name in ("actor/loss", "actor/grad_norm")))
    wanted = alone.logprobs(batch, 1.0).select(mine).values
    logprobs = _apart(wanted, spread.logprobs(batch.select(mine), 1.0).values)
    whole = {name: tensor for name, tensor in spread.full_tensors() if tensor is not None}
    merged, weights = dict(alone.loaded.adapters.merged().named_parameters()), 0.0
    for name, tensor in spread.loaded.adapters.merged_tensors(whole).items():
        weights = max(weights, _apart(merged[name], tensor))
    return {
        "losses": losses,
        "logprobs": logprobs,
        "weights": weights,
        "compared": len(whole) > 0,
        "frozen": frozen == _frozen(spread),
        "moved": sum(tensor.numel() for tensor in spread.moved_tensors()),
        "adapters": sum(tensor.numel() for tensor in spread.local_tensors().values()),
    }


def _frozen(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for parameter in trainer.sharded.parameters.values():
        if not parameter.requires_grad:
            digest.update(plain(parameter).numpy().tobytes())
    return digest.hexdigest()

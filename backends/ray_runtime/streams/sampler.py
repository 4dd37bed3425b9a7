"""A rank's end of a stream: a thread that samples all the time, takes new weights, and keeps what is finished.

Generation stops at a token, and goes on with everything that it had, when the edge has something new (prompts, weights,
groups given up) and while an evaluation uses the engine. What a step asks for is taken out of it without a stop. New
weights go on with unfinished samples, which remember the version of every token, or wait for them
(`StreamSpec.drains`). Where they wait, nothing stops generation before its samples are finished: what is read anew
after a stop differs in the last bits, and when one stops is a matter of the clock.

The ranks of a replica (tensor parallelism) have a thread each. The first alone talks with the edge; before everything
that it does it tells the others, and each gives its share of the samples to the steps.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch.distributed as dist

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.parallel.mesh import new_group
from rlflow.backends.ray_runtime.spells import Spells
from rlflow.backends.ray_runtime.state import RankState
from rlflow.backends.ray_runtime.streams.sample_edge import Orders, Ticket
from rlflow.backends.ray_runtime.streams.specs import StreamSpec
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate

DRAWS = 1
"""The step that names the random streams of samples; the prompts' numbers, unique over epochs, tell them apart."""
_LOOK_S = 0.005
"""Between two looks for something new while samples are generated."""
_IDLE_S = 0.05
_SETTLE_S = 0.02
"""For prompts that come with new weights, before generation goes on without them."""
_ORDERS_S = 20.0


class Sampler:
    """Of one rank. `edge` is the actor. The main thread calls the public methods."""

    def __init__(self, spec: StreamSpec, state: RankState, edge: Any) -> None:
        self.spec = spec
        self._state, self._edge = state, edge
        op = state.plan.stage(spec.stage).op
        assert isinstance(op, Generate)
        self._op = op
        self._channel = next(channel for channel in state.channels.values() if spec.stage in channel.reshard.readers)
        engine = state.models[spec.model].engine
        assert engine is not None
        self._engine = engine
        self._replica, self._number = divmod(state.rank, spec.together)
        """Of all, and this rank in it."""
        self._others: dist.ProcessGroup | None = None
        mesh = state.models[spec.model].engine_mesh
        if mesh is not None and mesh.replica is not None:
            ranks = mesh.members(lambda place: place.dp)
            self._others = new_group(ranks, f"samples of {spec.stage}", state.all.timeout)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._wake = False
        """Stop at the next token: the main thread wants the engine, or the end."""
        self.asked = False
        """A step waits for samples that are finished."""
        self._end = False
        self._holds = self._stopped = self._over = 0
        """How often the main thread wanted the engine for itself, got it, and gave it back."""
        self._watch: Any = None
        """What the edge will say next."""
        self._tickets: list[Ticket] = []
        self._ids: dict[tuple[int, int], int] = {}
        """(position, number in the group) to the id of an unfinished sample."""
        self._unfinished: Batch | None = None
        self._finished: Batch | None = None
        self._none: Batch | None = None
        """No samples, with all their columns."""
        self._due = 0
        """The newest version that is on its way here."""
        self._reports: list[Any] = []
        """Answers of the edge to what one call of the engine told it."""
        self._looked = 0.0
        """When `_enough` last asked whether the edge has something new."""

    # --- the main thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._due = self._channel.version
        self._thread = threading.Thread(target=self._guarded, name=f"samples of {self.spec.stage}", daemon=True)
        self._thread.start()

    def batch(self, step: int) -> Batch:
        """This rank's samples of a step, whole groups in the order of training. RLF5041 when they do not come."""
        answer = self._ask(self._edge.batch.remote(self._replica, step))
        if isinstance(answer, str):
            raise self._late(f"the samples of step {step}", answer)
        with self._changed:
            self._wait(lambda: self._has(answer), f"the samples of step {step}, which the edge says are finished")
            self.asked = False
            return self._taken(answer)

    @property
    def spells(self) -> Spells:
        """What the engine's time went to."""
        return self._engine.spells

    @contextmanager
    def held(self, version: int | None) -> Iterator[None]:
        """The engine is the caller's, with the weights of `version` (None: any)."""
        with self._changed:
            if version is not None:
                self._wait(lambda: self._channel.version >= version, f"version {version} of `{self.spec.model}`")
            self._holds += 1
            self._wake = not self.spec.drains
            self._wait(lambda: self._stopped >= self._holds, "generation to stop")
        try:
            yield
        finally:
            with self._changed:
                self._over, self._wake = self._holds, False
                self._changed.notify_all()

    def finish(self, end: int) -> None:
        """The run ends after step `end`: what is on its way arrives, and the thread ends."""
        if self._thread is None:
            return
        with self._changed:
            left = self._channel.left(end)
            if left:
                self._wait(lambda: self._channel.version >= left[-1], f"version {left[-1]} of `{self.spec.model}`")
            self._end = self._wake = True
            self._changed.notify_all()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _has(self, positions: list[int]) -> bool:
        self.asked = True
        if self._finished is None:
            return not positions and self._none is not None
        found = np.isin(self._finished.array("uid"), positions)
        return int(found.sum()) == len(positions) * self._op.n

    def _taken(self, positions: list[int]) -> Batch:
        """This rank's share of them out of what is finished, in the order of `positions`; the others leave, too."""
        if not positions:
            assert self._none is not None
            return self._none
        gone = self._finished
        assert gone is not None
        self._finished = _without(gone, set(positions))
        share = np.array_split(np.array(positions, dtype=np.int64), self.spec.together)[self._number]
        place = {position: number for number, position in enumerate(share.tolist())}
        group = np.array([place.get(uid, -1) for uid in gone.array("uid").tolist()], dtype=np.int64)
        mine = np.flatnonzero(group >= 0)
        mine = mine[np.lexsort((gone.array("sample")[mine], group[mine]))]
        return gone.select(mine).with_columns(group=group[mine])

    def _ask(self, ref: Any) -> Any:
        """The answer of the edge; what went wrong in the thread comes first."""
        while True:
            ready, _ = ray.wait([ref], timeout=_IDLE_S)
            if self._failure is not None:
                raise self._failure
            if ready:
                return self._got(ref)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """With the lock: until `ready`."""
        until = time.monotonic() + self._state.all.timeout.total_seconds()
        while not ready():
            if self._failure is not None:
                raise self._failure
            if not self._changed.wait(max(0.0, min(1.0, until - time.monotonic()))) and time.monotonic() >= until:
                raise self._late(what, "the thread that samples did not give them")

    def _late(self, what: str, why: str) -> RunFailure:
        limit = self._state.all.timeout.total_seconds()
        return RunFailure(
            "RLF5041",
            f"rank {self._state.rank} of pool `{self.spec.source}` waited {limit:g} s for {what}",
            stage=self.spec.stage,
            notes=(f"the edge of `{self.spec.stage}`: {why}",),
        )

    def _got(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise RunFailure(
                "RLF5042",
                f"the actor that admits the samples of `{self.spec.stage}` is gone",
                stage=self.spec.stage,
                notes=(f"{type(error).__name__}: {str(error).splitlines()[0]}",),
                help=("go on from the last checkpoint: `rlflow run --resume`",),
            ) from None

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            word = self._next()
            if word.end:
                return
            if word.holds > self._over:
                with self._changed:
                    self._stopped = word.holds
                    self._changed.notify_all()
                    while self._over < word.holds:
                        self._changed.wait(1.0)
                continue
            if word.orders:
                self._obey(word.orders)
            arriving = self._channel.left(self._due)
            if arriving and not (self._open and self.spec.drains):
                self._load(arriving)
            elif self._open or self._none is None:
                self._generate()

    @property
    def _open(self) -> bool:
        """Whether there are samples to be gone on with."""
        return bool(self._tickets) or self._unfinished is not None

    def _next(self) -> _Word:
        """What all ranks of the replica do next, which the first says."""
        told: list[_Word | None] = [None]
        if self._number == 0:
            with self._changed:
                end, holds = self._end, self._holds
            orders = None if end or holds > self._over else self._orders(_SETTLE_S if self._open else _IDLE_S)
            told = [_Word(end, holds, orders or Orders())]
        if self._others is not None:
            dist.broadcast_object_list(told, group=self._others, group_src=0)
        assert told[0] is not None
        return told[0]

    def _orders(self, seconds: float) -> Orders | None:
        if self._watch is None:
            self._watch = self._edge.orders.remote(self._replica, _ORDERS_S)
        ready, _ = ray.wait([self._watch], timeout=seconds)
        if not ready:
            return None
        found: Orders = self._got(self._watch)
        self._watch = None
        return found

    def _obey(self, orders: Orders) -> None:
        self._due = max(self._due, orders.version)
        self._tickets += orders.tickets
        for ticket in orders.tickets:
            self._ids.update({(ticket.position, number): id for number, id in enumerate(ticket.samples)})
        if not orders.drop:
            return
        gone = set(orders.drop)
        self._tickets = [ticket for ticket in self._tickets if ticket.position not in gone]
        self._ids = {key: id for key, id in self._ids.items() if key[0] not in gone}
        with self._changed:
            self._unfinished = _without(self._unfinished, gone)
            self._finished = _without(self._finished, gone)

    def _load(self, versions: list[int]) -> None:
        """Every version that was sent, in order."""
        for version in versions:
            self._state.deliver(self._channel, version, functools.partial(self._channel.receive, version))
        if self._number == 0:
            self._got(self._edge.loaded.remote(self._replica, versions[-1]))
        with self._changed:
            self._changed.notify_all()

    def _generate(self) -> None:
        """Until everything is finished, or something new is there."""
        begun, tickets = self._unfinished, self._tickets
        prompts = self._prompts([ticket.position for ticket in tickets])
        keys = [] if begun is None else _keys(begun)
        keys += [(ticket.position, number) for ticket in tickets for number in range(self._op.n)]
        ids = np.array([self._ids[key] for key in keys], dtype=np.int64)
        had = 0 if begun is None else begun.rows
        before = [] if begun is None else begun.packed("response_ids").lengths.tolist()
        version = self._engine.version
        self._reports = []
        self._report("began", ids.tolist(), version)
        if self._watch is None and self._number == 0:
            self._watch = self._edge.orders.remote(self._replica, _ORDERS_S)
        found = self._engine.generate_partial(
            prompts,
            self._op,
            seed=self._state.seed,
            step=DRAWS,
            begun=begun,
            enough=self._enough,
            ends=self._state.ends(self.spec.stage),
            handover=_Handover(self, ids),
        )
        self.tell_finished([self._ids[key] for key in _keys(found.finished)])
        self.keep(found.finished)
        place = {key: number for number, key in enumerate(keys)}
        made: dict[int, int] = {}
        for key, length in zip(
            _keys(found.unfinished), found.unfinished.packed("response_ids").lengths.tolist(), strict=True
        ):
            number = place[key]
            made[int(ids[number])] = length - (before[number] if number < had else 0)
        self._report("paused", made, version)
        for report in self._reports:
            self._got(report)
        with self._changed:
            self._tickets = []
            self._unfinished = found.unfinished if found.unfinished.rows else None
            self._changed.notify_all()

    def _enough(self, complete: np.ndarray) -> bool:
        """Whether generation is to stop for something new."""
        if self._wake or self.spec.drains or self._watch is None:
            return self._wake
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return False
        self._looked = now
        return bool(ray.wait([self._watch], timeout=0)[0])

    def tell_finished(self, ids: list[int]) -> None:
        """To the edge, which may hear it twice."""
        self._report("finished", ids)

    def _report(self, what: str, *about: Any) -> None:
        """Tell the edge, and look later what it says to it."""
        if self._number == 0:
            self._reports.append(getattr(self._edge, what).remote(*about))

    def keep(self, samples: Batch) -> None:
        """Finished samples, for the steps that will ask for them."""
        for key in _keys(samples):
            del self._ids[key]
        with self._changed:
            self.asked = False
            self._none = samples.select([])
            kept = [batch for batch in (self._finished, samples) if batch is not None and batch.rows]
            self._finished = Batch.concat(kept) if kept else None
            self._changed.notify_all()

    def _prompts(self, positions: list[int]) -> Batch:
        data = self._state.data[self.spec.data]
        parts = [data.take(position, 1, self._state.seed)[0] for position in positions]
        return Batch.concat(parts) if parts else data.take(0, 1, self._state.seed)[0].select([])


@dataclass(frozen=True)
class _Word:
    """What the ranks of a replica do next: end, or give the engine away for the n-th time, or obey."""

    end: bool
    holds: int
    orders: Orders


class _Handover:
    """Between one call of the engine and a sampler. `ids`: of the call's samples."""

    def __init__(self, sampler: Sampler, ids: np.ndarray) -> None:
        self._sampler, self._ids = sampler, ids
        self._told = np.zeros(len(ids), dtype=bool)

    def wanted(self, waiting: np.ndarray) -> bool:
        new = waiting & ~self._told
        if new.any():
            self._sampler.tell_finished(self._ids[new].tolist())
            self._told |= new
        return self._sampler.asked and bool(waiting.any())

    def take(self, samples: Batch) -> None:
        self._sampler.keep(samples)


def _keys(samples: Batch) -> list[tuple[int, int]]:
    return list(zip(samples.array("uid").tolist(), samples.array("sample").tolist(), strict=True))


def _without(samples: Batch | None, positions: set[int]) -> Batch | None:
    """The samples of other prompts; None for no samples."""
    if samples is None:
        return None
    kept = np.flatnonzero(~np.isin(samples.array("uid"), list(positions)))
    return samples.select(kept) if len(kept) else None

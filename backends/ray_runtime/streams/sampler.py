"""A rank's end of a stream: a thread that samples all the time, takes new weights, and keeps what is finished.

Generation stops at a token, and goes on with everything that it had, when the edge has something new (prompts, weights,
groups given up), when a step's samples are asked for, and while an evaluation uses the engine. New weights go on with
unfinished samples, which remember the version of every token, or wait for them (`StreamSpec.drains`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

from rlflow.backends.ray_runtime.batch import Batch
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
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._wake = False
        """Stop at the next token: the main thread wants something."""
        self._hold = self._held = self._end = False
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
        self.dropped = 0
        """Samples given up so far."""
        self._asked: list[int] | None = None
        """Positions whose samples the main thread waits for: they are finished, and generation goes on."""
        self.resumed = 0
        """How often an unfinished sample was gone on with."""

    # --- the main thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._due = self._channel.version
        self._thread = threading.Thread(target=self._guarded, name=f"samples of {self.spec.stage}", daemon=True)
        self._thread.start()

    def batch(self, step: int) -> Batch:
        """This rank's samples of a step, whole groups in the order of training. RLF5041 when they do not come."""
        answer = self._ask(self._edge.batch.remote(self._state.rank, step))
        if isinstance(answer, str):
            raise self._late(f"the samples of step {step}", answer)
        with self._changed:
            self._asked = answer
            what = f"the samples of step {step}, which the edge says are finished"
            self._wait(lambda: self._has(answer), what, not self._engine.alone)
            self._asked, self._wake = None, False
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
                self._wait(lambda: self._channel.version >= version, f"version {version} of `{self.spec.model}`", False)
            self._hold = True
            self._wait(lambda: self._held, "generation to stop at a token")
        try:
            yield
        finally:
            with self._changed:
                self._hold = self._wake = False
                self._changed.notify_all()

    def finish(self, end: int) -> None:
        """The run ends after step `end`: what is on its way arrives, and the thread ends."""
        if self._thread is None:
            return
        with self._changed:
            left = self._channel.left(end)
            if left:
                self._wait(
                    lambda: self._channel.version >= left[-1], f"version {left[-1]} of `{self.spec.model}`", False
                )
            self._end = self._wake = True
            self._changed.notify_all()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _has(self, positions: list[int]) -> bool:
        self._wake = self._wake or not self._engine.alone
        if self._finished is None:
            return not positions and self._none is not None
        found = np.isin(self._finished.array("uid"), positions)
        return int(found.sum()) == len(positions) * self._op.n

    def _taken(self, positions: list[int]) -> Batch:
        """Out of what is finished, in the order of `positions`."""
        if not positions:
            assert self._none is not None
            return self._none
        assert self._finished is not None
        place = {position: number for number, position in enumerate(positions)}
        uids = self._finished.array("uid")
        group = np.array([place.get(uid, -1) for uid in uids.tolist()], dtype=np.int64)
        mine = np.flatnonzero(group >= 0)
        mine = mine[np.lexsort((self._finished.array("sample")[mine], group[mine]))]
        batch = self._finished.select(mine).with_columns(group=group[mine])
        self._finished = self._finished.select(np.flatnonzero(group < 0))
        return batch

    def _ask(self, ref: Any) -> Any:
        """The answer of the edge; what went wrong in the thread comes first."""
        while True:
            ready, _ = ray.wait([ref], timeout=_IDLE_S)
            if self._failure is not None:
                raise self._failure
            if ready:
                return self._got(ref)

    def _wait(self, ready: Callable[[], bool], what: str, stop: bool = True) -> None:
        """With the lock: until `ready`. `stop`: generation is to stop for it."""
        until = time.monotonic() + self._state.all.timeout.total_seconds()
        while not ready():
            if self._failure is not None:
                raise self._failure
            self._wake = self._wake or stop
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
            with self._changed:
                if self._end:
                    return
                self._held = self._hold
                self._changed.notify_all()
                if self._held:
                    self._changed.wait(1.0)
                    continue
            busy = bool(self._tickets) or self._unfinished is not None
            orders = self._orders(_SETTLE_S if busy else _IDLE_S)
            if orders:
                self._obey(orders)
            open_ = bool(self._tickets) or self._unfinished is not None
            arriving = self._channel.left(self._due)
            if arriving and not (open_ and self.spec.drains):
                self._load(arriving)
            elif open_ or self._none is None:
                self._generate()

    def _orders(self, seconds: float) -> Orders | None:
        if self._watch is None:
            self._watch = self._edge.orders.remote(self._state.rank, _ORDERS_S)
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
            before = self._rows()
            self._unfinished = _without(self._unfinished, gone)
            self._finished = _without(self._finished, gone)
            self.dropped += before - self._rows()

    def _rows(self) -> int:
        return sum(batch.rows for batch in (self._unfinished, self._finished) if batch is not None)

    def _load(self, versions: list[int]) -> None:
        """Every version that was sent, in order."""
        for version in versions:
            self._state.deliver(self._channel, version, functools.partial(self._channel.receive, version))
        self._got(self._edge.loaded.remote(self._state.rank, versions[-1]))
        with self._changed:
            self._changed.notify_all()

    def _generate(self) -> None:
        """Until everything is finished, or something new is there."""
        begun, tickets = self._unfinished, self._tickets
        prompts = self._prompts([ticket.position for ticket in tickets])
        keys = (
            [] if begun is None else list(zip(begun.array("uid").tolist(), begun.array("sample").tolist(), strict=True))
        )
        keys += [(ticket.position, number) for ticket in tickets for number in range(self._op.n)]
        ids = np.array([self._ids[key] for key in keys], dtype=np.int64)
        had = 0 if begun is None else begun.rows
        self.resumed += had
        before = [] if begun is None else begun.packed("response_ids").lengths.tolist()
        version = self._engine.version
        reports = [self._edge.began.remote(ids.tolist(), version)]
        told = np.zeros(len(ids), dtype=bool)
        looked = time.monotonic()

        def tell(complete: np.ndarray) -> None:
            new = complete & ~told
            if new.any():
                reports.append(self._edge.finished.remote(ids[new].tolist()))
                told[new] = True

        def enough(complete: np.ndarray) -> bool:
            nonlocal looked
            tell(complete)
            if self._wake:
                return True
            now = time.monotonic()
            if now - looked < _LOOK_S or self._watch is None:
                return False
            looked = now
            return bool(ray.wait([self._watch], timeout=0)[0])

        if self._watch is None:
            self._watch = self._edge.orders.remote(self._state.rank, _ORDERS_S)
        hand = _Hand(self, keys) if self._engine.alone else None
        found = self._engine.generate_partial(
            prompts,
            self._op,
            seed=self._state.seed,
            step=DRAWS,
            begun=begun,
            enough=enough,
            ends=self._state.ends(self.spec.stage),
            hand=hand,
        )
        place = {key: number for number, key in enumerate(keys)}
        complete = np.zeros(len(ids), dtype=bool)
        for key in _keys(found.finished):
            complete[place[key]] = True
            del self._ids[key]
        tell(complete)
        made: dict[int, int] = {}
        for key, length in zip(
            _keys(found.unfinished), found.unfinished.packed("response_ids").lengths.tolist(), strict=True
        ):
            number = place[key]
            made[int(ids[number])] = length - (before[number] if number < had else 0)
        reports.append(self._edge.paused.remote(made, version))
        for report in reports:
            self._got(report)
        with self._changed:
            self._tickets = []
            self._unfinished = found.unfinished if found.unfinished.rows else None
            self.keep(found.finished if hand is None else hand.rest(found.finished))

    def keep(self, samples: Batch) -> None:
        """With the lock: these are finished."""
        self._none = samples.select([])
        kept = [batch for batch in (self._finished, samples) if batch is not None and batch.rows]
        self._finished = Batch.concat(kept) if kept else None
        self._changed.notify_all()

    def asked(self) -> list[int] | None:
        """Positions whose samples are asked for and are not all at hand."""
        asked = self._asked
        if asked is None:
            return None
        with self._changed:
            return None if self._has(asked) else asked

    @property
    def changed(self) -> threading.Condition:
        return self._changed

    def _prompts(self, positions: list[int]) -> Batch:
        data = self._state.data[self.spec.data]
        parts = [data.take(position, 1, self._state.seed)[0] for position in positions]
        return Batch.concat(parts) if parts else data.take(0, 1, self._state.seed)[0].select([])


class _Hand:
    """Gives a sampler what is finished of one call of the engine (`engine.HandOver`). `keys` of its samples."""

    def __init__(self, sampler: Sampler, keys: list[tuple[int, int]]) -> None:
        self._sampler = sampler
        self._keys = keys
        self._given: set[tuple[int, int]] = set()

    def wanted(self, complete: np.ndarray) -> np.ndarray | None:
        asked = self._sampler.asked()
        if asked is None:
            return None
        positions = set(asked)
        numbers = [number for number, key in enumerate(self._keys) if key[0] in positions and key not in self._given]
        # The edge was told of the last ones a moment before it said that they are finished.
        return np.array(numbers, dtype=np.int64) if complete[numbers].all() else None

    def take(self, samples: Batch) -> None:
        self._given.update(_keys(samples))
        with self._sampler.changed:
            self._sampler.keep(samples)

    def rest(self, finished: Batch) -> Batch:
        """Without those that were given already."""
        return finished.select([number for number, key in enumerate(_keys(finished)) if key not in self._given])


def _keys(samples: Batch) -> list[tuple[int, int]]:
    return list(zip(samples.array("uid").tolist(), samples.array("sample").tolist(), strict=True))


def _without(samples: Batch | None, positions: set[int]) -> Batch | None:
    """The samples of other prompts; None for no samples."""
    if samples is None:
        return None
    kept = np.flatnonzero(~np.isin(samples.array("uid"), list(positions)))
    return samples.select(kept) if len(kept) else None

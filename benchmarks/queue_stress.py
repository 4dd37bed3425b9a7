"""Samples, rewards and training over the real queues on Ray, with everything random and processes that die.

    python benchmarks/queue_stress.py --seeds 5 --steps 60

Every seed is one game per rule: the actor that admits samples (streams) and a DistQueue of several actors, as in a run.
Two replicas sample groups for random times (lognormal, sigma 1) without a model, take new versions when they are told
to, and put each finished group into the queue. Reward workers take what is there, are killed -9 with groups in their
hands, and write the scores as a late field. The trainer takes the groups of each step in the order that it is told,
trains for a random time, and publishes. Checked in each game:

* every prompt that was handed out is trained on once, given up by `evict`, or still under way in the end;
* no sample is older than the rule promises; each step has a whole batch, or what the trigger says at least;
* the contents are those that were put, each score once, whoever had died in between;
* every step comes in time (no starvation), the queue never holds more than its capacity, and is empty of everything
  that was trained on.

Prints the ages seen beside the ages promised. See README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import ray

from rlflow.backends.ray_runtime.dist_queue.client import DistQueue, start_queue
from rlflow.backends.ray_runtime.dist_queue.columns import Ragged
from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, RowFacts
from rlflow.backends.ray_runtime.streams.edge_actor import EdgeActor
from rlflow.backends.ray_runtime.streams.sample_edge import Orders
from rlflow.backends.ray_runtime.streams.specs import StreamSpec
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.protocol.guarantees import guarantee
from rlflow.protocol.settings import Settings
from rlflow.protocol.trigger import Trigger

GROUP, GROUPS, BOUND = 2, 6, 2
"""Samples of a group, groups of a batch, steps."""
LONG = 40_000
"""Numbers of the longest row: beyond what travels inline."""
DEADLINE_S = 60.0
RULES: dict[str, tuple[str, Trigger, int]] = {
    "in_order": ("in_order", Trigger(), 1),
    "in_order, burst 2": ("in_order", Trigger(), 2),
    "slack_edf": ("slack_edf", Trigger(), 1),
    "evict": ("evict", Trigger(), 1),
    "wait": ("wait", Trigger(), 1),
    "count": ("count", Trigger(), 1),
    "slack_edf, trigger 75 %": ("slack_edf", Trigger(Fraction(3, 4), "partial"), 1),
}


def contents(position: int) -> list[np.ndarray]:
    """The rows of a prompt's group: int32 [tokens]."""
    drawn = np.random.default_rng(position)
    lengths = np.minimum(LONG, 1 + drawn.lognormal(5.0, 2.0, GROUP).astype(np.int64))
    return [np.arange(length, dtype=np.int32) + 100 * position for length in lengths.tolist()]


class Replica:
    """Samples for real time without a model. One thread; the engine's rules as in streams/sampler.py."""

    def __init__(self, number: int, edge: Any, spec: EdgeSpec, actors: list[Any], seed: int, drains: bool) -> None:
        self.number, self.edge, self.drains = number, edge, drains
        self.queue = DistQueue(spec, actors, "rollout", number)
        self.random = random.Random(seed * 100 + number)
        self.births: dict[int, int] = {}
        self.over = False

    def stop(self) -> None:
        self.over = True

    def sample(self) -> dict[int, int]:
        """Until it is stopped; the oldest version that made a token, by prompt."""
        version = due = 0
        left: dict[int, float] = {}
        begun: set[int] = set()
        place: dict[int, int] = {}
        group_of: dict[int, set[int]] = {}
        dropped: list[int] = []
        watch = None
        while not self.over:
            if watch is None:
                watch = self.edge.orders.remote(self.number, 5.0)
            ready, _ = ray.wait([watch], timeout=0.002)
            orders = Orders()
            if ready:
                orders, watch = ray.get(watch), None
            due = max(due, orders.version)
            dropped = [position for position in dropped if not self._removed(position)]
            for ticket in orders.tickets:
                group_of[ticket.position] = set(ticket.samples)
                for id in ticket.samples:
                    left[id] = 0.002 * self.random.lognormvariate(0.0, 1.0)
                    place[id] = ticket.position
            for position in orders.drop:
                if position not in group_of:
                    dropped.append(position)
                for id in group_of.pop(position, ()):
                    left.pop(id, None)
                    begun.discard(id)
            if due > version and not (self.drains and left):
                if begun:
                    ray.get(self.edge.paused.remote(dict.fromkeys(begun, 1), version))
                    begun.clear()
                version = due
                ray.get(self.edge.loaded.remote(self.number, version))
                continue
            new = [id for id in left if id not in begun]
            if new:
                ray.get(self.edge.began.remote(new, version))
                begun.update(new)
                for id in new:
                    self.births[place[id]] = min(self.births.get(place[id], version), version)
            before = time.monotonic()
            time.sleep(0.001)
            spent = time.monotonic() - before
            ended = []
            for id in list(left):
                left[id] -= spent
                if left[id] <= 0:
                    ended.append(id)
                    del left[id]
                    begun.discard(id)
            # Rows first: a step may be told of a group as soon as the edge knows that it is finished.
            for position in dict.fromkeys(place[id] for id in ended):
                if position in group_of and not group_of[position] & left.keys():
                    self._put(position)
                    del group_of[position]
            if ended:
                ray.get(self.edge.finished.remote(ended))
        return self.births

    def _removed(self, position: int) -> bool:
        """Whether a group that was given up has left the queue; not while a reward worker reads it."""
        try:
            self.queue.remove(position, "too old")
        except RunFailure as failure:
            if "is reading it" in "".join(failure.notes):
                return False
            raise
        return True

    def _put(self, position: int) -> None:
        rows = contents(position)
        ids = tuple(range(position * GROUP, (position + 1) * GROUP))
        offsets = np.cumsum([0, *map(len, rows)])
        facts = RowFacts(ids, (position,) * GROUP, versions=(self.births[position],) * GROUP)
        self.queue.put(f"replica {self.number}", facts, {"tokens": Ragged(np.concatenate(rows), offsets)})


class Reward:
    """Takes groups as they come and writes their scores. Dies now and then, with groups that it has taken."""

    def __init__(self, spec: EdgeSpec, actors: list[Any], name: str, seed: int, deaths: float) -> None:
        self.queue, self.name = DistQueue(spec, actors, "rewards", 0), name
        self.random, self.deaths = random.Random(seed), deaths

    def serve(self) -> None:
        while True:
            try:
                reading = self.queue.take("reward", GROUP, GROUP * GROUPS, reader=self.name)
            except RunFailure as failure:
                if failure.code == "RLF5019":
                    return  # the game is over: nothing came for long
                raise
            if reading.ended:
                return
            tokens = reading.columns()["tokens"]
            assert isinstance(tokens, Ragged)
            scores = [tokens.values[a:b].sum(dtype=np.float64) for a, b in pairwise(tokens.offsets)]
            time.sleep(0.002 * self.random.random())
            if self.random.random() < self.deaths:
                os.kill(os.getpid(), signal.SIGKILL)
            self.queue.put_fields(reading.facts, {"score": np.asarray(scores)})
            self.queue.done("reward", reading.groups)


class Game:
    """One rule and one seed. `play` raises AssertionError for what must not be."""

    def __init__(self, rule: str, seed: int, steps: int, deaths: float) -> None:
        name, self.trigger, burst = RULES[rule]
        sizes = {"batch": GROUPS * GROUP, "group": GROUP}
        self.settings = Settings(name, BOUND, burst=burst, trigger=self.trigger, **sizes)  # type: ignore[arg-type]
        self.promised = guarantee(name, bound=BOUND, burst=burst, trigger=self.trigger, **sizes)  # type: ignore[arg-type]
        self.steps, self.seed, self.deaths = steps, seed, deaths
        capacity = (BOUND + 2) * GROUPS * GROUP
        reads = {"reward": ("tokens",), "train": ("tokens", "score")}
        producers = ("replica 0", "replica 1")
        self.spec = EdgeSpec("stress", producers, reads, 2 * capacity, GROUP, deadline_s=DEADLINE_S, shards=2)
        self.actors = start_queue(self.spec)
        stream = StreamSpec("s", "b", "d", "m", "rollout", "learner", self.settings, self.promised.worst_age, 1)
        self.drains = stream.drains
        self.edge = ray.remote(num_cpus=0)(EdgeActor).remote(stream, 2, DEADLINE_S)
        self.random = random.Random(seed)
        self.ages: Counter[int] = Counter()
        self.trained: Counter[int] = Counter()
        self.killed = self.most_depth = 0

    def play(self) -> None:
        ray.get(self.edge.begin.remote(0, self.steps, None))
        replica = ray.remote(num_cpus=0, max_concurrency=2)(Replica)
        replicas = [replica.remote(n, self.edge, self.spec, self.actors, self.seed, self.drains) for n in range(2)]
        samples = [actor.sample.remote() for actor in replicas]
        rewards = [threading.Thread(target=self._rewards, args=(number,)) for number in range(2)]
        for thread in rewards:
            thread.start()
        try:
            self._train()
        finally:
            ray.get([actor.stop.remote() for actor in replicas])
        births: dict[int, int] = {}
        for found in ray.get(samples, timeout=DEADLINE_S):
            births |= found
        queue = DistQueue(self.spec, self.actors)
        for producer in self.spec.producers:
            queue.close(producer)
        for thread in rewards:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a reward worker waits for ever"
        self._check(queue, births)
        for actor in (*replicas, *self.actors, self.edge):
            ray.kill(actor)

    def _rewards(self, number: int) -> None:
        """One worker after another: whoever dies is followed, and what it held is given back."""
        queue = DistQueue(self.spec, self.actors)
        for life in range(10_000):
            name = f"worker {number}, life {life}"
            worker = ray.remote(num_cpus=0)(Reward).remote(
                self.spec, self.actors, name, self.random.randrange(1 << 30), self.deaths
            )
            try:
                ray.get(worker.serve.remote())
                return
            except ray.exceptions.RayActorError:
                self.killed += 1
                queue.give_back("reward", name)

    def _train(self) -> None:
        queue = DistQueue(self.spec, self.actors, "learner", 0)
        least, most = self.trigger.least(GROUPS * GROUP, GROUP) // GROUP, GROUPS
        assert self.spec.capacity is not None
        for step in range(1, self.steps + 1):
            ray.get(self.edge.want.remote(step))
            parts = ray.get([self.edge.batch.remote(number, step) for number in range(2)], timeout=2 * DEADLINE_S)
            assert not any(isinstance(part, str) for part in parts), f"step {step}: {parts}"
            positions = [position for part in parts for position in part]
            assert least <= len(positions) <= most, f"step {step} has {len(positions)} groups"
            reading = queue.take_groups("train", positions)
            assert reading.groups == tuple(positions) or set(reading.groups) == set(positions)
            columns = reading.columns()
            tokens = columns["tokens"]
            assert isinstance(tokens, Ragged)
            rows = [tokens.values[a:b] for a, b in pairwise(tokens.offsets)]
            expected = [row for group in reading.groups for row in contents(group)]
            assert len(rows) == len(expected)
            for row, should, score in zip(rows, expected, np.asarray(columns["score"]).tolist(), strict=True):
                assert np.array_equal(row, should), "contents that nobody put"
                assert score == should.sum(dtype=np.float64), "a score of other contents"
            self.ages.update(step - 1 - version for version in reading.facts.versions[::GROUP])
            self.trained.update(reading.groups)
            depth = queue.facts()["depth"] * GROUP
            self.most_depth = max(self.most_depth, depth)
            assert depth <= self.spec.capacity, "more than its capacity in the queue"
            time.sleep(0.004 * self.random.lognormvariate(0.0, 1.0))
            queue.done("train", reading.groups)
            ray.get(self.edge.trained.remote(step))

    def _check(self, queue: DistQueue, births: dict[int, int]) -> None:
        cursor = ray.get(self.edge.cursor.remote())
        assert max(self.trained.values()) == 1, "trained on twice"
        ended = {place for low, high in cursor["ended"] for place in range(low, high)}
        given_up = cursor["ends"].get("too old", 0)
        assert cursor["ends"]["trained"] == len(self.trained)
        assert len(ended) == len(self.trained) + given_up
        assert set(self.trained) <= ended
        assert ended | set(cursor["again"]) == set(range(cursor["next"])), "a prompt is nowhere"
        assert given_up == 0 or self.settings.rule == "evict"
        assert not set(self.trained) - births.keys()
        if self.promised.worst_age is not None:
            assert max(self.ages) <= self.promised.worst_age, f"ages {dict(self.ages)}"
        left = queue.facts()["depth"]
        assert left <= len(cursor["again"]), f"{left} groups are left, and {len(cursor['again'])} prompts under way"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--deaths", type=float, default=0.1, help="that a reward worker dies with what it has taken")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    given = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    failed = 0
    for rule in given.rules:
        ages: Counter[int] = Counter()
        killed = depth = 0
        began, wrong = time.monotonic(), []
        for seed in range(given.seeds):
            game = Game(rule, seed, given.steps, given.deaths)
            try:
                game.play()
            except (AssertionError, RunFailure, ray.exceptions.RayError) as error:
                wrong.append(f"seed {seed}: {error}")
            ages += game.ages
            killed, depth = killed + game.killed, max(depth, game.most_depth)
        failed += len(wrong)
        promised = game.promised.worst_age
        print(
            f"{rule:24} {given.seeds - len(wrong)} of {given.seeds} games; {sum(ages.values())} groups, ages "
            f"{dict(sorted(ages.items()))}, promised {'none' if promised is None else promised}; {killed} workers "
            f"killed; at most {depth} of {game.spec.capacity} places; {time.monotonic() - began:.0f} s",
            flush=True,
        )
        for text in wrong:
            print("   ", text, flush=True)
    ray.shutdown()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

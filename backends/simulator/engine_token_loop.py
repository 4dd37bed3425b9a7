"""The same engine as `Engine`, one token after the other: what the closed forms are compared with.

It keeps nothing that can be counted again: every step it looks at all requests. Slow, and easy to believe.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

from rlflow.backends.simulator.engine_messages import (
    Abort,
    Command,
    EngineEvent,
    Interrupt,
    Pause,
    Publish,
    Request,
    Resume,
    Segments,
    SetSpeed,
    Submit,
)
from rlflow.backends.simulator.engine_settings import EngineSettings

Script = Sequence[tuple[float, Command]]
"""(time, command), in order."""


@dataclass(slots=True, eq=False)
class _Sample:
    request: Request
    made: list[int]
    """Version of every token generated."""
    computed: int = 0
    """Of its context, with keys and values of its own or shared."""
    began: int = -1
    """When it began to decode, as a number that grows; -1 while it does not."""

    @property
    def context(self) -> int:
        return self.request.prompt + len(self.made)

    @property
    def segments(self) -> Segments:
        found: list[tuple[int, int]] = []
        for version in self.made:
            if found and found[-1][0] == version:
                found[-1] = (version, found[-1][1] + 1)
            else:
                found.append((version, 1))
        return tuple(found)


class _Rank:
    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.waiting: list[_Sample] = []
        self.running: list[_Sample] = []
        self.known: dict[tuple[Hashable, int], int] = {}
        """Computed tokens of every prompt that a running request shares."""
        self.refused = False
        self.began = 0
        self.work: list[tuple[_Sample, int, int]] = []
        """(request, from, to): what the step computes of contexts."""

    def shared(self, sample: _Sample) -> int:
        request = sample.request
        if request.group is None or not self.settings.shared_prefix:
            return 0
        return self.settings.shared(request.prompt)

    def key(self, sample: _Sample) -> tuple[Hashable, int]:
        return sample.request.group, sample.request.prompt

    def blocks(self, running: list[_Sample]) -> int:
        """With room for the next token of each."""
        prompts = {self.key(sample): self.shared(sample) for sample in running if self.shared(sample)}
        own = sum(self.settings.blocks(s.context + 1) - self.settings.blocks(self.shared(s)) for s in running)
        return own + sum(self.settings.blocks(tokens) for tokens in prompts.values())

    def expected(self, running: list[_Sample]) -> int:
        """Blocks that responses of the expected length need beyond what is there."""
        blocks, tokens = self.settings.blocks, self.settings.expected
        return sum(max(0, blocks(s.request.prompt + tokens) - blocks(s.context + 1)) for s in running)

    def fits(self, running: list[_Sample], spare: int = 0) -> bool:
        return self.settings.kv_blocks is None or self.blocks(running) + spare <= self.settings.kv_blocks

    def leave(self, sample: _Sample) -> None:
        self.running.remove(sample)
        sample.began = -1
        sample.computed = 0
        if all(self.key(other) != self.key(sample) for other in self.running):
            self.known.pop(self.key(sample), None)

    def begin(self, sample: _Sample) -> bool:
        """Decodes from now on if nothing of its context is left to compute."""
        if self.settings.prefill is None or sample.computed == sample.context:
            sample.began = self.began
            self.began += 1
            return True
        return False

    def plan(self) -> None:
        """Admission, and what the next step computes of contexts."""
        settings, self.work = self.settings, []
        decoding = sum(sample.began >= 0 for sample in self.running)
        left = inf if settings.step_tokens is None else settings.step_tokens - decoding * settings.mixed
        known = dict(self.known)
        self.refused = self.refused and bool(self.running)
        for sample in self.running:
            if sample.began < 0:
                left -= self._compute(sample, left, known)
        while self.waiting and left > 0 and len(self.running) < settings.slots:
            sample = self.waiting[0]
            spare = 0
            if self.running:
                spare = settings.spare_blocks + self.expected([*self.running, sample])
            if self.refused or not self.fits([*self.running, sample], spare):
                break
            self.running.append(self.waiting.pop(0))
            if self.begin(sample):
                left -= settings.mixed
            else:
                left -= self._compute(sample, left, known)

    def _compute(self, sample: _Sample, left: float, known: dict[tuple[Hashable, int], int]) -> int:
        shared = self.shared(sample)
        start = max(sample.computed, min(known.get(self.key(sample), 0), shared))
        end = int(min(sample.context, start + left))
        if end > start:
            self.work.append((sample, start, end))
        known[self.key(sample)] = max(known.get(self.key(sample), 0), min(end, shared))
        return end - start

    def decoders(self) -> list[_Sample]:
        """That the next step advances."""
        if self.work and not self.settings.mixed:
            return []
        return [sample for sample in self.running if sample.began >= 0]

    def seconds(self) -> float:
        decoders, prefill = self.decoders(), self.settings.prefill
        fixed, request, token = self.settings.step.affine(len(decoders))
        total = fixed + request * len(decoders) + token * sum(sample.context for sample in decoders)
        for sample, start, end in self.work:
            assert prefill is not None
            total += prefill.token * (end - start) + prefill.square * (end * end - start * start)
            total += prefill.context * (end == sample.context)
        return total

    def step(self, version: int) -> list[_Sample]:
        """Those that finish, in the order in which they began to decode."""
        self.refused = False
        for sample in self.decoders():
            sample.made.append(version)
        finished = [s for s in self.running if s.began >= 0 and len(s.made) == s.request.length]
        finished.sort(key=lambda s: s.began)
        for sample, _, end in self.work:
            sample.computed = end
            key = self.key(sample)
            self.known[key] = max(self.known.get(key, 0), min(end, self.shared(sample)))
            self.begin(sample)
        for sample in finished:
            self.leave(sample)
        return finished

    def preempt(self) -> list[_Sample]:
        thrown = []
        while not self.fits(self.running):
            sample = self.running[-1]
            self.leave(sample)
            self.waiting.insert(0, sample)
            thrown.append(sample)
        self.refused = self.refused or bool(thrown)
        return thrown

    def forget(self) -> None:
        """The cache is void."""
        if self.settings.prefill is None:
            return
        self.known = {}
        for sample in self.running:
            sample.began, sample.computed = -1, 0
            self.begin(sample)


def token_loop(settings: EngineSettings, script: Script, *, version: int = 0, start: float = 0.0) -> list[EngineEvent]:
    """What `Engine` would tell, given every command of the script at its time, until nothing happens any more."""
    ranks = [_Rank(settings) for _ in range(settings.ranks)]
    now, paused, pace = start, False, 1.0
    events: list[EngineEvent] = []
    orders = list(script)

    def tell(kind: str, sample: _Sample) -> None:
        events.append(EngineEvent(now, kind, sample.request.id, sample.segments))  # type: ignore[arg-type]

    while True:
        while orders and orders[0][0] <= now:
            match orders.pop(0)[1]:
                case Submit(requests, index):
                    for request in requests:
                        made = [v for v, tokens in request.segments for _ in range(tokens)]
                        loads = [len(rank.running) + len(rank.waiting) for rank in ranks]
                        rank = ranks[loads.index(min(loads)) if index is None else index]
                        rank.waiting.append(_Sample(request, made))
                case Abort() | Interrupt() as command:
                    for rank in ranks:
                        there = {s.request.id: s for s in [*rank.running, *rank.waiting]}
                        for id in there if command.ids is None else dict.fromkeys(command.ids):
                            if id not in there:
                                continue
                            if there[id] in rank.running:
                                rank.leave(there[id])
                            else:
                                rank.waiting.remove(there[id])
                            tell("aborted" if isinstance(command, Abort) else "interrupted", there[id])
                case Publish(new, seconds, keep_kv):
                    now += seconds
                    version = new
                    for rank in ranks:
                        if not keep_kv:
                            rank.forget()
                    events.append(EngineEvent(now, "published"))
                case Pause():
                    paused = True
                    events.append(EngineEvent(now, "paused"))
                case Resume():
                    paused = False
                case SetSpeed(speed):
                    pace = 1 / speed
        if not paused:
            for rank in ranks:
                rank.plan()
        if paused or not any(rank.running for rank in ranks):
            if not orders:
                return events
            now = max(now, orders[0][0])
            continue
        now += max(rank.seconds() for rank in ranks) * pace
        for rank in ranks:
            for sample in rank.step(version):
                tell("finished", sample)
            for sample in rank.preempt():
                tell("preempted", sample)

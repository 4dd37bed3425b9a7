"""The scheduler of one rank: who runs, what it holds, and what its next steps look like.

As in vLLM, requests are served in the order of their arrival, a full cache throws out the one admitted last, and that
one goes to the front of the queue and is later prefilled with what it had generated. What all decoding requests have in
common, one token a step, is kept once, as `offset`; so a step, or a thousand, costs the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush

from rlflow.backends.simulator.engine_blocks import steps_to_exceed, taken
from rlflow.backends.simulator.engine_job import Job, extended
from rlflow.backends.simulator.engine_messages import EngineEvent, Request, Segments
from rlflow.backends.simulator.engine_owed import Owed
from rlflow.backends.simulator.engine_settings import EngineSettings, PrefillCost

FOREVER = 1 << 62
"""Steps, tokens, blocks: no limit."""


class Rank:
    """`form` says what the next steps are: up to `limit` of them, number j (from 0) taking base + slope j seconds."""

    def __init__(self, settings: EngineSettings, version: int) -> None:
        self._settings = settings
        self._slots = settings.slots
        self._block = settings.block
        self._spare = settings.spare_blocks
        self._owed = (
            Owed(settings.expected, settings.block) if settings.expected and settings.kv_blocks is not None else None
        )
        self._bounded = settings.kv_blocks is not None
        self._capacity = FOREVER if settings.kv_blocks is None else settings.kv_blocks
        self._budget = FOREVER if settings.step_tokens is None else settings.step_tokens
        self._mixed = settings.mixed
        self._prefill = settings.prefill
        self._costs: dict[int, tuple[float, float]] = {}
        """(a + c_b b, c_K) by b."""
        self.waiting: OrderedDict[Hashable, Job] = OrderedDict()
        self.running: dict[Hashable, Job] = {}
        """In the order of admission; those of `_pending` too."""
        self._pending: deque[Job] = deque()
        """Running requests whose context is not computed yet, in the order of admission."""
        self._completions: list[tuple[int, int, Job]] = []
        """(offset at the end, ticket, request). An entry is void once the request has another ticket."""
        self._tickets = 0
        self._prefixes: dict[tuple[Hashable, int], int] = {}
        """Running requests by the prefix that they share."""
        self._eras: list[tuple[int, int]] = [(0, version)]
        """(offset, version) from which each version was used."""
        self._offset = 0
        self.decoding = 0
        """Requests whose context is computed."""
        self._held = 0
        """Tokens of the decoding requests."""
        self._used = 0
        """Blocks, with room for the next token of every running request."""
        self._phases = [0] * self._block
        """Decoding requests by the offset, modulo the block, at which they take another block."""
        self._refused = False
        """Requests were thrown out, so the next step admits none."""
        self._served: list[tuple[Job, int]] = []
        """Tokens of contexts that a step computes."""
        self.limit = FOREVER
        self.base = self.slope = 0.0
        self.generated = self.prefilled = self.preempted = 0
        """Tokens, tokens of contexts, requests thrown out; since the beginning."""

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        settings = self._settings
        for request in requests:
            sharing = settings.shared_prefix and request.group is not None
            self.waiting[request.id] = Job(request, settings.shared(request.prompt) if sharing else 0)

    def stop(self, ids: Iterable[Hashable] | None) -> list[tuple[Hashable, Segments]]:
        """Takes requests out (None: all) and returns what each has generated; for all, running ones first."""
        gone = [*self.running, *self.waiting] if ids is None else [id for id in dict.fromkeys(ids) if self.holds(id)]
        stopped = []
        for id in gone:
            job = self.running.get(id)
            if job is not None:
                self._leave(job)
            else:
                job = self.waiting.pop(id)
            stopped.append((id, job.segments))
        return stopped

    def holds(self, id: Hashable) -> bool:
        return id in self.running or id in self.waiting

    def publish(self, version: int, keep_kv: bool) -> None:
        if not keep_kv and self._prefill is not None:
            seen = set()
            self._pending.clear()
            for job in self.running.values():
                if job.ticket >= 0:
                    self._halt(job)
                job.computed = job.shared if job.prefix in seen else 0
                seen.add(job.prefix)
                self._ready(job, job.prompt + job.generated)
        self._eras.append((self._offset, version))

    @property
    def decodes_only(self) -> bool:
        """Whether steps short of `limit` change nothing but what decoding requests have generated."""
        return not self._pending

    # --- steps -------------------------------------------------------------------------------------------------------

    def form(self) -> None:
        """Admits what fits, and finds `limit`, `base` and `slope`. Nothing else changes, so it can be repeated."""
        pending, running, served = self._pending, self.running, self._served
        if not running:
            self._refused = False
        left = self._budget - self.decoding if self._mixed else self._budget
        if served:
            served.clear()
        for job in pending:
            if left <= 0:
                break
            left -= self._serve(job, job.prompt + job.generated, left)
        if self.waiting and not self._refused and left > 0 and len(running) < self._slots:
            self._admit(left)
        decoding = 0 if pending and not self._mixed else self.decoding
        cost = self._costs.get(decoding)
        if cost is None:
            fixed, request, token = self._settings.step.affine(decoding)
            cost = self._costs[decoding] = (fixed + request * decoding, token)
        self.base, token = cost
        if decoding:
            self.base += token * self._held
            self.slope = token * decoding
            # All that finish a context in this step decode in the next, so it is formed by itself.
            self.limit = self._decode_limit() if not pending or len(served) == 1 else 1
        else:
            self.slope, self.limit = 0.0, FOREVER
        if pending and self._prefill is not None:
            self._form_prefill(self._prefill)
        if self._refused and self.waiting:
            self.limit = 1

    def advance(self, steps: int, now: float, events: list[EngineEvent]) -> None:
        """After so many of the steps formed: requests that finished, in the order in which they began to decode, and
        those thrown out."""
        self._refused = False
        decoding = self.decoding
        if decoding and (self._mixed or not self._pending):
            offset = self._offset
            if self._bounded:
                self._used += taken(self._phases, decoding, offset, steps)
            self._held += decoding * steps
            self.generated += decoding * steps
            self._offset = offset = offset + steps
            if self._owed is not None:
                self._owed.advance(steps, offset)
            heap = self._completions
            while heap and heap[0][0] <= offset:
                _, ticket, job = heappop(heap)
                if job.ticket == ticket:
                    self._leave(job)
                    events.append(EngineEvent(now, "finished", job.id, job.segments))
        for job, tokens in self._served:
            job.computed += tokens * steps
            self.prefilled += tokens * steps
            context = job.prompt + job.generated
            if job.computed == context:
                self._pending.popleft()
                self._decode(job, context)
        while self._used > self._capacity:
            self._throw_out(now, events)

    # --- forming -----------------------------------------------------------------------------------------------------

    def _admit(self, left: int) -> None:
        """From the queue, while slots, cache and the `left` tokens of the step last."""
        waiting, running, prefixes, block = self.waiting, self.running, self._prefixes, self._block
        while waiting and left > 0 and len(running) < self._slots:
            job = next(iter(waiting.values()))
            context, prefix = job.prompt + job.generated, job.prefix
            need = context // block + 1
            known = prefix is not None and prefix in prefixes
            if known:
                need -= job.shared // block
            if self._bounded and need > self._capacity - self._used - self._kept_free(job):
                break
            self._used += need
            del waiting[job.id]
            running[job.id] = job
            if self._owed is not None:
                self._owed.enter(job)
            if prefix is not None:
                prefixes[prefix] = prefixes.get(prefix, 0) + 1
            job.computed = job.shared if known else 0
            if not self._ready(job, context):
                left -= self._serve(job, context, left)
            elif self._mixed:
                left -= 1

    def _kept_free(self, job: Job) -> int:
        """Blocks that admission of a request leaves to those that run: none if none does."""
        if not self.running:
            return 0
        if self._owed is None:
            return self._spare
        return self._spare + self._owed.blocks + self._owed.of(job, job.generated)

    def _serve(self, job: Job, context: int, left: int) -> int:
        tokens = context - job.computed
        if tokens > left:
            tokens = left
        self._served.append((job, tokens))
        return tokens

    def _form_prefill(self, cost: PrefillCost) -> None:
        served = self._served
        limit = 1
        for job, tokens in served:
            self.base += cost.token * tokens + cost.square * tokens * (2 * job.computed + tokens)
            rest = job.prompt + job.generated - job.computed
            if rest == tokens:
                self.base += cost.context
            elif len(served) == 1:
                # It takes all that steps have left, until the step that completes it, which others may share.
                limit = (rest - 1) // tokens
                self.slope += 2 * cost.square * tokens * tokens
        if limit < self.limit:
            self.limit = limit

    def _decode_limit(self) -> int:
        """Steps until a request finishes or the cache is full."""
        heap = self._completions
        while heap[0][2].ticket != heap[0][1]:
            heappop(heap)
        steps = heap[0][0] - self._offset
        if not self._bounded:
            return steps
        free, decoding = self._capacity - self._used, self.decoding
        if decoding * (steps // self._block + 1) <= free:
            return steps
        return min(steps, steps_to_exceed(self._phases, decoding, self._offset, free))

    # --- requests come and go ----------------------------------------------------------------------------------------

    def _ready(self, job: Job, context: int) -> bool:
        """A running request decodes if nothing of its context is left to compute, and is prefilled otherwise."""
        if self._prefill is None or not context:
            self._decode(job, context)
            return True
        self._pending.append(job)
        return False

    def _decode(self, job: Job, context: int) -> None:
        offset = self._offset
        job.joined = offset
        job.era = len(self._eras) - 1
        job.phase = phase = (offset - context) % self._block
        job.ticket = self._tickets
        self._tickets += 1
        heappush(self._completions, (offset + job.length - job.generated, job.ticket, job))
        self.decoding += 1
        self._held += context
        self._phases[phase] += 1
        if self._owed is not None:
            self._owed.begin(job, offset)

    def _halt(self, job: Job) -> None:
        """It stops decoding: what it has generated is counted."""
        eras, last = self._eras, len(self._eras) - 1
        begin, offset = job.joined, self._offset
        for era in range(job.era, last):
            end = eras[era + 1][0]
            job.segments = extended(job.segments, eras[era][1], end - begin)
            begin = end
        if job.segments:
            job.segments = extended(job.segments, eras[last][1], offset - begin)
        elif offset > begin:
            job.segments = ((eras[last][1], offset - begin),)
        if self._owed is not None:
            self._owed.halt(job, offset)
        job.generated += offset - job.joined
        job.ticket = -1
        self.decoding -= 1
        self._held -= job.prompt + job.generated
        self._phases[job.phase] -= 1

    def _leave(self, job: Job) -> None:
        """It runs no more."""
        prefilling = job.ticket < 0
        if not prefilling:
            self._halt(job)
        del self.running[job.id]
        if self._owed is not None:
            self._owed.leave(job)
        self._used -= (job.prompt + job.generated) // self._block + 1
        if job.prefix is not None:
            others = self._prefixes[job.prefix] - 1
            if others:
                self._prefixes[job.prefix] = others
                self._used += job.shared // self._block
            else:
                del self._prefixes[job.prefix]
        if prefilling:
            self._pending.remove(job)
            if job.computed < job.shared:
                # The next of its group computes the rest of what they share.
                for other in self._pending:
                    if other.prefix == job.prefix:
                        other.computed = job.computed
                        break

    def _throw_out(self, now: float, events: list[EngineEvent]) -> None:
        """The last admitted goes back to the front of the queue."""
        job = self.running[next(reversed(self.running))]
        self._leave(job)
        self.waiting[job.id] = job
        self.waiting.move_to_end(job.id, last=False)
        self._refused = True
        self.preempted += 1
        events.append(EngineEvent(now, "preempted", job.id, job.segments))

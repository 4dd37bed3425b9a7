"""A generation engine that jumps from event to event: exact, and independent of how many tokens lie between.

While b requests decode and hold K tokens, s steps take s (a + c_b b + c_K K) + c_K b s (s - 1)/2 seconds; every request
then holds s tokens more. The next event is the earliest of: a request that finishes, a full cache, the end of a chunk
of prefill, a command. A request costs O(log n). Many engines fit one simulation: their `next_time` go in one heap.

Rules of the steps, which `engine_token_loop` follows token by token. At the end of a step, in this order: finished
requests leave; where the cache lacks room for the next token of all, the last admitted leave (preempted); commands that
came during the step are followed; the queue is admitted in order, unless requests were just preempted, until one does
not fit. A step decodes one token of every request whose context is computed and spends the rest of its tokens on
contexts, in order. Prefill yields no token itself. The cache is counted in blocks, an admitted request with its context
and its next token; what it reads of the cache counts every request's prompt, shared or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import inf

from rlflow.backends.simulator.engine_envelope import Piece, envelope, steps_within
from rlflow.backends.simulator.engine_messages import (
    Abort,
    Command,
    EngineError,
    EngineEvent,
    Interrupt,
    Pause,
    Publish,
    Request,
    Resume,
    SetSpeed,
    Submit,
)
from rlflow.backends.simulator.engine_rank import FOREVER, Rank
from rlflow.backends.simulator.engine_settings import EngineSettings


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """What an engine has done up to its last event."""

    steps: int
    busy: float
    """Seconds in steps."""
    paused: float
    """Seconds in publications."""
    generated: int
    """Tokens, those of aborted requests too."""
    prefilled: int
    """Tokens of contexts computed, those of preempted requests again."""
    preemptions: int


class Engine:
    """One replica, or several in lock step. Commands are given in the order of their times, none beyond `next_time`.

    A command at the very end of a step is followed there, whether or not `next_time` was asked before.
    """

    def __init__(self, settings: EngineSettings, *, version: int = 0, start: float = 0.0) -> None:
        self.version = version
        self._settings = settings
        self._ranks = [Rank(settings, version) for _ in range(settings.ranks)]
        self._lags = [0] * settings.ranks
        """Steps that a rank has taken and not been told of: nothing but decoding happened in them."""
        self._stale = set(range(settings.ranks))
        """Ranks whose next steps are to be formed."""
        self._pace = 1.0
        self._told = start
        """No command may be earlier."""
        self._now = start
        """The last event."""
        self._until = inf
        """The next one."""
        self._steps = 0
        """From one to the other."""
        self._pieces: list[Piece] = []
        """Their seconds, of ranks in lock step."""
        self._inbox: deque[Command] = deque()
        self._announced: set[Hashable] = set()
        """Requests in the inbox."""
        self._paused = False
        self._publication: Publish | None = None
        """Under way."""
        self._step_count, self._busy, self._pauses = 0, 0.0, 0.0

    # --- what it is asked --------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Requests running or waiting."""
        return sum(len(rank.running) + len(rank.waiting) for rank in self._ranks)

    @property
    def running(self) -> int:
        return sum(len(rank.running) for rank in self._ranks)

    @property
    def totals(self) -> EngineTotals:
        ranks = self._ranks
        return EngineTotals(
            self._step_count,
            self._busy,
            self._pauses,
            sum(rank.generated + rank.decoding * lag for rank, lag in zip(ranks, self._lags, strict=True)),
            sum(rank.prefilled for rank in ranks),
            sum(rank.preempted for rank in ranks),
        )

    def next_time(self) -> float:
        """When it changes next; infinity if only a command can change it."""
        return self._until

    # --- what it is told ---------------------------------------------------------------------------------------------

    def send(self, command: Command, at: float) -> None:
        """Followed at the end of the step under way at `at`, or at once where none is; after a publication if one is
        under way. EngineError for a time that is past or beyond `next_time`, a rank that is not there, a request that
        is there already or can never fit the cache."""
        if not self._told <= at <= self._until or at == inf:
            raise EngineError(f"a command at {at}, not from {self._told} to {self._until}")
        if isinstance(command, Submit):
            self._check(command)
        self._told = at
        self._inbox.append(command)
        if self._publication is not None:
            return
        if not self._steps:
            self._until = at
            return
        pieces = self._pieces
        if len(self._ranks) == 1:
            (only,) = self._ranks
            pieces = [Piece(0, 0.0, only.base * self._pace, only.slope * self._pace)]
        steps = steps_within(pieces, at - self._now)
        if steps < self._steps:
            self._steps = steps
            seconds = next(piece for piece in reversed(pieces) if piece.first <= steps).until(steps)
            # Where `at` is itself the end of a step, rounding must not put it before.
            self._until = max(at, self._now + seconds)

    def submit(self, requests: Iterable[Request], at: float, rank: int | None = None) -> None:
        self.send(Submit(tuple(requests), rank), at)

    def abort(self, ids: Iterable[Hashable], at: float) -> None:
        self.send(Abort(tuple(ids)), at)

    def interrupt(self, at: float, ids: Iterable[Hashable] | None = None) -> None:
        self.send(Interrupt(None if ids is None else tuple(ids)), at)

    def publish(self, version: int, at: float, seconds: float = 0.0, *, keep_kv: bool = True) -> None:
        self.send(Publish(version, seconds, keep_kv), at)

    def pause(self, at: float) -> None:
        self.send(Pause(), at)

    def resume(self, at: float) -> None:
        self.send(Resume(), at)

    def set_speed(self, speed: float, at: float) -> None:
        self.send(SetSpeed(speed), at)

    # --- time goes on ------------------------------------------------------------------------------------------------

    def advance_to(self, time: float) -> list[EngineEvent]:
        """What happens up to and at `time`, in order."""
        events: list[EngineEvent] = []
        while self._until <= time and self._until != inf:
            self._boundary(events)
        self._told = max(self._told, time if time != inf else self._now)
        return events

    def run(self, requests: Iterable[Request], at: float | None = None) -> list[EngineEvent]:
        """All of them from `at` (None: now), with whatever is in the engine already, until nothing happens any more."""
        self.submit(requests, self._told if at is None else at)
        return self.advance_to(inf)

    def _boundary(self, events: list[EngineEvent]) -> None:
        """The end of the steps formed, or of a publication; then the next ones are formed."""
        now = self._until
        if self._publication is not None:
            self._pauses += now - self._now
            self._finish_publication(self._publication, events, now)
        elif self._steps:
            steps = self._steps
            self._step_count += steps
            self._busy += now - self._now
            self._advance(steps, now, events)
        self._now = now
        if self._inbox and self._publication is None:
            self._catch_up(events)
        while self._inbox and self._publication is None:
            self._follow(self._inbox.popleft(), events)
        self._form()

    def _advance(self, steps: int, now: float, events: list[EngineEvent]) -> None:
        """Of many ranks most only decode on: they are told when something happens to them."""
        lags = self._lags
        for number, rank in enumerate(self._ranks):
            lag = lags[number] + steps
            if lag < rank.limit and rank.decodes_only:
                lags[number] = lag
                continue
            lags[number] = 0
            rank.advance(lag, now, events)
            self._stale.add(number)

    def _catch_up(self, events: list[EngineEvent]) -> None:
        for number, (rank, lag) in enumerate(zip(self._ranks, self._lags, strict=True)):
            if lag:
                rank.advance(lag, self._now, events)
                self._lags[number] = 0
            self._stale.add(number)

    def _form(self) -> None:
        self._steps, self._until = 0, inf
        if self._publication is not None:
            self._until = self._now + self._publication.seconds
            return
        if self._paused:
            return
        ranks, pace = self._ranks, self._pace
        for number in self._stale:
            ranks[number].form()
        self._stale.clear()
        if len(ranks) == 1:
            (rank,) = ranks
            steps = rank.limit
            if steps == FOREVER:
                return
            # As `Piece.until`, without making one for every event.
            seconds = steps * (rank.base * pace) + rank.slope * pace * (steps * (steps - 1) / 2)
        else:
            lagging = list(zip(ranks, self._lags, strict=True))
            # A rank without requests has no limit, whatever its lag is.
            steps = min(rank.limit - lag if rank.limit != FOREVER else FOREVER for rank, lag in lagging)
            if steps == FOREVER:
                return
            lines = [((rank.base + rank.slope * lag) * pace, rank.slope * pace) for rank, lag in lagging]
            self._pieces, seconds = envelope(lines, steps)
        self._steps = steps
        self._until = self._now + seconds

    def _follow(self, command: Command, events: list[EngineEvent]) -> None:
        match command:
            case Submit(requests, rank):
                self._announced.difference_update(request.id for request in requests)
                if rank is not None or len(self._ranks) == 1:
                    self._ranks[rank or 0].submit(requests)
                    return
                for request in requests:
                    fewest = min(self._ranks, key=lambda rank: len(rank.running) + len(rank.waiting))
                    fewest.submit((request,))
            case Abort(ids):
                self._stop(ids, events, aborted=True)
            case Interrupt(ids):
                self._stop(ids, events, aborted=False)
            case Publish():
                self._publication = command
            case Pause():
                self._paused = True
                events.append(EngineEvent(self._now, "paused"))
            case Resume():
                self._paused = False
            case SetSpeed(speed):
                self._pace = 1 / speed

    def _check(self, command: Submit) -> None:
        if not (command.rank is None or 0 <= command.rank < len(self._ranks)):
            raise EngineError(f"the engine has {len(self._ranks)} ranks, no rank {command.rank}")
        settings, ranks = self._settings, self._ranks
        room = inf if settings.kv_blocks is None else settings.kv_blocks * settings.block
        new = {request.id for request in command.requests}
        if len(new) < len(command.requests):
            raise EngineError("two requests have the same id")
        for request in command.requests:
            if request.prompt + request.length > room:
                raise EngineError(f"{request} does not fit a cache of {room} tokens")
        twice = {id for rank in ranks for known in (rank.running, rank.waiting) for id in known.keys() & new}
        for id in twice | self._announced & new:
            raise EngineError(f"request {id!r} is in the engine already")
        self._announced |= new

    def _stop(self, ids: Iterable[Hashable] | None, events: list[EngineEvent], *, aborted: bool) -> None:
        for rank in self._ranks:
            for id, segments in rank.stop(ids):
                events.append(EngineEvent(self._now, "aborted" if aborted else "interrupted", id, segments))

    def _finish_publication(self, publication: Publish, events: list[EngineEvent], now: float) -> None:
        self._publication = None
        self.version = publication.version
        for rank in self._ranks:
            rank.publish(publication.version, publication.keep_kv)
        events.append(EngineEvent(now, "published"))

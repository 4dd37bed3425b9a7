"""Executes a planned reshard on live tensors: local copies, then rounds of packed point-to-point messages.

The plan says which box of which tensor goes where (`rlflow.reshard`); here boxes become slices of this rank's tensors,
those for one peer are packed into one message per round, and every message says which version it is of and what its
bytes sum to. Beside both layouts a rank holds two areas for what it receives and two for what it sends, together at
most the plan's bucket. All rounds of a run use them in turn: the next one is on its way while one is unpacked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.reshard.boxes import Box, extents, slices, volume
from rlflow.reshard.buckets import plan_buckets, round_transfers
from rlflow.reshard.placements import Piece
from rlflow.reshard.plan import ReshardPlan, Transfer
from rlflow.reshard.shards import Sharding

_HEADER = 32
"""Bytes before the elements of a message: version, elements and checksum as int64, and 8 to stay aligned."""
_ALIGNED = 8
"""Messages start at multiples of this."""
_AREAS = 2
"""For either direction: while one is on its way, the other is packed or unpacked."""

Tensors = Mapping[str, torch.Tensor]
"""Local tensors of one rank, by the names of the reshard."""


@dataclass(frozen=True)
class _Piece:
    """Consecutive elements of a message: a part of a local tensor."""

    tensor: str
    local: tuple[slice, ...]
    shape: tuple[int, ...]
    elements: int


@dataclass
class _Step:
    """What one rank sends and receives at one step of a round, by peer (device)."""

    sends: dict[int, list[_Piece]] = field(default_factory=dict)
    receives: dict[int, list[_Piece]] = field(default_factory=dict)
    forwarded: bool = False
    """What is sent was received at the step before, so that it is read from the target's tensors."""


@dataclass
class Moved:
    """One execution on this rank: bytes of elements, and the most that all its buffers had, headers included.

    `waited_s`: seconds from the start to the first message that came, for a rank that had nothing to do before it.
    """

    sent: int = 0
    received: int = 0
    copied: int = 0
    peak_buffers: int = 0
    waited_s: float = 0.0


class _Area:
    """Memory for messages of one direction, carved from the front, and the messages in it that are on their way."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.nbytes = size
        self.moving: list[tuple[int, torch.Tensor, dist.Work]] = []
        """(peer, message, its transfer)."""
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def has(self, size: int) -> bool:
        return self._used + size <= self.nbytes

    def take(self, size: int) -> torch.Tensor:
        found = self._memory[self._used : self._used + size]
        self._used += _aligned(size)
        return found

    def arrived(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(peer, message), each when it has moved; afterwards the area is free."""
        for peer, message, work in self.moving:
            work.wait()
            yield peer, message
        self.moving, self._used = [], 0

    def settle(self) -> None:
        for _ in self.arrived():
            pass


class ReshardLinks:
    """This rank's part of a reshard. Ranks of source and target call `run` in the same order, on either side once per
    version.

    `device`: this rank's number among the plan's devices. `rank_of`: device to rank of `group`. `dtype`: of what is
    sent, the narrower one of both sides. ReshardError for a bucket that does not hold a row and messages' headers.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        bucket_bytes: int,
        device: int,
        rank_of: Mapping[int, int],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        torch_device: torch.device,
    ) -> None:
        self._plan, self._device, self._rank_of, self._group = plan, device, rank_of, group
        self._dtype, self._torch_device = dtype, torch_device
        self._element_bytes = int(dtype.itemsize)
        self._before = Sharding(plan.catalogue, plan.source.layout, plan.source.storage)
        self._after = Sharding(plan.catalogue, plan.target.layout, plan.target.storage)
        self._source_rank = _place(plan.source.devices, device)
        self._target_rank = _place(plan.target.devices, device)
        self._copies = [pair for transfer in plan.copies({device}) for pair in self._paired(transfer)]
        self._steps: list[_Step] = []
        if plan.received_bytes:
            # Both ends of all pairs must cut the same rounds, so that nothing of this rank alone may count here.
            peers = len({*plan.source.devices, *plan.target.devices}) - 1
            headers = 2 * peers * (_HEADER + _ALIGNED)
            buckets = plan_buckets(plan, bucket_bytes // _AREAS - headers)
            for units in buckets.rounds:
                self._steps += self._steps_of(round_transfers(plan, units, {device}))
        messages = [self._size(pieces) for step in self._steps for pieces in step.sends.values()]
        largest = max((self._together(step.sends) for step in self._steps), default=0)
        self._send_bytes = max(min(largest, bucket_bytes // (2 * _AREAS)), *map(_aligned, messages), 0)
        self._receive_bytes = max((self._together(step.receives) for step in self._steps), default=0)

    @property
    def sends(self) -> bool:
        """Whether this rank has weights to give."""
        return self._source_rank is not None

    @property
    def receives(self) -> bool:
        return self._target_rank is not None

    def run(self, source: Tensors | None, target: Tensors | None, version: int) -> Moved:
        """One reshard. `source` on ranks of the source, `target` on those of the target; returns bytes moved.

        RunFailure RLF5018 for a message of another version or of other bytes than were sent.
        """
        moved, began = Moved(), time.monotonic()
        areas = min(_AREAS, len(self._steps))
        inward = [_Area(self._receive_bytes, self._torch_device) for _ in range(areas)]
        outward = [_Area(self._send_bytes, self._torch_device) for _ in range(areas)]
        moved.peak_buffers = sum(area.nbytes for area in (*inward, *outward))
        with torch.no_grad():
            for step in self._steps[:1]:
                self._post(step, inward[0])
            if source is not None and target is not None:
                self._copy(source, target, moved)
            for number, step in enumerate(self._steps):
                if number + 1 < len(self._steps):
                    self._post(self._steps[number + 1], inward[(number + 1) % areas])
                self._send(step, target if step.forwarded else source, version, moved, outward[number % areas])
                for peer, message in inward[number % areas].arrived():
                    assert target is not None, "a rank that receives has the tensors"
                    if source is None and not moved.received:
                        moved.waited_s = time.monotonic() - began
                    self._unpack(step.receives[peer], message, target, version, peer)
                    moved.received += message.nbytes - _HEADER
            for area in outward:
                area.settle()
        return moved

    def _copy(self, source: Tensors, target: Tensors, moved: Moved) -> None:
        for here, there in self._copies:
            part = target[there.tensor][there.local]
            part.copy_(source[here.tensor][here.local].reshape(part.shape))
            moved.copied += there.elements * self._element_bytes

    # --- one step of one round ---------------------------------------------------------------------------------------

    def _post(self, step: _Step, area: _Area) -> None:
        for peer, pieces in step.receives.items():
            message = area.take(self._size(pieces))
            area.moving.append((peer, message, self._irecv(message, peer)))

    def _send(self, step: _Step, tensors: Tensors | None, version: int, moved: Moved, area: _Area) -> None:
        area.settle()
        for peer, pieces in step.sends.items():
            assert tensors is not None, "a rank that sends has the tensors"
            if not area.has(self._size(pieces)):
                # Receivers post all of a step before they send any of it, so that what is on its way arrives.
                area.settle()
            message = area.take(self._size(pieces))
            self._pack(pieces, message, tensors, version)
            area.moving.append((peer, message, self._isend(message, peer)))
            moved.sent += message.nbytes - _HEADER

    def _size(self, pieces: list[_Piece]) -> int:
        """Bytes of a message."""
        return _HEADER + sum(piece.elements for piece in pieces) * self._element_bytes

    def _together(self, messages: Mapping[int, list[_Piece]]) -> int:
        """Bytes of the messages of a step in an area."""
        return sum(_aligned(self._size(pieces)) for pieces in messages.values())

    def _pack(self, pieces: list[_Piece], message: torch.Tensor, tensors: Tensors, version: int) -> None:
        body = message[_HEADER:].view(self._dtype)
        first = 0
        for piece in pieces:
            part = body[first : first + piece.elements]
            part.view(piece.shape).copy_(tensors[piece.tensor][piece.local].reshape(piece.shape))
            first += piece.elements
        message[:_HEADER].view(torch.int64).copy_(torch.tensor([version, first, _checksum(body), 0]))

    def _unpack(self, pieces: list[_Piece], message: torch.Tensor, tensors: Tensors, version: int, peer: int) -> None:
        body = message[_HEADER:].view(self._dtype)
        was, elements, checksum = message[:_HEADER].view(torch.int64)[:3].tolist()
        if was != version:
            raise RunFailure(
                "RLF5018",
                f"weights of version {was} came from rank {self._rank_of[peer]} in place of version {version}",
            )
        if elements != body.numel() or checksum != _checksum(body):
            raise RunFailure(
                "RLF5018",
                f"weights of version {version} from rank {self._rank_of[peer]} are not those that were sent",
                notes=(f"{elements} elements with checksum {checksum} were sent",),
            )
        first = 0
        for piece in pieces:
            target = tensors[piece.tensor][piece.local]
            target.copy_(body[first : first + piece.elements].view(target.shape))
            first += piece.elements

    def _isend(self, buffer: torch.Tensor, peer: int) -> dist.Work:
        work = dist.isend(buffer, group=self._group, group_dst=self._rank_of[peer])
        assert work is not None
        return work

    def _irecv(self, buffer: torch.Tensor, peer: int) -> dist.Work:
        work = dist.irecv(buffer, group=self._group, group_src=self._rank_of[peer])
        assert work is not None
        return work

    # --- from boxes to slices ----------------------------------------------------------------------------------------

    def _steps_of(self, transfers: Iterable[Transfer]) -> list[_Step]:
        """By step; within a message pieces are in the order of the plan on both sides."""
        found: dict[int, _Step] = {}
        for transfer in transfers:
            step = found.setdefault(transfer.step, _Step(forwarded=transfer.step > 0))
            for here, there in self._paired(transfer):
                if transfer.source == self._device:
                    step.sends.setdefault(transfer.target, []).append(here)
                if transfer.target == self._device:
                    step.receives.setdefault(transfer.source, []).append(there)
        return [found[number] for number in sorted(found)]

    def _paired(self, transfer: Transfer) -> Iterator[tuple[_Piece, _Piece]]:
        """A transfer in boxes that lie in one piece at either end: where each is, and where it goes.

        Both ends cut a box at the pieces of both, so that they agree on the order of its elements.
        """
        tensor = transfer.tensor
        sender = self._after if transfer.step else self._before
        source = self._plan.target if transfer.step else self._plan.source
        sender_rank = source.devices.index(transfer.source)
        receiver_rank = self._plan.target.devices.index(transfer.target)
        here, there = sender.local(tensor)[0].name, self._after.local(tensor)[0].name
        for piece in sender.pieces(sender_rank, tensor):
            for box, _ in piece.locate(transfer.box):
                for other in self._after.pieces(receiver_rank, tensor):
                    for common, target in other.locate(box):
                        for final, local in piece.locate(common):
                            if final != common:  # a flat shard cut further: so is the other end
                                target = shifted_into(other, final)
                            yield _piece(here, local, final), _piece(there, target, final)


def shifted_into(piece: Piece, box: Box) -> Box:
    """Where a box that one piece holds in one run lies in it."""
    found = list(piece.locate(box))
    if len(found) != 1:
        raise ValueError(f"{list(box)} lies in {len(found)} runs of a flat shard at both ends")
    return found[0][1]


def _piece(name: str, local: Box, canonical: Box) -> _Piece:
    return _Piece(name, slices(local), extents(canonical), volume(canonical))


def _place(devices: tuple[int, ...], device: int) -> int | None:
    return devices.index(device) if device in devices else None


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED


def _checksum(body: torch.Tensor) -> int:
    """Sum of the bytes as int64 words, which a changed or missing word changes; cheap beside sending them.

    Words of the type that is summed: torch would otherwise convert all of them first, in memory that no cap knows of.
    """
    raw = body.view(torch.uint8)
    size = raw.nbytes - raw.nbytes % 8
    return int(raw[:size].view(torch.int64).sum() + raw[size:].sum(dtype=torch.int64))

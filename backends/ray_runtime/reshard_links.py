"""Executes a planned reshard on live tensors: local copies, then rounds of packed point-to-point messages.

The plan says which box of which tensor goes where (`rlflow.reshard`); here boxes become slices of this rank's tensors,
those for one peer are packed into one message per round, and every message says which version it is of and what its
bytes sum to. Beside both layouts a rank holds one round's receive buffers and as much again for sending, together at
most the plan's bucket.
"""

from __future__ import annotations

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
    """Bytes of one execution on this rank."""

    sent: int = 0
    received: int = 0
    copied: int = 0
    peak_buffers: int = 0


class ReshardLinks:
    """This rank's part of a reshard. Ranks of source and target call `run` in the same order, on either side once per
    version.

    `device`: this rank's number among the plan's devices. `rank_of`: device to rank of `group`.
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
        self._before = Sharding(plan.catalogue, plan.source.layout, plan.source.storage)
        self._after = Sharding(plan.catalogue, plan.target.layout, plan.target.storage)
        self._source_rank = _place(plan.source.devices, device)
        self._target_rank = _place(plan.target.devices, device)
        self._copies = [pair for transfer in plan.copies({device}) for pair in self._paired(transfer)]
        self._rounds: list[list[_Step]] = []
        self._half = max(bucket_bytes // 2, 1)
        if plan.received_bytes:
            buckets = plan_buckets(plan, bucket_bytes)
            self._rounds = [self._steps(round_transfers(plan, units, {device})) for units in buckets.rounds]

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
        moved = Moved()
        with torch.no_grad():
            if source is not None and target is not None:
                for here, there in self._copies:
                    part = target[there.tensor][there.local]
                    part.copy_(source[here.tensor][here.local].reshape(part.shape))
                    moved.copied += there.elements * self._dtype.itemsize
            for steps in self._rounds:
                for step in steps:
                    self._exchange(step, source, target, version, moved)
        return moved

    # --- one step of one round ---------------------------------------------------------------------------------------

    def _exchange(
        self, step: _Step, source: Tensors | None, target: Tensors | None, version: int, moved: Moved
    ) -> None:
        waiting: list[tuple[int, torch.Tensor, dist.Work]] = []
        held = 0
        for peer, pieces in step.receives.items():
            buffer = self._buffer(pieces)
            held += buffer.nbytes
            waiting.append((peer, buffer, self._irecv(buffer, peer)))
        sending: list[dist.Work] = []
        sent = 0
        for peer, pieces in step.sends.items():
            tensors = target if step.forwarded else source
            assert tensors is not None, "a rank that sends has the tensors"
            buffer = self._packed(pieces, tensors, version)
            if sending and sent + buffer.nbytes > self._half:
                # Receivers have posted everything of this step, so what is on its way arrives.
                for work in sending:
                    work.wait()
                sending, sent = [], 0
            sent += buffer.nbytes
            moved.peak_buffers = max(moved.peak_buffers, held + sent)
            moved.sent += buffer.nbytes - _HEADER
            sending.append(self._isend(buffer, peer))
        moved.peak_buffers = max(moved.peak_buffers, held + sent)
        for peer, buffer, work in waiting:
            work.wait()
            assert target is not None, "a rank that receives has the tensors"
            self._unpack(step.receives[peer], buffer, target, version, peer)
            moved.received += buffer.nbytes - _HEADER
        for work in sending:
            work.wait()

    def _buffer(self, pieces: list[_Piece]) -> torch.Tensor:
        elements = sum(piece.elements for piece in pieces)
        size = _HEADER + elements * self._dtype.itemsize
        return torch.empty(size + -size % 8, dtype=torch.uint8, device=self._torch_device)[:size]

    def _packed(self, pieces: list[_Piece], tensors: Tensors, version: int) -> torch.Tensor:
        buffer = self._buffer(pieces)
        body = buffer[_HEADER:].view(self._dtype)
        first = 0
        for piece in pieces:
            part = body[first : first + piece.elements]
            part.view(piece.shape).copy_(tensors[piece.tensor][piece.local].reshape(piece.shape))
            first += piece.elements
        header = buffer[:_HEADER].view(torch.int64)
        header[0], header[1], header[2] = version, first, _checksum(body)
        return buffer

    def _unpack(self, pieces: list[_Piece], buffer: torch.Tensor, tensors: Tensors, version: int, peer: int) -> None:
        body = buffer[_HEADER:].view(self._dtype)
        was, elements, checksum = buffer[:_HEADER].view(torch.int64)[:3].tolist()
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

    def _steps(self, transfers: Iterable[Transfer]) -> list[_Step]:
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


def _checksum(body: torch.Tensor) -> int:
    """Sum of the bytes as int32 words, which a changed or missing word changes; cheap beside sending them."""
    size = body.nbytes - body.nbytes % 4
    raw = body.view(torch.uint8)
    return int(raw[:size].view(torch.int32).sum(dtype=torch.int64)) + int(raw[size:].sum(dtype=torch.int64))

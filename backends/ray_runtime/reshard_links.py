"""Executes a planned reshard on live tensors: local copies, and rounds of point-to-point messages.

The plan says which box of which tensor goes where (`rlflow.reshard`); reshard_pieces.py makes messages of that. A piece
that is a message of its own and lies in one run of memory, in the type that is sent, goes from or to where it lies.
Everything else passes through two areas for what a rank receives and two for what it sends, beside both layouts
together at most the plan's bucket. All rounds of a run use them in turn: the next one is on its way while one is
unpacked, and what a rank keeps is copied meanwhile. The packed message to a peer comes last at every step and says
which version all of its messages are of and what their bytes sum to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.reshard_pieces import ALIGNED, ALONE_BYTES, LocalPiece, Message, Pieces, Step
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.reshard.buckets import plan_buckets, round_transfers
from rlflow.reshard.plan import ReshardPlan

_HEADER = 32
"""Bytes before the elements of a packed message: version, elements and checksum as int64, and 8 to stay aligned."""
_AREAS = 2
"""For either direction: while one is on its way, the other is packed or unpacked."""

Tensors = Mapping[str, torch.Tensor]
"""Local tensors of one rank, by the names of the reshard."""


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


@dataclass(frozen=True)
class _Moving:
    """A message on its way. `piece`: the one that it is, None for a packed message. `placed`: it lies in its tensor."""

    peer: int
    piece: LocalPiece | None
    content: torch.Tensor
    placed: bool
    work: dist.Work


class _Area:
    """Memory for messages of one direction, carved from the front, and the messages of a step that are on their way."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.nbytes = size
        self.moving: list[_Moving] = []
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def has(self, size: int) -> bool:
        return self._used + size <= self.nbytes

    def take(self, size: int) -> torch.Tensor:
        found = self._memory[self._used : self._used + size]
        self._used += _aligned(size)
        return found

    def arrived(self) -> Iterator[_Moving]:
        """Each when it has moved; afterwards the area is free."""
        for moving in self.moving:
            moving.work.wait()
            yield moving
        self.moving, self._used = [], 0

    def settle(self) -> None:
        for _ in self.arrived():
            pass


class ReshardLinks:
    """This rank's part of a reshard. Ranks of source and target call `run` in the same order, on either side once per
    version.

    `device`: this rank's number among the plan's devices. `rank_of`: device to rank of `group`. `dtype`: of what is
    sent, the narrower one of both sides. `alone_bytes`: see ALONE_BYTES, the same on all ranks. ReshardError for a
    bucket that does not hold a row and messages' headers.
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
        alone_bytes: int = ALONE_BYTES,
    ) -> None:
        self._rank_of, self._group, self._dtype, self._torch_device = rank_of, group, dtype, torch_device
        self._element_bytes = int(dtype.itemsize)
        self._bucket_bytes = bucket_bytes
        self.sends = device in plan.source.devices
        """Whether this rank has weights to give."""
        self.receives = device in plan.target.devices
        pieces = Pieces(plan, device, self._element_bytes, alone_bytes)
        self._copies = pieces.copies()
        self._steps: list[Step] = []
        if plan.received_bytes:
            # Both ends of all pairs must cut the same rounds, so that nothing of this rank alone may count here.
            peers = len({*plan.source.devices, *plan.target.devices}) - 1
            headers = 2 * peers * (_HEADER + ALIGNED)
            buckets = plan_buckets(plan, bucket_bytes // _AREAS - headers)
            for units in buckets.rounds:
                self._steps += pieces.steps(round_transfers(plan, units, {device}))

    def run(self, source: Tensors | None, target: Tensors | None, version: int) -> Moved:
        """One reshard. `source` on ranks of the source, `target` on those of the target; returns bytes moved.

        RunFailure RLF5018 for messages of another version or of other bytes than were sent; `target` is then partly
        written.
        """
        moved, began = Moved(), time.monotonic()
        areas = min(_AREAS, len(self._steps))
        inward, outward = self._areas(source, target, areas)
        moved.peak_buffers = sum(area.nbytes for area in (*inward, *outward))
        copies = self._copying(source, target, moved)
        with torch.no_grad():
            for step in self._steps[:1]:
                self._post(step, target, inward[0])
            for number, step in enumerate(self._steps):
                if number + 1 < len(self._steps):
                    self._post(self._steps[number + 1], target, inward[(number + 1) % areas])
                self._send(step, target if step.forwarded else source, version, moved, outward[number % areas])
                next(copies, None)
                if target is not None:
                    self._receive(
                        step, inward[number % areas], target, version, moved, began if source is None else None
                    )
            for _ in copies:
                pass
            for area in outward:
                area.settle()
        return moved

    def _copying(self, source: Tensors | None, target: Tensors | None, moved: Moved) -> Iterator[None]:
        """Copy what is kept, a share of it at every step."""
        if source is None or target is None:
            return
        share = -(-len(self._copies) // max(len(self._steps), 1))
        for number, (here, there) in enumerate(self._copies, 1):
            part = target[there.tensor][there.local]
            # Both have the shape of the box, but for a flat shard's, whose memory can be seen in that shape.
            part.view(there.shape).copy_(source[here.tensor][here.local].view(here.shape))
            moved.copied += there.elements * self._element_bytes
            if number % share == 0:
                yield

    # --- one step of one round ---------------------------------------------------------------------------------------

    def _post(self, step: Step, target: Tensors | None, area: _Area) -> None:
        for peer, message in step.receives.items():
            assert target is not None, "a rank that receives has the tensors"
            for piece in message.alone:
                there = self._direct(piece, target)
                content = area.take(piece.elements * self._element_bytes) if there is None else there
                area.moving.append(_Moving(peer, piece, content, there is not None, self._irecv(content, peer)))
            packed = area.take(self._size(message.packed))
            area.moving.append(_Moving(peer, None, packed, False, self._irecv(packed, peer)))

    def _send(self, step: Step, tensors: Tensors | None, version: int, moved: Moved, area: _Area) -> None:
        area.settle()
        for peer, message in step.sends.items():
            assert tensors is not None, "a rank that sends has the tensors"
            alone = []
            for piece in message.alone:
                here = self._direct(piece, tensors)
                content = self._room(area, piece.elements * self._element_bytes) if here is None else here
                if here is None:
                    self._pack([piece], content, tensors)
                area.moving.append(_Moving(peer, piece, content, here is not None, self._isend(content, peer)))
                alone.append(_checksum(content))  # while it is on its way
            packed = self._room(area, self._size(message.packed))
            self._pack(message.packed, packed[_HEADER:], tensors)
            header = [version, message.elements, _joined([*alone, _checksum(packed[_HEADER:])]), 0]
            packed[:_HEADER].view(torch.int64).copy_(torch.tensor(header))
            area.moving.append(_Moving(peer, None, packed, False, self._isend(packed, peer)))
            moved.sent += message.elements * self._element_bytes

    def _receive(
        self, step: Step, area: _Area, target: Tensors, version: int, moved: Moved, began: float | None
    ) -> None:
        """`began`: when a rank that only receives began to wait."""
        sums: dict[int, list[int]] = {peer: [] for peer in step.receives}
        for moving in area.arrived():
            if began is not None and not moved.waited_s:
                moved.waited_s = time.monotonic() - began
            message = step.receives[moving.peer]
            body = moving.content[0 if moving.piece is not None else _HEADER :]
            sums[moving.peer].append(_checksum(body))
            if moving.piece is None:
                header = moving.content[:_HEADER].view(torch.int64)[:3].tolist()
                self._check(header, message, _joined(sums[moving.peer]), version, moving.peer)
                self._unpack(message.packed, body, target)
                moved.received += message.elements * self._element_bytes
            elif not moving.placed:
                self._unpack([moving.piece], body, target)

    def _check(self, header: list[int], message: Message, found: int, version: int, peer: int) -> None:
        was, elements, checksum = header
        if was != version:
            raise RunFailure(
                "RLF5018",
                f"weights of version {was} came from rank {self._rank_of[peer]} in place of version {version}",
            )
        if elements != message.elements or checksum != found:
            raise RunFailure(
                "RLF5018",
                f"weights of version {version} from rank {self._rank_of[peer]} are not those that were sent",
                notes=(f"{elements} elements with checksum {checksum} were sent",),
            )

    def _pack(self, pieces: list[LocalPiece], content: torch.Tensor, tensors: Tensors) -> None:
        body, first = content.view(self._dtype), 0
        for piece in pieces:
            part = body[first : first + piece.elements].view(piece.shape)
            part.copy_(tensors[piece.tensor][piece.local].view(piece.shape))
            first += piece.elements

    def _unpack(self, pieces: list[LocalPiece], content: torch.Tensor, tensors: Tensors) -> None:
        body, first = content.view(self._dtype), 0
        for piece in pieces:
            part = tensors[piece.tensor][piece.local]
            part.copy_(body[first : first + piece.elements].view(part.shape))
            first += piece.elements

    # --- memory ------------------------------------------------------------------------------------------------------

    def _direct(self, piece: LocalPiece, tensors: Tensors) -> torch.Tensor | None:
        """A piece as the bytes of its tensor, where it lies there as it is sent."""
        part = tensors[piece.tensor][piece.local]
        if part.dtype != self._dtype or not part.is_contiguous() or part.device != self._torch_device:
            return None
        return part.detach().view(-1).view(torch.uint8)

    def _areas(self, source: Tensors | None, target: Tensors | None, areas: int) -> tuple[list[_Area], list[_Area]]:
        """(for what is received, for what is sent), no larger than these tensors need."""
        sent, received, largest = 0, 0, 0
        for step in self._steps:
            given = [self._passing(m, target if step.forwarded else source) for m in step.sends.values()]
            taken = [self._passing(message, target) for message in step.receives.values()]
            largest = max([largest, *(size for sizes in given for size in sizes)])
            sent = max(sent, sum(size for sizes in given for size in sizes))
            received = max(received, sum(size for sizes in taken for size in sizes))
        sent = max(min(sent, self._bucket_bytes // (2 * _AREAS)), largest)
        return (
            [_Area(received, self._torch_device) for _ in range(areas)],
            [_Area(sent, self._torch_device) for _ in range(areas)],
        )

    def _passing(self, message: Message, tensors: Tensors | None) -> list[int]:
        """Bytes, in an area, of what goes through it."""
        assert tensors is not None, "a rank that sends or receives has the tensors"
        alone = [p.elements * self._element_bytes for p in message.alone if self._direct(p, tensors) is None]
        return [*alone, _aligned(self._size(message.packed))]

    def _room(self, area: _Area, size: int) -> torch.Tensor:
        if not area.has(size):
            # Receivers post all of a step before they send any of it, so that what is on its way arrives.
            area.settle()
        return area.take(size)

    def _size(self, pieces: list[LocalPiece]) -> int:
        """Bytes of a packed message."""
        return _HEADER + sum(piece.elements for piece in pieces) * self._element_bytes

    # --- the group ---------------------------------------------------------------------------------------------------

    def _isend(self, buffer: torch.Tensor, peer: int) -> dist.Work:
        work = dist.isend(buffer, group=self._group, group_dst=self._rank_of[peer])
        assert work is not None
        return work

    def _irecv(self, buffer: torch.Tensor, peer: int) -> dist.Work:
        work = dist.irecv(buffer, group=self._group, group_src=self._rank_of[peer])
        assert work is not None
        return work


def _aligned(size: int) -> int:
    return size + -size % ALIGNED


def _checksum(raw: torch.Tensor) -> int:
    """Sum of bytes as int64 words, which a changed or missing word changes; cheap beside sending them.

    Words of the type that is summed: torch would otherwise convert all of them first, in memory that no cap knows of.
    """
    size = raw.nbytes - raw.nbytes % 8
    return int(raw[:size].view(torch.int64).sum() + raw[size:].sum(dtype=torch.int64))


def _joined(checksums: list[int]) -> int:
    """One for all messages, as an int64, which also changes where two of them change places."""
    total = sum(number * checksum for number, checksum in enumerate(checksums, 1)) % 2**64
    return total - 2**64 if total >= 2**63 else total

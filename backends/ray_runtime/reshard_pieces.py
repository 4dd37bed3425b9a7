"""What one rank sends and receives in a planned reshard: boxes of the plan as slices of its tensors, in messages.

Both ends work out the same messages from the plan alone. A large piece that lies in one run of memory at either end is
a message of its own, so that this end sends or receives it where it lies; all others for one peer go together, packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rlflow.reshard.boxes import Box, Shape, extents, slices, volume
from rlflow.reshard.placements import Piece
from rlflow.reshard.plan import ReshardPlan, Transfer
from rlflow.reshard.shards import Sharding

ALONE_BYTES = 256 << 10
"""A piece from this size on may go in a message of its own: a message costs about as much as copying such a piece."""
ALIGNED = 8
"""Messages start at multiples of this in a buffer."""


@dataclass(frozen=True)
class LocalPiece:
    """Consecutive elements of a message: a part of a local tensor."""

    tensor: str
    local: tuple[slice, ...]
    shape: tuple[int, ...]
    elements: int


@dataclass
class Message:
    """Pieces for one peer at one step: those in messages of their own, and then those that are packed into one."""

    alone: list[LocalPiece] = field(default_factory=list)
    packed: list[LocalPiece] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in (*self.alone, *self.packed))


@dataclass
class Step:
    """What one rank sends and receives at one step of a round, by peer (device)."""

    sends: dict[int, Message] = field(default_factory=dict)
    receives: dict[int, Message] = field(default_factory=dict)
    forwarded: bool = False
    """What is sent was received at the step before, so that it is read from the target's tensors."""


class Pieces:
    """The pieces of one device of a plan. `element_bytes`: of what is sent. `alone_bytes`: see ALONE_BYTES."""

    def __init__(self, plan: ReshardPlan, device: int, element_bytes: int, alone_bytes: int = ALONE_BYTES) -> None:
        self._plan, self._device = plan, device
        self._element_bytes, self._alone_bytes = element_bytes, alone_bytes
        self._before = Sharding(plan.catalogue, plan.source.layout, plan.source.storage)
        self._after = Sharding(plan.catalogue, plan.target.layout, plan.target.storage)

    def copies(self) -> list[tuple[LocalPiece, LocalPiece]]:
        """(from, to) of what the device keeps."""
        found = (self._paired(transfer) for transfer in self._plan.copies({self._device}))
        return [(here, there) for pairs in found for here, there, _ in pairs]

    def steps(self, transfers: Iterable[Transfer]) -> list[Step]:
        """By step; within a message pieces are in the order of the plan on both sides."""
        found: dict[int, Step] = {}
        for transfer in transfers:
            step = found.setdefault(transfer.step, Step(forwarded=transfer.step > 0))
            for here, there, alone in self._paired(transfer):
                for mine, piece, messages, peer in (
                    (transfer.source, here, step.sends, transfer.target),
                    (transfer.target, there, step.receives, transfer.source),
                ):
                    if mine == self._device:
                        message = messages.setdefault(peer, Message())
                        (message.alone if alone else message.packed).append(piece)
        return [found[number] for number in sorted(found)]

    def _paired(self, transfer: Transfer) -> Iterator[tuple[LocalPiece, LocalPiece, bool]]:
        """A transfer in boxes that lie in one piece at either end: where each is, where it goes, and whether in a
        message of its own.

        Both ends cut a box at the pieces of both, so that they agree on the order of its elements.
        """
        tensor = transfer.tensor
        sender = self._after if transfer.step else self._before
        source = self._plan.target if transfer.step else self._plan.source
        sender_rank = source.devices.index(transfer.source)
        receiver_rank = self._plan.target.devices.index(transfer.target)
        given, taken = sender.local(tensor)[0], self._after.local(tensor)[0]
        shapes = sender.local_shape(sender_rank, given), self._after.local_shape(receiver_rank, taken)
        for piece in sender.pieces(sender_rank, tensor):
            for box, _ in piece.locate(transfer.box):
                for other in self._after.pieces(receiver_rank, tensor):
                    for common, target in other.locate(box):
                        for final, local in piece.locate(common):
                            if final != common:  # a flat shard cut further: so is the other end
                                target = _shifted_into(other, final)
                            ends = (local, shapes[0]), (target, shapes[1])
                            alone = self._is_large(final) and any(_in_one_run(*end) for end in ends)
                            yield _piece(given.name, local, final), _piece(taken.name, target, final), alone

    def _is_large(self, box: Box) -> bool:
        size = volume(box) * self._element_bytes
        return size >= self._alone_bytes and size % ALIGNED == 0


def _in_one_run(box: Box, shape: Shape) -> bool:
    """Whether a part of a tensor is one stretch of memory: whole behind the first dimension that it has more than one
    of."""
    behind = False
    for (low, high), extent in zip(box, shape, strict=True):
        if behind and (low, high) != (0, extent):
            return False
        behind = behind or high - low > 1
    return True


def _shifted_into(piece: Piece, box: Box) -> Box:
    """Where a box that one piece holds in one run lies in it."""
    found = list(piece.locate(box))
    if len(found) != 1:
        raise ValueError(f"{list(box)} lies in {len(found)} runs of a flat shard at both ends")
    return found[0][1]


def _piece(name: str, local: Box, canonical: Box) -> LocalPiece:
    return LocalPiece(name, slices(local), extents(canonical), volume(canonical))

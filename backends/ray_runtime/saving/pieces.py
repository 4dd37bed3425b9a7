"""Tensors of which every rank has some boxes, to and from a folder of torch.distributed.checkpoint (DCP).

DCP keeps every box with its place in the whole tensor, and gives a reader whatever it asks for out of those that
overlap it. So what one layout wrote another can read. Of equal boxes on several ranks one is written.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True)
class Piece:
    """One box of a tensor: where it begins in the whole, and its values."""

    offsets: tuple[int, ...]
    values: torch.Tensor


class Pieces:
    """This rank's boxes of one tensor of shape `shape`."""

    def __init__(self, shape: tuple[int, ...], pieces: list[Piece]) -> None:
        self.shape = shape
        self.pieces = pieces

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self.shape)

    def at(self, index: MetadataIndex) -> torch.Tensor:
        """The values of the box that begins at the index's offset."""
        return next(p.values for p in self.pieces if torch.Size(p.offsets) == index.offset)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(piece.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece), properties=TensorProperties.create_from_tensor(piece.values), size=self.size()
                ),
            )
            for piece in self.pieces
        ]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where the boxes are."""
        return [_chunk(piece) for piece in self.pieces]


def write_pieces(state: Mapping[str, Pieces], folder: Path, group: dist.ProcessGroup | None) -> None:
    """All ranks of the group call, with the boxes that they have; without a group this rank has everything.

    The group must be used for nothing else at the same time.
    """
    writer = FileSystemWriter(folder)
    with _plain_errors():
        dcp.save(dict(state), storage_writer=writer, planner=_Save(), process_group=group, no_dist=group is None)


def read_pieces(state: Mapping[str, Pieces], folder: Path) -> None:
    """Fill the boxes of every tensor in place. Each rank reads for itself."""
    with _plain_errors():
        dcp.load(dict(state), storage_reader=FileSystemReader(folder), planner=_Load(), no_dist=True)


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors in a folder of DCP."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in found.items()}


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What went wrong on a rank, as an exception: DCP's own is none, so that `except Exception` lets it through."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a single process, that it is one
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {type(cause).__name__}: {cause}") from None


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.values.size())


class _Save(DefaultSavePlanner):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].at(index)


class _Load(DefaultLoadPlanner):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default would walk through the values and make tensors of what it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        known = self.metadata.state_dict_metadata
        missing = sorted(self.state_dict.keys() - known.keys())
        if missing:
            raise ValueError(f"the checkpoint has no `{missing[0]}`")
        return LoadPlan(
            [
                item
                for name, pieces in self.state_dict.items()
                for item in create_read_items_for_chunk_list(name, known[name], pieces.chunks())
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].at(index)
        return found

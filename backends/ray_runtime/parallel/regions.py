"""Where the elements of what an optimizer moves lie in the model's weights: for states that outlive a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Region:
    """A box of one weight of the whole model, which a tensor of the optimizer's has."""

    name: str
    """Of the weight, as in the transformers state dict."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    offsets: tuple[int, ...]
    """Where the box begins in it."""
    inside: tuple[slice, ...]
    """The box within the tensor; within its elements [low, high) as a tensor of shape `view` where these are given."""
    span: tuple[int, int] | None = None
    view: tuple[int, ...] = ()
    first: bool = True
    """False for a copy that another rank gives, cut otherwise."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box's elements, a view."""
        if self.span is not None:
            tensor = tensor[self.span[0] : self.span[1]].view(self.view)
        return tensor[self.inside]


def whole_region(name: str, shape: tuple[int, ...], first: bool = True) -> Region:
    """A weight that the rank has all of."""
    return Region(name, shape, (0,) * len(shape), tuple(slice(0, extent) for extent in shape), first=first)


def boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[slice, ...]]:
    """Boxes that together are the elements [low, high) of a tensor of this shape in row-major order, in that order."""
    if low >= high:
        return
    if len(shape) <= 1:
        yield (slice(low, high),) if shape else ()
        return
    row = 1
    for extent in shape[1:]:
        row *= extent
    first, last = low // row, high // row  # rows begun before, rows ended
    if low % row or first == last:
        end = min(high, (first + 1) * row)
        for box in boxes(shape[1:], low - first * row, end - first * row):
            yield (slice(first, first + 1), *box)
        low, first = end, first + 1
    if first < last:
        yield (slice(first, last), *(slice(0, extent) for extent in shape[1:]))
        low = last * row
    if low < high:
        for box in boxes(shape[1:], low - last * row, high - last * row):
            yield (slice(last, last + 1), *box)

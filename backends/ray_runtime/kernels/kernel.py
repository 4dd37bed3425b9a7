"""A kernel: one operation, several implementations, one rule that says which inputs are legal.

Which implementation runs is chosen by the device of the first tensor: `npu` on an NPU where it has one, `torch` else.
A user overrides that with RLFLOW_KERNELS, `name=implementation` separated by commas (`attention=torch,all=torch`); a
program with `using`, or adds an implementation of its own with `register`.

The rule runs before every implementation, since torch_npu's shape functions accept what its operators refuse or, worse,
compute wrongly: odd sizes, a gamma of the wrong length, heads that do not divide. It reads shapes, never values, as
reading a value would wait for the device; and what has passed once is not looked at again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch

from rlflow.diagnostics.diagnostic import RunFailure, one_of

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE: Final = "RLFLOW_KERNELS"
TORCH: Final = "torch"
NPU: Final = "npu"
_MOST_REMEMBERED: Final = 4096
_BY_DEVICE: Final = {"npu": NPU}
"""Implementation that a type of device prefers; any other prefers torch's."""

ALL: Final[dict[str, Kernel[..., Any]]] = {}
"""Every kernel that was made, by name. Importing `table` makes all of them."""


class Kernel(Generic[P, R]):
    """`kernel(...)` checks the input and calls the chosen implementation.

    Args:
        reference: the definition in torch, differentiable where training needs it, right on every device.
        npu: the same through torch_npu. Takes and gives the same.
        check: takes a `Checker` and the same arguments; says what is wrong with them.
    """

    def __init__(
        self, name: str, *, reference: Callable[P, R], npu: Callable[P, R], check: Callable[..., None]
    ) -> None:
        self.name = name
        self.implementations: dict[str, Callable[P, R]] = {TORCH: reference, NPU: npu}
        self._check = check
        self._passed: set[Any] = set()
        self._forced: list[str] = []
        ALL[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self.choice(_device(args, kwargs))
        self.check(chosen, *args, **kwargs)
        return self.implementations[chosen](*args, **kwargs)

    def check(self, implementation: str, *args: P.args, **kwargs: P.kwargs) -> None:
        """RLF5030 when the input is illegal, for every implementation or (limits of the hardware) for this one."""
        key = _signature(implementation, args, kwargs)
        if key in self._passed:
            return
        self._check(Checker(self.name, implementation), *args, **kwargs)
        if len(self._passed) >= _MOST_REMEMBERED:
            self._passed.clear()  # lengths of sequences may take any number of values
        self._passed.add(key)

    def choice(self, device: str) -> str:
        """Name of the implementation that runs on a type of device. RLF5031 when the user named one that is missing."""
        if self._forced:
            return self._forced[-1]
        wish = _wishes().get(self.name) or _wishes().get("all")
        if wish is not None:
            return self._known(wish)
        return _BY_DEVICE.get(device, TORCH)

    def register(self, implementation: str, function: Callable[P, R]) -> None:
        """Add an implementation, or replace one. It runs where it is chosen by name."""
        self.implementations[implementation] = function

    def _known(self, implementation: str) -> str:
        if implementation not in self.implementations:
            raise RunFailure(
                "RLF5031",
                f"kernel `{self.name}` has no implementation `{implementation}`",
                notes=(f"{VARIABLE} is `{os.environ.get(VARIABLE, '')}`",) if VARIABLE in os.environ else (),
                help=(f"use {one_of(sorted(self.implementations))}",),
            )
        return implementation

    @contextmanager
    def forced(self, implementation: str) -> Iterator[None]:
        """Everything inside runs this implementation, on any device."""
        self._forced.append(self._known(implementation))
        try:
            yield
        finally:
            self._forced.pop()


@contextmanager
def using(implementation: str, *names: str) -> Iterator[None]:
    """The named kernels (default: all) run one implementation inside, on any device. RLF5031 for an unknown name."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        for name in names or tuple(ALL):
            stack.enter_context(find(name).forced(implementation))
        yield


def find(name: str) -> Kernel[..., Any]:
    """The kernel of that name. RLF5031 when there is none."""
    if name not in ALL:
        raise RunFailure("RLF5031", f"there is no kernel `{name}`", help=(f"use {one_of(sorted(ALL))}",))
    return ALL[name]


_parsed: tuple[str, dict[str, str]] = ("", {})


def _wishes() -> dict[str, str]:
    """RLFLOW_KERNELS as a table. Parsed again only when it changes."""
    global _parsed
    text = os.environ.get(VARIABLE, "")
    if text != _parsed[0]:
        wishes = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, implementation = part.partition("=")
            if not equals or not implementation:
                raise RunFailure(
                    "RLF5031",
                    f"`{part}` in {VARIABLE} is not NAME=IMPLEMENTATION",
                    help=(f"write, for example, `{VARIABLE}=attention=torch`",),
                )
            if name != "all":
                find(name)
            wishes[name] = implementation
        _parsed = (text, wishes)
    return _parsed[1]


def _signature(implementation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All of a call that a rule may depend on."""
    grad = torch.is_grad_enabled()
    return (implementation, grad, *map(_look, args), *((name, _look(value)) for name, value in kwargs.items()))


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad, value.is_contiguous()
    return tuple(map(_look, value)) if isinstance(value, list) else value


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return str(value.device.type)
        if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            return str(value[0].device.type)
    raise TypeError("a kernel was called without a tensor")


class Checker:
    """What a kernel's rule says its findings to. Each method raises RLF5030 where its condition does not hold."""

    def __init__(self, kernel: str, implementation: str) -> None:
        self._kernel = kernel
        self.npu = implementation.startswith(NPU)
        """Whether the limits of the hardware apply."""

    def that(self, condition: bool, problem: str, *help: str) -> None:
        """`problem` names the numbers that clash."""
        if not condition:
            raise RunFailure("RLF5030", f"kernel `{self._kernel}`: {problem}", help=help)

    def limit(self, condition: bool, problem: str, *help: str) -> None:
        """As `that`, for what only the NPU's operator cannot do."""
        if self.npu:
            self.that(condition, f"{problem} (on an NPU)", *help, f"or run torch's: {VARIABLE}={self._kernel}=torch")

    def dims(self, name: str, tensor: torch.Tensor, *allowed: int) -> None:
        """The number of dimensions."""
        words = " or ".join(str(n) for n in allowed)
        self.that(tensor.dim() in allowed, f"{name} {shape(tensor)} has {tensor.dim()} dimensions, not {words}")

    def floating(self, name: str, tensor: torch.Tensor, *npu: torch.dtype) -> None:
        """A floating dtype, on an NPU one of `npu` (default: all that its operators have)."""
        self.that(tensor.dtype.is_floating_point, f"{name} is {dtype(tensor)}, not a floating type")
        allowed = npu or FLOATING
        words = ", ".join(str(each).removeprefix("torch.") for each in allowed)
        self.limit(tensor.dtype in allowed, f"{name} is {dtype(tensor)}; supported: {words}")

    def same_dtype(self, **tensors: torch.Tensor | None) -> None:
        """One dtype for all of them; None is skipped."""
        found = {name: dtype(tensor) for name, tensor in tensors.items() if tensor is not None}
        words = ", ".join(f"{name} {kind}" for name, kind in found.items())
        self.that(len(set(found.values())) <= 1, f"inputs of different types: {words}")

    def integers(self, name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
        """One of some integer dtypes."""
        words = ", ".join(str(each).removeprefix("torch.") for each in allowed)
        self.that(tensor.dtype in allowed, f"{name} is {dtype(tensor)}, not {words}")


FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32)
"""What torch_npu's operators compute in. Not float64: an NPU has none."""


def shape(tensor: torch.Tensor) -> str:
    """`[2, 8, 64]`"""
    return str(list(tensor.shape))


def dtype(tensor: torch.Tensor) -> str:
    """`bfloat16`"""
    return str(tensor.dtype).removeprefix("torch.")


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 where it is narrower: what reductions of the references compute in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

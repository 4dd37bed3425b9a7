"""A test double: torch_npu's operators computed by torch's CPU kernels, on memory that the CANN stand-ins keep on the host.

It shows that a program reaches the right operators of the real package with the right tensors, and that what it then
computes is right. It says nothing of how an NPU computes, and is no backend: it is never shipped.

Collectives of npu tensors go to the group's gloo backend, on the same memory: a group must have one for CPU tensors, as
`cpu:gloo,npu:hccl` has.

`activate()` replaces, under the dispatch key of NPUs, every aten operator that torch_npu has a kernel for by its CPU
kernel on views of the same memory; allocation, views and scalars stay torch_npu's. Operators that only torch_npu has are
served by the references of rlflow's kernels (npu_definitions.py), or raise.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Any

import torch

_KEPT = {
    "as_strided", "as_strided_", "view", "_reshape_alias", "resize_", "resize_as_", "empty.memory_format", "empty_strided",
    "new_empty_strided", "empty_like", "empty_with_format", "unsafe_empty_with_format", "empty_with_swapped_memory",
    "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to",
    "record_stream", "copy_memory_", "_local_scalar_dense", "is_pinned", "_pin_memory", "_copy_from_and_resize",
    "_lazy_clone",
}  # fmt: skip
"""Of aten: memory, views and scalars."""
_KEPT_OWN = {"get_npu_format", "get_storage_size"}
"""Of torch_npu: what asks for a tensor's format."""
_FRACTAL_NZ = 29
RECORD = "RLFLOW_SOFTWARE_NPU_RECORD"
"""A folder in which every process notes the torch_npu operators that it called, in a file of its own."""
_recorded: set[str] = set()
_LIBRARIES: list[torch.library.Library] = []
_KEY = "PrivateUse1"


def activate() -> None:
    """Once per process; importing torch is enough where the entry point beside this file is on the path."""
    if _LIBRARIES:
        return
    import torch_npu  # noqa: F401

    from tests.npu import npu_definitions

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)
        libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "npu", "c10d")}
        _LIBRARIES.extend(libraries.values())
        for qualified in names:
            namespace, name = qualified.split("::")
            if namespace == "npu" and name in _KEPT_OWN:
                continue
            if qualified == "npu::npu_format_cast":
                kernel: Any = _format_cast
            elif namespace == "npu" or (namespace == "aten" and name in npu_definitions.ATEN):
                function = npu_definitions.find(namespace, name)
                kernel = _missing(qualified) if function is None else _Kernel(_overload(namespace, name), function)
            elif namespace == "c10d" or (namespace == "aten" and name not in _KEPT):
                overload = _overload(namespace, name)
                if overload is None:
                    continue
                kernel = _Kernel(overload, overload)
            else:
                continue
            libraries[namespace].impl(name, kernel, _KEY)


def _overload(namespace: str, name: str) -> Any:
    packet, _, overload = name.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:  # an operator of torch_npu's own build of aten that torch does not show
        return None


def _record(name: str) -> None:
    if name not in _recorded:
        _recorded.add(name)
        with open(os.path.join(os.environ[RECORD], str(os.getpid())), "a", encoding="utf-8") as file:
            file.write(name.removeprefix("npu::") + "\n")


def _missing(qualified: str) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the software NPU has no {qualified}")

    return kernel


def _format_cast(input: torch.Tensor, acl_format: int, **_: Any) -> torch.Tensor:
    """There is one format, as memory is read on the host: the cast to another is a copy, that to its own nothing."""
    if acl_format != _FRACTAL_NZ:
        return input
    if os.environ.get(RECORD):
        _record("npu_format_cast")
    return to_device(to_host(input).clone(), input.device)  # type: ignore[no-any-return]


class _Kernel:
    """Calls `function` with CPU views of the npu tensors among its arguments."""

    def __init__(self, overload: Any, function: Any) -> None:
        schema = overload._schema
        self._name = schema.name if schema.name.startswith(("npu::", "c10d::")) else ""
        self._function = function
        self._arguments = [argument.name for argument in schema.arguments]
        self._defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        # Which argument a result is: in-place and out variants give back what they were given.
        written = {
            name: a.name
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
            for name in a.alias_info.before_set
        }
        self._same = [
            next((written[name] for name in r.alias_info.before_set if name in written), None) if r.alias_info else None
            for r in schema.returns
        ]
        self._out = [a.name for a in schema.arguments if a.is_out]
        self._written = set(written.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name and os.environ.get(RECORD):
            _record(self._name)
        named = dict(zip(self._arguments, args, strict=False)) | kwargs
        device = _device_of(named)
        given = {name: to_host(value) for name, value in named.items()}
        leaves = given.get("device") is not None and torch.device(given["device"]).type == "cpu"
        if given.get("device") is not None:
            given["device"] = torch.device("cpu")
        # A result of another size is computed apart: memory of the device cannot grow behind its back.
        for name in self._out:
            if isinstance(given[name], torch.Tensor):
                given[name] = torch.empty(0, dtype=given[name].dtype)
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            if isinstance(self._function, torch._ops.OpOverload):
                rest = {name: given[name] for name in self._arguments[len(args) :] if name in given}
                result = self._function(*(given[name] for name in self._arguments[: len(args)]), **rest)
            else:
                result = self._function(**(self._defaults | given))
        for name in self._out:
            target, found = named[name], given[name]
            if isinstance(target, torch.Tensor):
                if target.shape != found.shape:
                    target.resize_(found.shape)
                to_host(target).copy_(found)
        results = result if isinstance(result, tuple) else (result,)
        if len(self._same) == 0:
            return None
        back = [
            named[same] if same is not None else value if leaves else to_device(value, device)
            for value, same in zip(results, self._same, strict=True)
        ]
        return tuple(back) if isinstance(result, tuple) else back[0]


def _device_of(named: dict[str, Any]) -> torch.device:
    for value in named.values():
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "npu":
                return tensor.device
    asked = named.get("device")
    return torch.device(asked) if asked is not None else torch.device("npu", torch.npu.current_device())


def to_host(value: Any) -> Any:
    """npu tensors as CPU tensors on the same memory; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return _view(value)
    if isinstance(value, list | tuple):
        return type(value)(to_host(each) for each in value)
    return value


def _view(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    block = (ctypes.c_char * size).from_address(storage.data_ptr())
    whole = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())
    return view


def to_device(value: Any, device: torch.device) -> Any:
    """CPU tensors copied into new npu tensors."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return value
        stride = torch.empty_like(value).stride()  # value's own, unless elements share memory
        out = torch.empty_strided(value.size(), stride, dtype=value.dtype, device=device)
        _view(out).copy_(value)
        return out
    if isinstance(value, list | tuple):
        return type(value)(to_device(each, device) for each in value)
    return value

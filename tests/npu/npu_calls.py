"""Records the calls of torch_npu's own operators that pass the dispatcher."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}


class Calls(TorchDispatchMode):
    """`names` in order; `lines` = (operator, inputs, results) with how often."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.lines: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "npu":
            name = func._schema.name.removeprefix("npu::")
            self.names.append(name)
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
            given = [f"{key}={_show(value)}" for key, value in named.items() if not _is_default(value, defaults[key])]
            self.lines[name, ", ".join(given), _show(out)] += 1
        return out


def _is_default(value: Any, default: Any) -> bool:
    return value is None or (isinstance(value, int | float | str) and value == default)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size = "x".join(str(n) for n in value.shape) or "scalar"
        return f"{_TYPES.get(value.dtype, str(value.dtype))}[{size}]"
    if isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) for each in value):
        return "(" + ", ".join(_show(each) for each in value) + ")"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)

"""Tests against the real torch_npu package, which `make test-npu` runs in an environment of their own.

CANN's libraries are stand-ins there (cann_stubs.py): operators exist with their signatures, shape functions and
derivatives, and nothing computes. The ordinary suite collects nothing here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

STUBS = "RLFLOW_NPU_STUBS"
"""Set by `make test-npu` to the folder of the stand-ins."""

if STUBS not in os.environ:
    collect_ignore_glob = ["*.py"]
else:
    from tests.npu.npu_calls import Calls

    ALL_CALLS: Counter[tuple[str, str, str]] = Counter()
    """(operator, inputs, results) of the whole session."""

    @pytest.fixture(scope="session", autouse=True)
    def real_torch_npu() -> Any:
        """The package, with one device of the stubs current."""
        import torch_npu

        assert torch_npu.npu.is_available()
        return torch_npu

    @pytest.fixture
    def calls() -> Any:
        """`with calls() as seen:` runs on fake tensors (or with `fake=False` on the stand-ins' memory) and gives the
        torch_npu operators that were reached, in order."""

        @contextmanager
        def record(fake: bool = True) -> Iterator[list[str]]:
            from torch._subclasses.fake_tensor import FakeTensorMode

            mode = Calls()
            with FakeTensorMode() if fake else nullcontext(), mode:
                yield mode.names
            ALL_CALLS.update(mode.lines)

        return record

    def pytest_terminal_summary(terminalreporter: Any) -> None:
        """Which operators were called with which shapes."""
        if not ALL_CALLS:
            return
        terminalreporter.section(f"torch_npu operators called: {len({name for name, _, _ in ALL_CALLS})}")
        width = max(len(name) for name, _, _ in ALL_CALLS)
        for (name, inputs, results), times in sorted(ALL_CALLS.items()):
            terminalreporter.write_line(f"{name:{width}}  {inputs} -> {results}  x{times}")

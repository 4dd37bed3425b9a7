"""CANN's Python module as far as Ray asks it: how many NPUs there are, and which."""

from __future__ import annotations

import os


def get_soc_name() -> str:
    return "Ascend910B1"


class rt:
    @staticmethod
    def get_device_count() -> tuple[int, int]:
        """Devices and an error code."""
        return int(os.environ.get("RLFLOW_STUB_DEVICES", "2")), 0

"""Loads the oracles beside the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).with_name("oracles.py")
if "search_oracles" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("search_oracles", _FILE)
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["search_oracles"] = _module
    _spec.loader.exec_module(_module)

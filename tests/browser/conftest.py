"""Tests that drive Chromium: only when asked for, and only where there is one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def _driver() -> Any:
    """chromium.py, by its path: under importlib mode test folders are no packages."""
    spec = importlib.util.spec_from_file_location("report_chromium", Path(__file__).with_name("chromium.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    reason = ""
    if not config.getoption("--browser"):
        reason = "drives a browser: make test-browser"
    elif _driver().find_chromium() is None:
        reason = f"no Chromium on the path ({', '.join(_driver().NAMES)}); for example: apt install chromium"
    for item in here:
        item.add_marker(pytest.mark.browser)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def chromium() -> Any:
    with _driver().Chromium() as browser:
        yield browser

"""What ranks are started with."""

from __future__ import annotations

import os

import pytest

from rlflow.backends.ray_runtime.start_ranks import threads_of


@pytest.mark.parametrize(
    ("environment", "cores", "ranks", "threads"),
    [
        ({}, 8, 2, 4),
        ({}, 2, 4, 1),
        ({"OMP_NUM_THREADS": "3"}, 8, 2, 3),
        ({"OMP_NUM_THREADS": ""}, 8, 2, 4),
        ({"OMP_NUM_THREADS": "0"}, 8, 2, 4),
        ({"OMP_NUM_THREADS": "4,2"}, 8, 2, 4),
    ],
)
def test_threads_are_what_the_user_says_or_an_even_share(
    environment: dict[str, str], cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert threads_of(ranks, environment) == threads

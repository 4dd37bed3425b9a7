"""Joining a Ray cluster that refuses, or says nothing. What Ray does is played; its words are those of Ray 2.60."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import ray

from rlflow.backends.ray_runtime import connect as module
from rlflow.backends.ray_runtime.connect import connect
from rlflow.diagnostics import RunFailure

REFUSED = b"gcs_client.cc:210: Failed to get cluster ID from GCS server: Unauthenticated: RPC error: InvalidAuthToken\n"


def test_a_cluster_that_wants_a_token(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The reason is only in what native code prints, which does not get to the terminal."""

    def init(**options: Any) -> None:
        os.write(2, REFUSED)
        raise ConnectionError(f"Failed to connect to Ray cluster at {options['address']}")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunFailure) as failed:
        connect("head:6379", {"address": "head:6379"})
    assert failed.value.code == "RLF5008"
    assert failed.value.message == "the Ray cluster at `head:6379` wants a token that this process does not have"
    assert "RAY_AUTH_MODE=token" in failed.value.help[0]
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("nobody")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunFailure, match="cannot connect to Ray at `head:6379`") as failed:
        connect("head:6379", {})
    assert failed.value.notes == ("ConnectionError: nobody",)


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(ray, "init", lambda **options: hangs.wait())
    monkeypatch.setattr(module, "CONNECT_DEADLINE_S", 0.3)
    began = time.monotonic()
    with pytest.raises(RunFailure, match=r"Ray at `head:6379` did not answer within 0\.3 s") as failed:
        connect("head:6379", {})
    hangs.set()
    assert failed.value.code == "RLF5008"
    assert time.monotonic() - began < 5


def test_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **options: given.append(options))
    connect("head:6379", {"address": "head:6379"})
    assert given == [{"address": "head:6379"}]

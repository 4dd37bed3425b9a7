"""Joining a Ray cluster, with an end and a reason when it cannot be joined."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import ray

from rlflow.diagnostics.diagnostic import RunFailure

CONNECT_DEADLINE_S = 60.0
"""Ray itself gives up after 20 s where nobody listens or a token is refused, and never in some other cases."""
INIT_ERRORS = (ConnectionError, RuntimeError, ValueError, TimeoutError)
_POLL_S = 0.1
_NO_TOKEN = ("InvalidAuthToken", "Unauthenticated")
"""What Ray's native part says when RAY_AUTH_MODE is not the same on both sides, or the token is another one. Its Python
part does not pass that on."""


def connect(address: str, options: Mapping[str, Any]) -> None:
    """`ray.init(**options)` for a cluster. RLF5008 when it cannot be joined, or does not answer in time.

    It runs in a thread, so that its waits in native code can be given up, by Ctrl-C too.
    """
    raised: list[BaseException] = []

    def join() -> None:
        try:
            ray.init(**options)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=join, name="ray.init", daemon=True)
    with _native_words() as words:
        until = time.monotonic() + CONNECT_DEADLINE_S
        thread.start()
        while thread.is_alive() and time.monotonic() < until:
            thread.join(_POLL_S)
        words.seek(0)
        said = words.read().decode("utf-8", errors="replace")
    if not thread.is_alive() and not raised:
        return
    if raised and not isinstance(raised[0], (*INIT_ERRORS, ray.exceptions.RayError)):
        raise raised[0]
    if any(word in said for word in _NO_TOKEN):
        raise RunFailure(
            "RLF5008",
            f"the Ray cluster at `{address}` wants a token that this process does not have",
            notes=(next(line.strip() for line in said.splitlines() if any(word in line for word in _NO_TOKEN)),),
            help=("`export RAY_AUTH_MODE=token` here, with RAY_AUTH_TOKEN as on the cluster's hosts",),
        )
    if not raised:
        notes = (line.strip() for line in said.splitlines()[-3:])
        message = f"Ray at `{address}` did not answer within {CONNECT_DEADLINE_S:g} s"
        raise RunFailure("RLF5008", message, notes=notes, help=(f"rlflow doctor --address {address}",))
    cause = f"{type(raised[0]).__name__}: {raised[0]}"
    raise RunFailure(
        "RLF5008", f"cannot connect to Ray at `{address}`", notes=(cause,), help=(f"rlflow doctor --address {address}",)
    )


@contextlib.contextmanager
def _native_words() -> Iterator[BinaryIO]:
    """A file with what this process writes to the descriptor of standard error meanwhile, instead of the terminal."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as words:
        kept = os.dup(2)
        os.dup2(words.fileno(), 2)
        try:
            yield words
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)

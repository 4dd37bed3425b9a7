"""Calling user code with a deadline. No torch, no ray here."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any


class Expired(Exception):
    """The call did not come back in time; its thread is still running. Not a TimeoutError: the call may raise that."""


class CallThread:
    """A daemon thread that runs calls, so that the caller can stop waiting for one and the process can still end."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def call(self, function: Callable[[], Any], timeout: float) -> Any:
        """Its result, or what it raised; Expired after `timeout` seconds, when this thread is of no more use."""
        self._calls.put(function)
        try:
            result, error = self._results.get(timeout=timeout)
        except queue.Empty:
            raise Expired from None
        if error is not None:
            raise error
        return result

    def where(self) -> str:
        """The place in the code where it is now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._results.put((function(), None))
            except BaseException as error:
                self._results.put((None, error))

"""Hands the rows of a run to its sinks. A sink that fails, hangs or is slow takes neither the run nor a row with it:
every sink has a thread of its own and a queue that is not waited for, and metrics.jsonl is written before."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping

from rlflow.diagnostics import RunFailure
from rlflow.sinks.apart import SinkApart
from rlflow.sinks.names import open_sink
from rlflow.sinks.sink import RunInfo, Sink

WAITING = 1000
"""Rows that a sink may be behind; then it is given up."""
CLOSE_S = 30.0
"""For all sinks together to write what they still have."""

Row = tuple[int, Mapping[str, float]]


def sink_failed(name: str, what: str, error: BaseException | None = None) -> RunFailure:
    """RLF5062 with the original exception as the last note."""
    notes = () if error is None else (f"{type(error).__name__}: {error}",)
    return RunFailure("RLF5062", f"logging to {name} {what}", notes=notes)


class _Worker:
    """A sink and the thread that it runs in. States: running -> ended, by `end` or by its first failure."""

    def __init__(self, name: str, sink: Sink, waiting: int) -> None:
        self.name = name
        self.failure: RunFailure | None = None
        self._sink = sink
        self._rows: queue.Queue[Row | str] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._serve, name=f"log to {name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        if self.failure is None:
            try:
                self._rows.put_nowait(row)
            except queue.Full:
                self.failure = sink_failed(self.name, f"has stopped: it is {self._rows.maxsize} rows behind")

    def ask_to_end(self, status: str) -> None:
        if self.failure is None:
            try:
                self._rows.put_nowait(status)
            except queue.Full:
                self.failure = sink_failed(self.name, f"has stopped: it is {self._rows.maxsize} rows behind")

    def end(self, until: float) -> None:
        """Wait for the last row until a time of the monotonic clock."""
        if self.failure is None:
            self._thread.join(max(0.0, until - time.monotonic()))
            if self._thread.is_alive():
                self.failure = sink_failed(
                    self.name, f"has not ended in time; {self._rows.qsize()} rows are lost there"
                )
                if isinstance(self._sink, SinkApart):
                    self._sink.kill()

    def _serve(self) -> None:
        try:
            while self.failure is None:
                row = self._rows.get()
                if isinstance(row, str):
                    self._sink.close(row)
                    return
                self._sink.log(*row)
        except BaseException as error:  # also SystemExit: what a library does must stay in this thread
            self.failure = sink_failed(self.name, "has stopped", error)


class Sinks:
    """The sinks of one run. All methods are for one thread, that of the driver."""

    def __init__(self, names: Iterable[str], info: RunInfo, waiting: int = WAITING) -> None:
        """Open them. RLF5062 for one that does not open: better now than a curve that is missing in the morning."""
        self._workers: list[_Worker] = []
        opened: dict[str, Sink] = {}
        name = ""
        try:
            for name in names:
                opened[name] = open_sink(name, info)
            # Those in processes of their own start at the same time. The name is for the message below.
            for name, sink in opened.items():  # noqa: B007
                if isinstance(sink, SinkApart):
                    sink.wait_open()
        except BaseException as error:
            for sink in opened.values():
                if isinstance(sink, SinkApart):
                    sink.kill()
            if isinstance(error, Exception | SystemExit):
                raise sink_failed(name, "does not start", error) from None
            raise
        self._workers = [_Worker(name, sink, waiting) for name, sink in opened.items()]

    def row(self, step: int, data: Mapping[str, float]) -> list[RunFailure]:
        """Hand on a row that is in metrics.jsonl; the failures that have come since, each told once."""
        for worker in self._workers:
            worker.put((step, data))
        return self._failures()

    def close(self, status: str, seconds: float = CLOSE_S) -> list[RunFailure]:
        """End all; waits at most so long. What failed is told as by `row`."""
        for worker in self._workers:
            worker.ask_to_end(status)
        until = time.monotonic() + seconds
        for worker in self._workers:
            worker.end(until)
        failures = self._failures()
        self._workers = []
        return failures

    def _failures(self) -> list[RunFailure]:
        failed = [worker for worker in self._workers if worker.failure is not None]
        self._workers = [worker for worker in self._workers if worker not in failed]
        return [worker.failure for worker in failed if worker.failure is not None]

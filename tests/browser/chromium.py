"""Chromium without a window, driven over its DevTools pipe: no driver, no port, no library.

Messages are JSON and end in a zero byte; the browser reads from descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0
"""Longest wait for an answer: the machine may be busy."""

_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Escape": 27, "Tab": 9}


def find_chromium() -> str | None:
    """The command, or None where there is none."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


class Chromium:
    """One browser with one page. Leaves nothing behind."""

    def __init__(self, width: int = 1400, height: int = 900) -> None:
        command = find_chromium()
        assert command is not None, "no Chromium on the path"
        self._profile = tempfile.TemporaryDirectory(prefix="rlflow-chromium-", ignore_cleanup_errors=True)
        to_browser, self._out = (_high(descriptor) for descriptor in os.pipe())
        self._in, from_browser = (_high(descriptor) for descriptor in os.pipe())
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        flags += [f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "--remote-debugging-pipe"]
        nowhere = os.open(os.devnull, os.O_RDWR)
        self._process = os.posix_spawn(
            command,
            [command, *flags, "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, nowhere, 1),
                (os.POSIX_SPAWN_DUP2, nowhere, 2),
                (os.POSIX_SPAWN_DUP2, to_browser, 3),
                (os.POSIX_SPAWN_DUP2, from_browser, 4),
            ],
        )
        os.close(nowhere)
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        """What the browser told without being asked."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.kill(self._process, signal.SIGTERM)
        until = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(self._process, signal.SIGKILL)
            time.sleep(0.02)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    # --- messages ----------------------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer of a DevTools method. AssertionError for an error, TimeoutError for none."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._read(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    # --- the page ----------------------------------------------------------------------------------------------------

    def open(self, path: Path) -> None:
        """Load a file and wait until the report's scripts have run."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && window.rlflowReport && window.rlflowReport.ready === true")

    def wait_for(self, condition: str) -> None:
        until = time.monotonic() + SECONDS
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < until, f"never true: {condition}; {self.problems()}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """A JSON value that the page computes; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def frame(self) -> None:
        """Wait until what was asked for is drawn."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.frame()

    def key(self, key: str, shift: bool = False) -> None:
        code = _KEYS.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        own: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **own)
        self.call("Input.dispatchKeyEvent", type="keyUp", **own)
        self.frame()

    def scheme(self, name: str) -> None:
        """`light` or `dark`, as the system would say."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])
        self.frame()

    def screenshot(self, path: Path, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    # --- what happened -----------------------------------------------------------------------------------------------

    def requests(self) -> list[str]:
        """Addresses that the page asked for, but for its own file."""
        self.value("1")  # reads what is under way
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("file:") or sent.index(url) != 0]

    def problems(self) -> list[str]:
        """Script errors and warnings of the browser, a policy that was broken included."""
        found = [str(e["params"]["exceptionDetails"]) for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        for event in self.events:
            if event["method"] == "Log.entryAdded":
                level, text = event["params"]["entry"]["level"], event["params"]["entry"]["text"]
                if level in ("error", "warning") and "willReadFrequently" not in text:  # the tests read pixels
                    found.append(f"{level}: {text}")
        return found


def _high(descriptor: int) -> int:
    """The same pipe under a number above 9: 3 and 4 are the browser's."""
    made = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return made

"""A real Chromium without a window, spoken to over a pipe in its own DevTools protocol.

Keys and clicks are those of a keyboard and a mouse: they go to whatever has the focus or lies at
the place.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["Browser", "Page", "chromium", "running_browser"]

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
SECONDS = 20.0
_KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "Space": (32, " "),
    "End": (35, ""),
    "Delete": (46, ""),
    "Home": (36, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
}
_MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


def chromium() -> str | None:
    """The path of a Chromium, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running browser; `page` opens a page that shares nothing with others."""

    def __init__(self, path: str, profile: Path) -> None:
        its_in, self._out = _pipe()
        self._in, its_out = _pipe()

        def place() -> None:
            os.dup2(its_in, 3)
            os.dup2(its_out, 4)

        self.process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            pass_fds=(3, 4),
        )
        os.close(its_in)
        os.close(its_out)
        self._next = 0
        self._lock = threading.Lock()
        self._replies: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Have a command done; return its result."""
        answer: queue.Queue[dict[str, Any]] = queue.Queue()
        with self._lock:
            self._next += 1
            number = self._next
            self._replies[number] = answer
            message: dict[str, Any] = {"id": number, "method": method, "params": params}
            if session is not None:
                message["sessionId"] = session
            data = json.dumps(message).encode() + b"\0"
            while data:
                data = data[os.write(self._out, data) :]
        try:
            given = answer.get(timeout=SECONDS)
        except queue.Empty:
            raise AssertionError(f"the browser does not answer {method}") from None
        assert "error" not in given, f"{method}: {given['error']}"
        result: dict[str, Any] = given["result"]
        return result

    def page(self, *, width: int = 1280, height: int = 900) -> Page:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        session = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]  # fmt: skip
        page = Page(self, session, context)
        self._pages[session] = page
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        page.resize(width, height)
        return page

    def close(self) -> None:
        with suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(SECONDS)
        os.close(self._out)

    def _read(self) -> None:
        rest = b""
        with open(self._in, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._replies.pop(message["id"]).put(message)
                    elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                        page.note(message["method"], message["params"])


class Page:
    """A page.

    Attributes:
        asked: URLs of all requests it made.
        problems: errors in its console, and what its scripts threw.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.asked: list[str] = []
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, session=self._session, **params)

    def note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.protocol !== 'about:'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        given = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in given, given["exceptionDetails"]
        return given["result"].get("value")

    def wait(self, condition: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"it does not come true: {condition}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def value(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).value"))

    def click(self, selector: str) -> None:
        """Click the middle of an element, which must be what lies there."""
        name = json.dumps(selector)
        x, y, hit = self.run(
            f"""(() => {{
              const element = document.querySelector({name});
              element.scrollIntoView({{ block: "center", behavior: "instant" }});
              const box = element.getBoundingClientRect();
              const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
              const there = document.elementFromPoint(x, y);
              return [x, y, element.contains(there) || there?.contains(element)];
            }})()"""
        )
        assert hit, f"{selector} is covered"
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )  # fmt: skip

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, keys: str) -> None:
        """Press a key, with others held: `Control+Enter`."""
        *held, key = keys.split("+")
        bits = sum(_MODIFIERS[name] for name in held)
        code, text = _KEYS.get(key, (ord(key.upper()[:1]), ""))
        named = {"key": " " if key == "Space" else key, "code": key}
        if len(key) == 1:
            named["code"] = f"Key{key.upper()}"
        more = {**named, "windowsVirtualKeyCode": code, "modifiers": bits}
        if text and not bits:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **more)
        else:
            commands = ["selectAll"] if keys == "Control+a" else []
            self.call("Input.dispatchKeyEvent", type="rawKeyDown", commands=commands, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def write(self, text: str) -> None:
        """Write into what has the focus, in place of what is in it."""
        self.press("Control+a")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.press("Delete")

    def fill(self, selector: str, text: str) -> None:
        self.click(selector)
        self.write(text)

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, **features: str) -> None:
        """Media features: `prefer(color_scheme="dark")`."""
        listed = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def tree(self) -> list[dict[str, Any]]:
        """What a screen reader is told, node by node."""
        nodes: list[dict[str, Any]] = self.call("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node.get("ignored")]

    def picture(self) -> bytes:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
        )
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)


@contextmanager
def running_browser(path: str) -> Iterator[Browser]:
    """A browser with a profile of its own, ended and forgotten at the end of the block."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(path, Path(profile))
        try:
            yield browser
        finally:
            browser.close()


def _pipe() -> tuple[int, int]:
    """A pipe's two ends, beyond the numbers that the browser wants for its own."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]

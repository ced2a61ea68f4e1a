"""A headless Chromium, driven over the DevTools protocol: just what the dashboard's tests need.

>>> with Chromium.start(tmp_path) as browser, browser.page() as page:
...     page.open("http://127.0.0.1:8000/")
...     page.click("button.primary")
...     page.wait("document.querySelector('h1')?.textContent === 'Runs'")
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60.0  # a loaded machine is slow, and not wrong
OPTIONS = (
    "--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
    "--force-color-profile=srgb",
)  # fmt: skip


def find_chromium() -> str | None:
    """The browser's program, or None; PALESTRA_CHROMIUM names another."""
    names = (os.environ.get("PALESTRA_CHROMIUM", ""), *NAMES)
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Chromium:
    """One browser process with a profile of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self._port = port

    @classmethod
    @contextlib.contextmanager
    def start(cls, profile: Path) -> Iterator[Chromium]:
        program = find_chromium()
        assert program is not None
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
        command = [program, *OPTIONS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield cls(process, _port(profile / "DevToolsActivePort", process))
        finally:
            process.terminate()
            process.wait(10)

    @contextlib.contextmanager
    def page(self) -> Iterator[Page]:
        from websockets.sync.client import connect

        with urlopen(Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")) as answer:
            target = json.load(answer)
        with connect(target["webSocketDebuggerUrl"], max_size=None, compression=None) as socket:
            yield Page(socket)
        with urlopen(f"http://127.0.0.1:{self._port}/json/close/{target['id']}"):
            pass


class Page:
    """One tab. `errors` gathers what went wrong in it: console errors, exceptions, requests that were refused."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._last_id = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")
        self.command("Emulation.setFocusEmulationEnabled", enabled=True)  # keys go to this tab, wherever the focus is
        self.size(1280, 860)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._last_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if values["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in values["args"]))
            case "Log.entryAdded" if values["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)

    def wait(self, script: str, timeout_s: float = TIMEOUT_S) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"!!({script})"):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText.slice(0, 1500)")
                raise AssertionError(f"not within {timeout_s} s: {script}\nerrors: {self.errors}\npage: {text}")
            time.sleep(0.03)

    def wait_for(self, selector: str, text: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """Until an element is there, with the text in it."""
        self.wait(_with_text(selector, text) + ".length > 0", timeout_s)

    def text(self, selector: str = "main") -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def click(self, selector: str, text: str = "") -> None:
        """A real mouse click in the middle of the first such element."""
        self.wait_for(selector, text)
        x, y = self._middle(selector, text)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str, text: str = "") -> None:
        x, y = self._middle(selector, text)
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _middle(self, selector: str, text: str) -> tuple[float, float]:
        box = self.evaluate(
            f"(() => {{ const e = {_with_text(selector, text)}[0]; e.scrollIntoView({{block: 'center'}});"
            "const b = e.getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return box[0], box[1]

    def type(self, selector: str, text: str) -> None:
        """Replace what a field holds."""
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select?.()")
        self.command("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """An option of a drop-down list, by its value."""
        self.wait_for(selector)
        self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
            "e.dispatchEvent(new Event('change', {bubbles: true})); e.dispatchEvent(new Event('input')); })()"
        )

    def press(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        common = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.command("Input.dispatchKeyEvent", type="keyUp", **common)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )

    def dark(self, on: bool) -> None:
        value = "dark" if on else "light"
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def screenshot(self, file: Path, quality: int = 80) -> None:
        """The window as WebP, which is a third of a PNG's size."""
        answer = self.command("Page.captureScreenshot", format="webp", quality=quality)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(answer["data"]))


def _with_text(selector: str, text: str) -> str:
    return (
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".filter((e) => e.textContent.includes({json.dumps(text)}) && e.getClientRects().length)"
    )


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(file.read_text().split()[0])
        time.sleep(0.05)
    raise RuntimeError(f"Chromium did not start (status {process.poll()})")

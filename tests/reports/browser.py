"""Headless Chromium for tests, by its debugging protocol over two pipes: no package and no port is needed."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
    "--disable-background-networking --disable-component-update --hide-scrollbars --mute-audio --remote-debugging-pipe"
)
# The browser reads from descriptor 3 and writes to 4.
EXEC = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
INTERNAL = ("data:", "blob:", "about:", "chrome:")


class Browser:
    """A browser with one page; a context manager that ends it."""

    def __init__(self, directory):
        own_end, self._write = os.pipe()
        self._read, other_end = os.pipe()
        flags = [*FLAGS.split(), f"--user-data-dir={directory}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", EXEC, str(own_end), str(other_end), CHROMIUM, *flags],
            pass_fds=(own_end, other_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(own_end)
        os.close(other_end)
        self._buffer, self._number, self._session = b"", 0, None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = None
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close", timeout=5)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, timeout=60, **parameters):
        """Call a method of the protocol; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + timeout
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _receive(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 2**20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, url, *, width=1280, height=900, scheme="light"):
        """Open a page of a size and color scheme, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")
        self.wait_until("document.readyState === 'complete'")

    def wait_for(self, method, seconds=60):
        """Wait for an event."""
        deadline = time.monotonic() + seconds
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive(deadline))

    def evaluate(self, expression):
        """Evaluate JavaScript; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_until(self, expression, seconds=30):
        """Wait until JavaScript is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"not true within {seconds} s: {expression}"
            time.sleep(0.05)

    def press(self, key, code=None, text=""):
        """Press a key, such as Tab, Enter or ArrowRight."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27, "Home": 36, "End": 35}
        text = {"Enter": "\r", " ": " "}.get(key, text)
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code or key, windowsVirtualKeyCode=codes.get(key, 0), **extra
            )

    def screenshot(self, path, *, whole=True):
        """Write a PNG of the page, or of what is in sight."""
        if whole:
            height = self.evaluate("document.documentElement.scrollHeight")
            width = self.evaluate("innerWidth")
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
            time.sleep(0.5)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def errors(self):
        """The errors and warnings of the console, and uncaught exceptions, since the page was opened."""
        self.evaluate("1")
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"].get("exception", parameters)))
            elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str(parameters["args"]))
            elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
        return found

    def requests(self):
        """The addresses that the page has requested, without data in the page itself."""
        self.evaluate("1")
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if not one["request"]["url"].startswith(INTERNAL)]

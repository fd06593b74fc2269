"""Debian's Chromium without a window, driven over a pipe by its DevTools protocol: no driver, no package.

Messages are JSON, each ended by a zero byte; the browser reads them from its file descriptor 3 and answers on 4
(`--remote-debugging-pipe`). A page's console, exceptions and requests come as events between the answers.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

MISSING = "no Chromium on PATH: apt-get install chromium"
OPTIONS = (  # no sandbox: as root, in a container
    "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --disable-dev-shm-usage "
    "--disable-background-networking --no-first-run"
)
PATIENCE = 60.0
"""Seconds for one answer: two cores are shared with other tests."""


def find_chromium():
    """Return the path of the browser, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """A browser in `with`. `open` loads a page; `errors` and `requests` collect what its pages did since then."""

    def __enter__(self):
        self._folder = tempfile.mkdtemp(prefix="jdp-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]  # neither is 3 or 4
        self._log = (Path(self._folder) / "stderr").open("w+b")
        shell = ("bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "chromium")
        self._process = subprocess.Popen(
            [*shell, find_chromium(), *OPTIONS.split(), f"--user-data-dir={self._folder}/profile", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=ends,
            start_new_session=True,
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._left, self._number, self._session = b"", 0, None
        self.errors, self.requests, self._loaded = [], [], False
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for end in (self._write, self._read):
            os.close(end)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, page, *, width=1280, height=900, dark=False):
        """Load a file in a window of that size, in light or dark, and wait until it is drawn."""
        self.errors, self.requests, self._loaded = [], [], False
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=Path(page).absolute().as_uri())
        until = time.monotonic() + PATIENCE
        while not self._loaded:
            self._event(self._message(until))
        self.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def evaluate(self, expression):
        """Return the value of a JavaScript expression; of a promise, what it is resolved to."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method, **params):
        """Send a command, and return its answer; events that come before it are noted."""
        self._number += 1
        sent = {"id": self._number, "method": method, "params": params}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._write, json.dumps(sent).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            message = self._message(until)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._event(message)

    def _attach(self):
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self, until):
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                self._log.seek(0)
                raise TimeoutError(f"Chromium does not answer: {self._log.read()[-2000:].decode(errors='replace')}")
            self._left += data
        text, _, self._left = self._left.partition(b"\0")
        return json.loads(text)

    def _event(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(f"console.{params['type']}: {params['args']}")
        elif method == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

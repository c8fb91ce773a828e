"""A headless Chromium, driven through its DevTools protocol over a pipe (no port, no package)."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LIMIT_S = 60


def find():
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page. `console` has what it logged, `problems` its exceptions and policy violations."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory(prefix="lockstep-browser-",
                                                   ignore_cleanup_errors=True)
        to_read, self.to = os.pipe()
        self.back, back_write = os.pipe()
        # It reads commands from descriptor 3 and answers on 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{back_write}', "bash", program,
             "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "--no-first-run",
             "--disable-background-networking", "--disable-component-update",
             "--hide-scrollbars", "about:blank"],
            pass_fds=(to_read, back_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(back_write)
        self.buffer = b""
        self.number = 0
        self.session = None
        self.console, self.problems = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")

    def receive(self, deadline):
        while b"\0" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.back], [], [], left)[0]:
                raise TimeoutError("the browser did not answer")
            piece = os.read(self.back, 1 << 20)
            if not piece:
                raise ConnectionError("the browser has ended")
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, method, params):
        if method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(a.get("value")) for a in params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif method == "Audits.issueAdded":
            self.problems.append(json.dumps(params["issue"]))

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self.receive(deadline)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def look(self, *, width=1280, height=900, scale=1, scheme="light", mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"}])

    def open(self, url):
        self.call("Page.navigate", url=url)

    def value(self, expression):
        """What it evaluates to in the page; the test's own code is not under the page's policy."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, expression, limit_s=LIMIT_S):
        deadline = time.monotonic() + limit_s
        while not self.value(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                text = self.value("document.body.innerText")
                raise TimeoutError(f"never true: {expression}\n{text}")
            time.sleep(0.05)

    def press(self, key, code=None):
        code = code or {"Tab": 9, "Enter": 13, "ArrowDown": 40}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code)

    def screenshot(self, path, whole=True):
        options = {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True,
                        "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"],
                                 "scale": 1}}
        data = self.call("Page.captureScreenshot", **options)["data"]
        with open(path, "wb") as f:
            f.write(base64.b64decode(data))

    def close(self):
        os.close(self.to)
        os.close(self.back)
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=20)
        self.profile.cleanup()

"""A Chromium without a window, driven over the WebDriver protocol with the standard library only."""
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

PATIENCE_S = 60


def require_chromium(what):
    """Exits if Chromium is not installed: with an error in continuous integration."""
    for tool in "chromium", "chromedriver":
        if shutil.which(tool) is None:
            print(f"SKIPPED: {tool} is not installed, {what}")
            sys.exit(1 if os.environ.get("CI") == "true" else 0)


def wait_until(what, holds, patience_s=PATIENCE_S):
    """Polls a condition that has no event until it holds; returns its value."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        value = holds()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"after {patience_s} s it does not hold that {what}")


class NodeGone(AssertionError):
    """A part of the page that was found is not in it any more: the page was replaced meanwhile."""


GONE = "stale element reference", "Could not find node", "No node with given id", "Node with given id"


def found_again(do):
    """Calls a function that finds a part of the page and uses it, again if the page reloads between."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return do()
        except NodeGone:
            if time.monotonic() > deadline:
                raise


class Browser:
    """One window. Leaving the context ends the browser and its driver."""

    def __enter__(self):
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )
        self.session = None
        try:
            for line in self.driver.stdout:
                if found := re.search(r"started successfully on port (\d+)", line):
                    self.address = f"http://127.0.0.1:{found[1]}"
                    break
            else:
                raise AssertionError("chromedriver did not start")
            flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage",
                     "--no-first-run", "--disable-background-networking", "--hide-scrollbars"]
            if os.geteuid() == 0:
                flags.append("--no-sandbox")
            options = {"args": flags}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options,
                      "goog:loggingPrefs": {"browser": "ALL"}}
            session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self.session = "/session/" + session["sessionId"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        try:
            if self.session:
                self.call("DELETE", self.session)
        finally:
            # The driver and its browsers are a process group of their own.
            os.killpg(self.driver.pid, signal.SIGTERM)
            self.driver.wait()

    def call(self, method, path, body=None):
        """Sends a command to the driver and returns its value."""
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            kind = NodeGone if any(name in text for name in GONE) else AssertionError
            raise kind(f"{method} {path}: {text}") from None

    def open(self, url):
        self.call("POST", self.session + "/url", {"url": url})

    def run(self, script, *arguments):
        """Runs the body of a JavaScript function in the page and returns its value."""
        body = {"script": script, "args": arguments}
        return self.call("POST", self.session + "/execute/sync", body)

    def devtools(self, command, **parameters):
        """Runs a command of the DevTools protocol."""
        body = {"cmd": command, "params": parameters}
        return self.call("POST", self.session + "/goog/cdp/execute", body)

    def element(self, selector):
        query = {"using": "css selector", "value": selector}
        return next(iter(self.call("POST", self.session + "/element", query).values()))

    def at_element(self, method, selector, command, body=None):
        """Sends a command about the first element that matches a selector."""
        return found_again(lambda: self.call(
            method, f"{self.session}/element/{self.element(selector)}/{command}", body))

    def click(self, selector):
        self.at_element("POST", selector, "click")

    def type(self, selector, text):
        self.at_element("POST", selector, "value", {"text": text})

    def url(self):
        return self.call("GET", self.session + "/url")

    def source(self):
        return self.call("GET", self.session + "/source")

    def text(self, selector):
        """Returns the text of an element without JavaScript in the page."""
        return self.at_element("GET", selector, "text")

    def console(self):
        """Returns the messages of the console since the last call."""
        entries = self.call("POST", self.session + "/se/log", {"type": "browser"})
        return [f'{entry["level"]}: {entry["message"]}' for entry in entries]

    def set_size(self, width, height, is_phone=False):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height,
                      deviceScaleFactor=2 if is_phone else 1, mobile=is_phone)

    def set_dark(self, is_dark):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def set_scripts(self, are_allowed):
        self.devtools("Emulation.setScriptExecutionDisabled", value=not are_allowed)

    def screenshot(self, path):
        image = self.call("GET", self.session + "/screenshot")
        with open(path, "wb") as file:
            file.write(base64.b64decode(image))

"""A Chromium without a window, with the words of these tests, over selenium (Debian's python3-selenium)."""

import os
import shutil
import sys
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../harness"))
from beanstalk import PATIENCE_S

try:
    from selenium import webdriver
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.chrome.service import Service
except ImportError:
    webdriver = None
missing = [tool for tool in ("chromium", "chromedriver") if shutil.which(tool) is None]
if webdriver is None or missing:
    print(f"SKIPPED: {' and '.join(missing) or 'selenium'} is not installed, the status page is not shown")
    sys.exit(1 if os.environ.get("CI") == "true" else 0)

FLAGS = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--hide-scrollbars"]


class Browser(webdriver.Chrome):
    """One window. Leaving the context ends the browser and its driver."""

    def __init__(self):
        options = webdriver.ChromeOptions()
        for flag in FLAGS + ["--no-sandbox"] * (os.geteuid() == 0):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        super().__init__(service=Service(shutil.which("chromedriver")), options=options)

    def with_element(self, selector, use):
        """Uses the first element that matches, and finds it again if the page is replaced meanwhile."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return use(self.find_element("css selector", selector))
            except (NoSuchElementException, StaleElementReferenceException):
                if time.monotonic() > end:
                    raise

    def click(self, selector):
        self.with_element(selector, lambda element: element.click())

    def type(self, selector, text):
        self.with_element(selector, lambda element: element.send_keys(text))

    def text(self, selector):
        return self.with_element(selector, lambda element: element.text)

    def run(self, script, *arguments):
        """Runs the body of a JavaScript function in the page and returns its value."""
        return self.execute_script(script, *arguments)

    def console(self):
        """Returns the messages of the console since the last call."""
        return [f'{entry["level"]}: {entry["message"]}' for entry in self.get_log("browser")]

    def set_size(self, width, height, is_phone=False):
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone})

    def set_dark(self, is_dark):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def set_scripts(self, are_allowed):
        """Lets scripts of the page run, or not. Those of a test run in any case."""
        self.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not are_allowed})

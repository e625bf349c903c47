"""Makes the pictures of the status page for README.md, with ten minutes of generated load.

Use: status.py SERVER DIRECTORY [SECONDS]"""
import sys
import time

from load import Load  # also finds the modules of the tests
from browser import Browser
from server import Server


def main():
    program, directory = sys.argv[1:3]
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 620
    with Server(program) as server, Browser() as browser:
        # The load continues while the pictures are made.
        Load(server, seconds + 20)
        time.sleep(max(0, seconds - 15))
        with server.connect() as client:
            client.must("PAUSED", "pause-tube reports 300")
        time.sleep(10)
        page = f"http://{server.metrics}/"
        browser.set_size(1000, 640)
        browser.get(page)
        browser.save_screenshot(f"{directory}/status.png")
        browser.set_dark(True)
        browser.save_screenshot(f"{directory}/status-dark.png")
        browser.set_size(390, 800, is_phone=True)
        browser.get(page)
        browser.save_screenshot(f"{directory}/status-phone.png")


main()

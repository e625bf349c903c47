"""Makes the pictures of the status page for README.md, with ten minutes of generated load: the workers
of `thumbnails` are absent for three minutes, `reports` is paused, and `billing` buries jobs.

Use: screenshots.py SERVER DIRECTORY [SECONDS]"""
import random
import sys
import threading
import time

from server import Server
from webdriver import Browser, require_chromium

# Jobs per second, workers, and seconds of work for a job.
TUBES = {"mail": (60, 4, 0.03), "thumbnails": (40, 5, 0.05), "reports": (3, 2, 0.2),
         "billing": (12, 2, 0.05), "search/index": (25, 3, 0.04)}


def produce(server, tube, rate, end, chance):
    client = server.client()
    while time.monotonic() < end:
        burst = 1 + 0.5 * chance.random()
        client.put(tube, max(1, int(rate * burst / 5)), pri=chance.choice([100, 2000]), ttr=60)
        if tube == "mail":
            client.put(tube, 1, delay=30)
        time.sleep(0.2)


def work(server, tube, seconds, start, end, chance):
    client = server.client()
    client.ask(f"watch {tube}")
    client.ask("ignore default")
    length = end - start
    while (now := time.monotonic()) < end:
        if tube == "thumbnails" and 0.35 < (now - start) / length < 0.65:
            time.sleep(0.2)
            continue
        reply = client.ask("reserve-with-timeout 1")
        if reply[0] != "RESERVED":
            continue
        time.sleep(seconds * (0.5 + chance.random()))
        fails = tube == "billing" and chance.random() < 0.004
        client.ask(f"bury {reply[1]} 100" if fails else f"delete {reply[1]}")


def main():
    require_chromium("there are no pictures")
    program, directory = sys.argv[1:3]
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 620
    chance = random.Random(15)
    with Server(program) as server, Browser() as browser:
        start = time.monotonic()
        # The load continues while the pictures are made.
        end = start + seconds + 20
        threads = []
        for tube, (rate, workers, job_seconds) in TUBES.items():
            threads.append(threading.Thread(target=produce, args=(server, tube, rate, end, chance)))
            for _ in range(workers):
                arguments = server, tube, job_seconds, start, end, chance
                threads.append(threading.Thread(target=work, args=arguments))
        for thread in threads:
            thread.start()
        time.sleep(max(0, seconds - 15))
        server.client().ask("pause-tube reports 300")
        time.sleep(10)
        browser.set_size(1000, 640)
        browser.open(server.page)
        browser.screenshot(f"{directory}/status.png")
        browser.set_dark(True)
        browser.screenshot(f"{directory}/status-dark.png")
        browser.set_size(390, 800, is_phone=True)
        browser.open(server.page)
        browser.screenshot(f"{directory}/status-phone.png")
        for thread in threads:
            thread.join()


main()

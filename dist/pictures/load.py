"""A generated load for pictures: the life of a work queue in five minutes, or slower.

Workers of `thumbnails` are away and get help later, `reports` is paused, `billing` has jobs that it must bury, a
worker lets the time of its jobs run out, and the server drains for a while."""

import contextlib
import os
import random
import signal
import sys
import threading
import time

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests")
sys.path += [os.path.join(TESTS, folder) for folder in ("harness", "packages", "browser")]
from beanstalk import Closed

LENGTH_S = 300
# Jobs per second, workers, and the seconds that a job takes one of them.
TUBES = {"mail": (120, 4, 0.01), "thumbnails": (60, 3, 0.02), "reports": (8, 2, 0.1),
         "billing": (25, 2, 0.02), "search/index": (30, 3, 0.03)}
HELPERS = 12
# Seconds since the start. While the server drains, it refuses puts.
AWAY, HELP, BURYING = range(50, 110), range(110, 180), range(150, 170)
PAUSE_AT, PAUSE_S = 130, 50
DRAIN_AT, RESUME_AT = 220, 260


class Load:
    """The clients of a server, each with a thread, and what happens to it."""

    def __init__(self, server, seconds=LENGTH_S):
        self.server = server
        self.scale = seconds / LENGTH_S
        self.start = time.monotonic()
        threads = [(self.happen,), (self.fall_silent,)]
        for tube, (rate, workers, _) in TUBES.items():
            threads.append((self.produce, tube, rate))
            threads += [(self.work, tube, False)] * workers
        threads += [(self.work, "thumbnails", True)] * HELPERS
        for thread in threads:
            threading.Thread(target=self.run, args=thread, daemon=True).start()

    def run(self, do, *arguments):
        """Ends with the server, which ends before the clients."""
        with contextlib.suppress(Closed):
            do(*arguments)

    def second(self):
        """Of the load, as if it took five minutes."""
        return (time.monotonic() - self.start) / self.scale

    def wait_until(self, second):
        time.sleep(max(0, (second - self.second()) * self.scale))

    def happen(self):
        self.wait_until(PAUSE_AT)
        with self.server.connect() as client:
            client.ask(f"pause-tube reports {int(PAUSE_S * self.scale)}")
        self.wait_until(DRAIN_AT)
        self.server.process.send_signal(signal.SIGUSR1)
        self.wait_until(RESUME_AT)
        self.server.process.send_signal(signal.SIGUSR2)

    def produce(self, tube, rate):
        """Puts jobs with bodies of 1 kB at a given rate. What was refused is not made up for."""
        client, body = self.server.connect(), b"x" * 1024
        client.ask(f"use {tube}")
        pause_s = 0.1
        while self.second() < LENGTH_S:
            for number in range(int(rate * pause_s + random.random())):
                delay = 30 if tube == "mail" and random.random() < 0.01 else 0
                client.ask(f"put {random.choice([100, 2000])} {delay} 5 {len(body)}", body)
            time.sleep(pause_s)

    def worker(self, tube):
        client = self.server.connect()
        client.ask(f"watch {tube}")
        client.ask("ignore default")
        return client

    def work(self, tube, is_helper):
        """Reserves jobs and deletes them, except while it is away, or cannot do them."""
        client = self.worker(tube)
        while (second := int(self.second())) < LENGTH_S:
            is_away = second not in HELP if is_helper else tube == "thumbnails" and second in AWAY
            words = [] if is_away else client.ask("reserve-with-timeout 1")
            if words[:1] != ["RESERVED"]:
                time.sleep(0.1)
                continue
            time.sleep(TUBES[tube][2])
            is_bad = tube == "billing" and second in BURYING and random.random() < 0.1
            client.ask(f"bury {words[1]} 0" if is_bad else f"delete {words[1]}")

    def fall_silent(self):
        """Reserves a job now and then, and lets its time run out."""
        client = self.worker("reports")
        while self.second() < LENGTH_S:
            client.ask("reserve-with-timeout 1")
            time.sleep(4)
            client.ask("reserve-with-timeout 0")

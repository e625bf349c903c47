"""A producer and workers with greenstalk that connect again after a failover.

Use: greenstalk_workers.py HOST PORT. They know nothing of etcd. A put without a reply is repeated, so
that a job can be there twice; none may be missing.
"""
import contextlib
import sys
import threading
import time

import greenstalk

JOBS = 2000
WORKERS = 4
PATIENCE_S = 120


class Work:
    """Which of the jobs have been put and done."""

    def __init__(self, address):
        self.address = address
        self.done = set()
        self.failures = []
        self.give_up_at = time.monotonic() + PATIENCE_S

    def connect(self, **tubes):
        """Returns a client, as soon as a server answers."""
        while True:
            try:
                client = greenstalk.Client(self.address, **tubes)
                client.stats()
                return client
            except (OSError, greenstalk.Error):
                if time.monotonic() > self.give_up_at:
                    raise
                time.sleep(0.05)

    def produce(self):
        client = self.connect(use="mail")
        for number in range(JOBS):
            while True:
                try:
                    client.put(str(number))
                    break
                except (OSError, EOFError, ConnectionError):
                    client = self.connect(use="mail")
            time.sleep(0.002)

    def work(self):
        client = self.connect(watch="mail")
        while len(self.done) < JOBS:
            if time.monotonic() > self.give_up_at:
                raise AssertionError(f"only {len(self.done)} of {JOBS} jobs are done")
            try:
                job = client.reserve(timeout=1)
                # The work comes first: a delete without a reply may have happened.
                self.done.add(int(job.body))
                print(f"done {job.body}", flush=True)
                client.delete(job)
            except (greenstalk.TimedOutError, greenstalk.NotFoundError):
                continue
            except (OSError, EOFError, ConnectionError):
                client = self.connect(watch="mail")
        with contextlib.suppress(OSError):
            client.close()

    def run(self, function):
        try:
            function()
        except BaseException as failure:
            self.failures.append(failure)


def main():
    work = Work((sys.argv[1], int(sys.argv[2])))
    functions = [work.produce] + [work.work] * WORKERS
    threads = [threading.Thread(target=work.run, args=[function], daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if work.failures:
        sys.exit(f"{work.failures[0]!r}")
    print(f"all {JOBS} jobs are done")


main()

"""Measures the time of a failover, as dist/README.md has it, without proxies.

Use: measure.py SERVER
"""
import os
import signal
import statistics
import sys
import time

from workspace import wait_until
from cluster import Cluster, answers

TRIES = 20
JOBS = 100_000


def failover_s(cluster, number):
    """Returns the time from a signal to the active server to the first reply of the next one."""
    active = cluster.wait_for_active()
    standby, = [server for server in cluster.servers if server is not active]
    standby.wait_until_standby()
    began = time.monotonic()
    active.process.signal(number)
    wait_until("the next server replies", lambda: answers(standby.address), pause_s=0.001)
    took_s = time.monotonic() - began
    active.process.wait()
    active.start()
    return took_s


with Cluster(os.path.abspath(sys.argv[1]), lease_ttl_s=5, has_proxies=False) as cluster:
    active, _ = cluster.start(2)
    with active.connect() as client:
        for _ in range(JOBS // 1000):
            client.send(*[("put 1024 0 60 64", b"x" * 64)] * 1000)
            for _ in range(1000):
                client.reply()
    for number in signal.SIGTERM, signal.SIGKILL:
        times = [failover_s(cluster, number) for _ in range(TRIES)]
        p95 = statistics.quantiles(times, n=20, method="inclusive")[-1]
        print(f"{number.name} to the first reply of the next server, {JOBS:,} jobs: p50"
              f" {statistics.median(times):.3f} s, p95 {p95:.3f} s", flush=True)

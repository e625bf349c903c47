"""Measures a queue in etcd: time of a failover, and commands per second, as dist/README.md has them.

Use: measure.py SERVER [--tries N] [--jobs N] [--seconds N] [--lease-ttl N]

etcd, servers and this program share one machine, and no proxy is between them. The generator of load is
one process in Python, which has a limit of its own.
"""
import argparse
import contextlib
import os
import signal
import statistics
import time

from workspace import wait_until
from beanstalk import encode
from cluster import Cluster, answers

PUT = encode(("put 1024 0 60 64", b"x" * 64))
RESERVE = encode("reserve-with-timeout 0")
CONNECTIONS = 50
# The commands that each connection sends before it reads replies.
DEPTHS = {"one by one": 1, "pipelined": 100}


def ask_all(connections, commands):
    """Sends to each connection its commands, all at once, then reads all replies; returns their words."""
    for connection, each in zip(connections, commands):
        connection.send_bytes(b"".join(each))
    return [[connection.reply()[0] for _ in each] for connection, each in zip(connections, commands)]


def commands_per_second(server, depth, seconds):
    """Puts jobs, reserves and deletes them on many connections at a time."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(CONNECTIONS)]
        count, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            ask_all(connections, [[PUT] * depth] * CONNECTIONS)
            reserved = ask_all(connections, [[RESERVE] * depth] * CONNECTIONS)
            deletes = [[encode(f"delete {words[1]}") for words in replies if words[0] == "RESERVED"]
                       for replies in reserved]
            ask_all(connections, deletes)
            count += 2 * depth * CONNECTIONS + sum(map(len, deletes))
        return count / (time.monotonic() - began)


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--lease-ttl", type=int, default=5)
    options = parser.parse_args()
    with Cluster(os.path.abspath(options.program), lease_ttl_s=options.lease_ttl, has_proxies=False) as cluster:
        active, _ = cluster.start(2)
        for name, depth in DEPTHS.items():
            rate = commands_per_second(active, depth, options.seconds)
            print(f"{CONNECTIONS} connections, {name}: {rate:,.0f} commands/s", flush=True)
        with active.connect() as client:
            for _ in range(options.jobs // 1000):
                ask_all([client], [[PUT] * 1000])
        for number in signal.SIGTERM, signal.SIGKILL:
            times = [failover_s(cluster, number) for _ in range(options.tries)]
            p95 = statistics.quantiles(times, n=20, method="inclusive")[-1]
            print(f"{number.name} to the first reply of the next server, {options.jobs:,} jobs: p50"
                  f" {statistics.median(times):.3f} s, p95 {p95:.3f} s", flush=True)


if __name__ == "__main__":
    main()

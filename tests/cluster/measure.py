"""Measures a queue in etcd: time of a failover, and commands per second.

Use: measure.py SERVER [--tries N] [--jobs N] [--seconds N] [--lease-ttl N] [failover] [throughput]

etcd, servers and this program share one machine, and no proxy is between them. The generator of load is
one process in Python; its own limit is printed too, measured with a server without a binlog.
"""
import argparse
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import time

from client import Closed, Connection
from etcd import Etcd, encode
from servers import Server, etcd_url
from workspace import PATIENCE_S, Workspace, wait_until

PREFIX = "/jobs"
BODY = b"x" * 64
CONNECTIONS = 50
# Commands that a pipelined connection sends before it reads replies.
DEPTH = 100


def percentile(values, percent):
    """Returns the smallest value that is not below `percent` of all values."""
    values = sorted(values)
    return values[max(0, -(-len(values) * percent // 100) - 1)]


def fill(server, jobs):
    """Puts jobs, pipelined."""
    with server.connect() as client:
        for first in range(0, jobs, 1000):
            count = min(1000, jobs - first)
            client.send(*[("put 1024 0 60 %d" % len(BODY), BODY)] * count)
            for _ in range(count):
                words, _ = client.reply()
                assert words[0] == "INSERTED", words


def first_reply(server):
    """Connects to a server until it replies; returns the time of the reply."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        try:
            with Connection((server.address, server.port), patience=PATIENCE_S) as client:
                client.send("peek 1")
                client.reply()
                return time.monotonic()
        except Closed:
            time.sleep(0.001)
    raise AssertionError("no server replies")


def measure_failover(servers, number, tries):
    """Returns the seconds from a signal to the active server to the first reply of the next one."""
    times = []
    for _ in range(tries):
        active = next(server for server in servers if server.is_active())
        standby = next(server for server in servers if server is not active)
        standby.wait_until_standby()
        began = time.monotonic()
        active.process.signal(number)
        times.append(first_reply(standby) - began)
        active.process.wait()
        standby.wait_until_active()
        active.start().wait_until_standby()
    return times


def print_times(name, times, limit):
    print(f"{name}: p50 {percentile(times, 50):.3f} s, p95 {percentile(times, 95):.3f} s, longest"
          f" {max(times):.3f} s, of {len(times)} tries; p95 at most {limit:.1f} s:"
          f" {'yes' if percentile(times, 95) <= limit else 'NO'}", flush=True)


class Generator:
    """Sends commands on many connections, and counts the replies. One process, without threads."""

    def __init__(self, server):
        self.sockets = {}
        for _ in range(CONNECTIONS):
            connection = socket.create_connection((server.address, server.port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets[connection.fileno()] = connection

    def close(self):
        for connection in self.sockets.values():
            connection.close()

    def run(self, script, seconds):
        """Runs `script`, a generator function, on each connection; returns replies per second.

        The script yields bytes and the number of their replies, and is sent these.
        """
        count = 0
        conversations = {}
        began = time.monotonic()
        end = began + seconds
        with select.epoll() as poll:
            for descriptor, connection in self.sockets.items():
                conversations[descriptor] = conversation = Conversation(script())
                connection.sendall(conversation.next(None))
                poll.register(descriptor, select.EPOLLIN)
            while conversations:
                for descriptor, _ in poll.poll(PATIENCE_S):
                    conversation = conversations[descriptor]
                    replies = conversation.receive(os.read(descriptor, 1 << 18))
                    if replies is None:
                        continue
                    count += len(replies)
                    if time.monotonic() < end:
                        self.sockets[descriptor].sendall(conversation.next(replies))
                    else:
                        poll.unregister(descriptor)
                        del conversations[descriptor]
        return count / (time.monotonic() - began)


class Conversation:
    """One connection: what it has sent, and the replies that are missing."""

    def __init__(self, script):
        self.script = script
        self.buffer = b""
        self.expected = 0

    def next(self, replies):
        data, self.expected = self.script.send(replies)
        return data

    def receive(self, data):
        """Returns the lines of the replies when all of them have arrived, or `None`."""
        if not data:
            raise AssertionError("the server closed the connection")
        self.buffer += data
        if not self.buffer.endswith(b"\r\n"):
            return None
        # Each body is one line.
        lines = self.buffer.split(b"\r\n")
        lines.pop()
        bodies = lines.count(BODY)
        if len(lines) - bodies < self.expected:
            return None
        if bodies:
            lines = [line for line in lines if line != BODY]
            if bodies < sum(line.startswith(b"RESERVED") for line in lines):
                return None
        elif lines[-1].startswith(b"RESERVED"):
            return None
        self.buffer = b""
        return lines


PUT = b"put 1024 0 60 %d\r\n%s\r\n" % (len(BODY), BODY)


def one_by_one():
    """Puts a job, reserves one and deletes it; one command at a time."""
    while True:
        yield PUT, 1
        reserved, = yield b"reserve-with-timeout 0\r\n", 1
        if reserved.startswith(b"RESERVED"):
            yield b"delete %s\r\n" % reserved.split(b" ")[1], 1


def pipelined():
    """The same with many commands at a time."""
    while True:
        yield PUT * DEPTH, DEPTH
        reserved = yield b"reserve-with-timeout 0\r\n" * DEPTH, DEPTH
        ids = [reply.split(b" ")[1] for reply in reserved if reply.startswith(b"RESERVED")]
        if ids:
            yield b"".join(b"delete %s\r\n" % job for job in ids), len(ids)


def measure_load(server, seconds):
    rates = {}
    for name, script in ("one by one", one_by_one), ("pipelined", pipelined):
        with contextlib.closing(Generator(server)) as generator:
            rates[name] = generator.run(script, seconds)
    return rates


def transactions(server):
    """Returns the number of transactions, their seconds and their bytes so far."""
    names = ("beanstalkd_etcd_transaction_seconds_count", "beanstalkd_etcd_transaction_seconds_sum",
             "beanstalkd_etcd_written_bytes_total")
    return [server.metric(name) for name in names]


def raw_transactions(etcd, size, seconds):
    """Returns the number per second of single transactions of this size, one at a time."""
    node = etcd.leader()
    connection = http.client.HTTPConnection(node.address, node.client_port)
    value = encode(os.urandom(size))
    compare = [{"key": encode("/raw/leader"), "target": "CREATE", "create_revision": 0}]
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        put = {"request_put": {"key": encode("/raw/%d" % (count % 100)), "value": value}}
        connection.request("POST", "/v3/kv/txn", json.dumps({"compare": compare, "success": [put]}))
        response = connection.getresponse()
        reply = json.loads(response.read())
        assert reply.get("succeeded"), reply
        count += 1
    connection.close()
    return count / seconds


def measure_throughput(program, workspace, etcd, active, seconds):
    plain = Server(workspace, program, "plain", None)
    plain.process = workspace.start("plain", [program, "-l", plain.address, "-p", str(plain.port)])
    wait_until("the plain server answers", plain.answers)
    for name, rate in measure_load(plain, seconds).items():
        print(f"limit of the generator, {name}: {rate:,.0f} commands/s (no binlog)", flush=True)
    plain.kill()
    for name, script in ("one by one", one_by_one), ("pipelined", pipelined):
        before = transactions(active)
        with contextlib.closing(Generator(active)) as generator:
            rate = generator.run(script, seconds)
        count, spent, size = [now - then for now, then in zip(transactions(active), before)]
        mean = size / count
        print(f"{CONNECTIONS} connections, {name}: {rate:,.0f} commands/s, in {count / seconds:,.0f}"
              f" transactions/s of {mean:,.0f} bytes and {1000 * spent / count:.1f} ms", flush=True)
        raw = raw_transactions(etcd, int(mean), seconds)
        print(f"  raw transactions of this size, one at a time, JSON gateway: {raw:,.0f}/s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("parts", nargs="*", default=["failover", "throughput"])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--lease-ttl", type=int, default=5)
    options = parser.parse_args()
    program = os.path.abspath(options.program)
    with Workspace() as workspace:
        etcd = Etcd(workspace).start()
        servers = [Server(workspace, program, f"server{number}", etcd_url(etcd.endpoints(), PREFIX),
                          ["--lease-ttl", str(options.lease_ttl)]).start() for number in (1, 2)]
        active = wait_until("a server is active", lambda: next(
            (server for server in servers if server.is_active()), None))
        if "throughput" in options.parts:
            measure_throughput(program, workspace, etcd, active, options.seconds)
        if "failover" in options.parts:
            fill(active, options.jobs)
            name = f"to the first reply of the next server, {options.jobs:,} jobs"
            times = measure_failover(servers, signal.SIGTERM, options.tries)
            print_times(f"SIGTERM {name}", times, 0.3)
            times = measure_failover(servers, signal.SIGKILL, options.tries)
            print_times(f"kill -9 {name}, lease {options.lease_ttl} s", times, options.lease_ttl + 1)


if __name__ == "__main__":
    main()

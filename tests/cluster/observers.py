"""Observers: one direct connection to each server, which sends a command every few milliseconds.

An observer does not wait for replies. A server that is stopped for a while finds commands that were
sent in the meantime, and betrays itself when it answers them after another server has answered.
"""
import collections
import contextlib
import select
import time

from workspace import PATIENCE_S, Worker
from beanstalk import Closed, Connection

INTERVAL_S = 0.025
# A connection with more commands than this without a reply gets no further ones.
MOST_PENDING = 2000
REPLY = b"USING default\r\n"


class Observer(Worker):
    def __init__(self, history, address, failures):
        super().__init__(failures)
        self.history = history
        self.address = address

    def work(self):
        self.is_over.wait(INTERVAL_S)
        # A standby refuses connections, and a server that ends closes them.
        with contextlib.suppress(Closed, OSError), Connection(self.address, PATIENCE_S) as connection:
            self.observe(connection)

    def observe(self, connection):
        sent = time.monotonic()
        # The pid of the server.
        caller = self.history.caller(int(connection.facts("stats")["pid"]))
        self.history.answered(caller, sent, time.monotonic())
        # When the commands without a reply were sent.
        pending = collections.deque()
        received = b""
        while not self.is_over.is_set():
            if len(pending) < MOST_PENDING:
                pending.append(time.monotonic())
                connection.send("list-tube-used")
            end = time.monotonic() + INTERVAL_S
            while select.select([connection.socket], [], [], max(0, end - time.monotonic()))[0]:
                data = connection.socket.recv(1 << 16)
                if not data:
                    return
                received += data
                while received.startswith(REPLY):
                    received = received[len(REPLY):]
                    self.history.answered(caller, pending.popleft(), time.monotonic())
                assert REPLY.startswith(received), f"list-tube-used: {received}"

"""Observers: one direct connection to each server, which sends a command every few milliseconds.

An observer does not wait for replies. A server that is stopped for a while finds commands that were
sent in the meantime, and betrays itself when it answers them after another server has answered.
"""
import collections
import selectors
import socket
import threading
import time

from client import parse_facts

INTERVAL_S = 0.025
# A connection with more commands than this without a reply gets no further ones.
MOST_PENDING = 2000


class Observer:
    """The connection to one server."""

    def __init__(self, history, address):
        self.history = history
        self.address = address
        self.socket = None
        self.caller = None
        self.has_asked = False
        self.pending = collections.deque()
        self.received = bytearray()

    def connect(self):
        """Begins to connect; a standby refuses."""
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(self.address)
        self.caller = None
        self.has_asked = False
        self.pending.clear()
        self.received.clear()

    def close(self):
        if self.caller is not None:
            self.caller.ended = time.monotonic()
        self.socket.close()
        self.socket = None

    def send(self):
        """Sends the next command. The first one asks for the pid of the server."""
        if len(self.pending) >= MOST_PENDING:
            return
        sent = time.monotonic()
        try:
            self.socket.send(b"list-tube-used\r\n" if self.has_asked else b"stats\r\n")
        except BlockingIOError:
            # Not connected yet.
            return
        except OSError:
            self.close()
            return
        self.has_asked = True
        self.pending.append(sent)

    def receive(self):
        data = self.socket.recv(1 << 16)
        replied = time.monotonic()
        self.received += data
        while self.take_reply(replied):
            pass
        return bool(data)

    def take_reply(self, replied):
        """Takes one reply from the received bytes; returns whether there was one."""
        line, end, rest = self.received.partition(b"\r\n")
        if not end:
            return False
        if line.startswith(b"OK "):
            length = int(line[3:])
            if len(rest) < length + 2:
                return False
            self.caller = self.history.caller(int(parse_facts(rest[:length])["pid"]))
            rest = rest[length + 2:]
        else:
            assert line == b"USING default", f"list-tube-used: {bytes(line)}"
        self.received = rest
        self.history.answered(self.caller, self.pending.popleft(), replied)
        return True


class Observers(threading.Thread):
    """Runs all observers."""

    def __init__(self, history, servers, fail):
        super().__init__(name="observers", daemon=True)
        self.observers = [Observer(history, (server.address, server.port)) for server in servers]
        self.fail = fail
        self.is_over = threading.Event()

    def run(self):
        try:
            while not self.is_over.is_set():
                self.observe()
        except Exception as failure:
            self.fail(failure)
        finally:
            for observer in self.observers:
                if observer.socket is not None:
                    observer.close()

    def stop(self):
        self.is_over.set()
        self.join()

    def observe(self):
        with selectors.DefaultSelector() as selector:
            for observer in self.observers:
                if observer.socket is None:
                    observer.connect()
                selector.register(observer.socket, selectors.EVENT_READ, observer)
            end = time.monotonic() + INTERVAL_S
            while (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    try:
                        is_open = key.data.receive()
                    except OSError:
                        is_open = False
                    if not is_open:
                        selector.unregister(key.fileobj)
                        key.data.close()
        for observer in self.observers:
            if observer.socket is not None:
                observer.send()

"""Tests what no fault would show of the proxies: bytes that were held back arrive or are dropped, and delays. What
they cut or stall must end a server in faults.py."""
import socket
import time
import unittest

from proxies import BACK, TO, Proxies
from workspace import PATIENCE_S, Workspace

LINK = ["link"]
# What nothing may arrive in.
MOMENT_S = 0.2


class ProxiesTest(unittest.TestCase):
    def setUp(self):
        workspace = self.enterContext(Workspace())
        self.listener = self.enterContext(socket.create_server((workspace.address(), 0)))
        self.proxies = self.enterContext(Proxies(workspace))
        self.address = self.proxies.add("link", self.listener.getsockname())

    def connect(self):
        client = self.enterContext(socket.create_connection(self.address, timeout=PATIENCE_S))
        server = self.enterContext(self.listener.accept()[0])
        server.settimeout(PATIENCE_S)
        # The kernel accepts a connection before the proxy knows that it has it.
        self.passes(client, server)
        return client, server

    def passes(self, sender, receiver):
        sender.sendall(b"passed")
        self.assertEqual(receiver.recv(100), b"passed")

    def expect_silence(self, receiver):
        receiver.settimeout(MOMENT_S)
        self.assertRaises(TimeoutError, receiver.recv, 100)
        receiver.settimeout(PATIENCE_S)

    def test_one_direction_is_stalled_and_heals(self):
        for direction in TO, BACK:
            sender, receiver = self.connect()[::1 if direction == TO else -1]
            self.proxies.stall(LINK, [direction])
            self.passes(receiver, sender)
            sender.sendall(b"late")
            sender.close()
            self.expect_silence(receiver)
            self.proxies.heal(LINK)
            self.assertEqual([receiver.recv(100), receiver.recv(100)], [b"late", b""])

    def test_a_reset_drops_what_was_held_back(self):
        client, server = self.connect()
        self.proxies.stall(LINK, [TO])
        client.sendall(b"never delivered")
        self.expect_silence(server)
        self.proxies.reset(LINK)
        self.proxies.heal(LINK)
        self.assertRaises(ConnectionResetError, server.recv, 100)

    def test_a_delay_is_at_least_that_long(self):
        client, server = self.connect()
        self.proxies.delay(LINK, 0.5, [BACK])
        self.passes(client, server)
        sent = time.monotonic()
        self.passes(server, client)
        self.assertGreaterEqual(time.monotonic() - sent, 0.5)


if __name__ == "__main__":
    unittest.main()

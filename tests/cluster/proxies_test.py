"""Tests the proxies: a link that delays, stalls or breaks connections, in each direction."""
import contextlib
import socket
import threading
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
        self.listener.settimeout(PATIENCE_S)
        self.proxies = self.enterContext(Proxies(workspace))
        self.address = self.proxies.add("link", self.listener.getsockname())

    def client(self):
        return self.enterContext(socket.create_connection(self.address, timeout=PATIENCE_S))

    def accept(self):
        server = self.enterContext(self.listener.accept()[0])
        server.settimeout(PATIENCE_S)
        return server

    def connect(self):
        client, server = self.client(), self.accept()
        # The kernel accepts a connection before the proxy knows that it has it.
        self.passes(client, server)
        return client, server

    def passes(self, sender, receiver, data=b"passed"):
        sender.sendall(data)
        self.assertEqual(receiver.recv(100), data)

    def expect_silence(self, end, operation):
        """Waits for a moment, in which nothing may arrive."""
        end.settimeout(MOMENT_S)
        self.assertRaises(TimeoutError, operation)
        end.settimeout(PATIENCE_S)

    def test_bytes_and_ends_pass(self):
        client, server = self.connect()
        client.shutdown(socket.SHUT_WR)
        self.assertEqual(server.recv(100), b"")
        self.passes(server, client)
        server.close()
        self.assertEqual(client.recv(100), b"")

    def test_one_direction_is_stalled_and_heals(self):
        for direction in TO, BACK:
            sender, receiver = self.connect()[::1 if direction == TO else -1]
            self.proxies.stall(LINK, [direction])
            self.passes(receiver, sender)
            sender.sendall(b"late")
            sender.close()
            self.expect_silence(receiver, lambda: receiver.recv(100))
            self.proxies.heal(LINK)
            self.assertEqual([receiver.recv(100), receiver.recv(100)], [b"late", b""])

    def test_a_new_connection_is_held_back(self):
        self.proxies.stall(LINK)
        self.client().sendall(b"late")
        self.expect_silence(self.listener, self.listener.accept)
        self.proxies.heal(LINK)
        self.assertEqual(self.accept().recv(100), b"late")

    def test_a_cut_link_resets_all_and_heals(self):
        ends = self.connect()
        self.proxies.cut(LINK)
        for end in ends:
            self.assertRaises(ConnectionResetError, end.recv, 100)
        with contextlib.suppress(ConnectionResetError):
            self.assertEqual(self.client().recv(100), b"")
        self.proxies.heal(LINK)
        self.connect()

    def test_a_reset_drops_what_was_held_back(self):
        client, server = self.connect()
        self.proxies.stall(LINK, [TO])
        client.sendall(b"never delivered")
        self.expect_silence(server, lambda: server.recv(100))
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

    def test_many_bytes_pass_in_order(self):
        client, server = self.connect()
        data = bytes(range(256)) * 4096 * 20
        sender = threading.Thread(target=client.sendall, args=[data])
        sender.start()
        self.assertEqual(self.enterContext(server.makefile("rb")).read(len(data)), data)
        sender.join()


if __name__ == "__main__":
    unittest.main()

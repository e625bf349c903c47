"""Tests the proxies: a link that delays, stalls or breaks connections, in each direction."""
import socket
import time
import unittest

from proxies import BACK, TO, Proxies
from workspace import PATIENCE_S, Workspace


class ProxiesTest(unittest.TestCase):
    def setUp(self):
        workspace = self.enterContext(Workspace())
        self.listener = self.enterContext(socket.create_server((workspace.address(), 0)))
        self.listener.settimeout(PATIENCE_S)
        self.proxies = self.enterContext(Proxies(workspace))
        self.address = self.proxies.add("link", self.listener.getsockname())

    def client(self):
        client = socket.create_connection(self.address, timeout=PATIENCE_S)
        self.addCleanup(client.close)
        return client

    def connect(self):
        client = self.client()
        server = self.listener.accept()[0]
        server.settimeout(PATIENCE_S)
        self.addCleanup(server.close)
        # The kernel accepts a connection before the proxy knows that it has it. A byte has passed through
        # the proxy.
        client.sendall(b"!")
        self.assertEqual(server.recv(1), b"!")
        return client, server

    def expect_silence(self, end):
        """Waits for a moment, in which nothing may arrive."""
        end.settimeout(0.2)
        with self.assertRaises(TimeoutError):
            end.recv(100)
        end.settimeout(PATIENCE_S)

    def test_bytes_and_ends_pass(self):
        client, server = self.connect()
        client.sendall(b"question")
        self.assertEqual(server.recv(100), b"question")
        client.shutdown(socket.SHUT_WR)
        self.assertEqual(server.recv(100), b"")
        server.sendall(b"answer")
        server.close()
        self.assertEqual(client.recv(100), b"answer")
        self.assertEqual(client.recv(100), b"")

    def test_one_direction_is_stalled(self):
        client, server = self.connect()
        self.proxies.stall(["link"], [BACK])
        client.sendall(b"question")
        self.assertEqual(server.recv(100), b"question")
        server.sendall(b"answer")
        self.expect_silence(client)
        self.proxies.heal(["link"])
        self.assertEqual(client.recv(100), b"answer")

    def test_the_end_of_a_client_is_held_back_too(self):
        client, server = self.connect()
        self.proxies.stall(["link"], [TO])
        client.sendall(b"late")
        client.close()
        self.expect_silence(server)
        self.proxies.heal(["link"])
        self.assertEqual(server.recv(100), b"late")
        self.assertEqual(server.recv(100), b"")

    def test_a_new_connection_is_held_back(self):
        self.proxies.stall(["link"])
        client = self.client()
        client.sendall(b"late")
        self.listener.settimeout(0.2)
        with self.assertRaises(TimeoutError):
            self.listener.accept()
        self.proxies.heal(["link"])
        self.listener.settimeout(PATIENCE_S)
        server = self.listener.accept()[0]
        self.addCleanup(server.close)
        self.assertEqual(server.recv(100), b"late")

    def test_a_cut_link_resets_all_and_heals(self):
        client, server = self.connect()
        self.proxies.cut(["link"])
        for end in client, server:
            with self.assertRaises(ConnectionResetError):
                end.recv(100)
        try:
            self.assertEqual(self.client().recv(100), b"")
        except ConnectionResetError:
            pass
        self.proxies.heal(["link"])
        client, server = self.connect()
        client.sendall(b"again")
        self.assertEqual(server.recv(100), b"again")

    def test_a_reset_drops_what_was_held_back(self):
        client, server = self.connect()
        self.proxies.stall(["link"], [TO])
        client.sendall(b"never delivered")
        self.expect_silence(server)
        self.proxies.reset(["link"])
        self.proxies.heal(["link"])
        with self.assertRaises(ConnectionResetError):
            server.recv(100)

    def test_a_delay_is_at_least_that_long(self):
        client, server = self.connect()
        self.proxies.delay(["link"], 0.5, [BACK])
        client.sendall(b"question")
        self.assertEqual(server.recv(100), b"question")
        sent = time.monotonic()
        server.sendall(b"answer")
        self.assertEqual(client.recv(100), b"answer")
        self.assertGreaterEqual(time.monotonic() - sent, 0.5)

    def test_many_bytes_pass_in_order(self):
        client, server = self.connect()
        data = bytes(range(256)) * 4096 * 20
        client.setblocking(False)
        sent, received = 0, bytearray()
        while len(received) < len(data):
            try:
                sent += client.send(data[sent:sent + 100_000])
            except BlockingIOError:
                pass
            server.settimeout(0.01)
            try:
                received += server.recv(1 << 20)
            except TimeoutError:
                pass
        self.assertEqual(bytes(received), data)


if __name__ == "__main__":
    unittest.main()

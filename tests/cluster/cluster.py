"""A whole cluster on loopback: etcd, servers that reach it through proxies, and HAProxy.

         clients ---- HAProxy ---- server 1 --- proxies --- etcd 1
            |                \\---- server 2 --- proxies --- etcd 2
            '--- directly to each server                    etcd 3
"""
import contextlib
import signal
import subprocess
import threading
import time

from etcd import Etcd
from proxies import Proxies
from servers import NOT_LEADING, HAProxy, Server, etcd_url
from workspace import PATIENCE_S, wait_until

PREFIX = "/jobs"


class Cluster:
    """Use as a context: it ends with everything that belongs to it."""

    def __init__(self, workspace, program, servers=2, nodes=3, lease_ttl=2, flags=(), etcd_flags=()):
        self.workspace = workspace
        self.program = program
        self.server_count = servers
        self.lease_ttl = lease_ttl
        self.flags = ["--lease-ttl", str(lease_ttl), *flags]
        self.etcd = Etcd(workspace, nodes, etcd_flags)
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.proxies = stack.enter_context(Proxies(self.workspace))
            self.etcd.connect_through(self.proxies)
            self.etcd.start()
            self.servers = [self.new_server(f"server{number}")
                            for number in range(1, self.server_count + 1)]
            self.haproxy = HAProxy(self.workspace, self.servers)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *details):
        self.stack.__exit__(*details)

    def new_server(self, name, prefix=PREFIX, flags=None):
        """Returns a server, not started, with a link of its own to each node."""
        endpoints = [self.proxies.add(f"{name}-{node.name}", (node.address, node.client_port))
                     for node in self.etcd.nodes]
        server = Server(self.workspace, self.program, name, etcd_url(endpoints, prefix),
                        self.flags if flags is None else flags)
        server.links = [f"{name}-{node.name}" for node in self.etcd.nodes]
        return server

    def start(self):
        """Starts all servers, the first of which becomes active, and HAProxy."""
        for server in self.servers:
            server.start()
            if server is self.servers[0]:
                server.wait_until_active()
            else:
                server.wait_until_standby()
        self.haproxy.start()
        self.haproxy.wait_until_answering()
        return self

    def active(self):
        """Returns the server that is active, or `None`."""
        return next((server for server in self.servers if server.process.poll() is None
                     and server.is_active()), None)

    def wait_for_active(self, patience=PATIENCE_S):
        return wait_until("a server is active", self.active, patience)

    def standby(self):
        return next(server for server in self.servers if server is not self.active())

    def url(self):
        """Returns the URL of the queue without proxies."""
        return etcd_url(self.etcd.endpoints(), PREFIX)

    def run(self, *arguments, expect=0):
        """Runs the server program on the queue, without proxies, until it ends; returns its output."""
        return run(self.program, "-b", self.url(), *arguments, expect=expect)


def run(program, *arguments, expect=0, environment=None):
    """Runs a program until it ends. Returns its standard output and error as one text."""
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, env=environment, timeout=PATIENCE_S)
    text = done.stdout.decode(errors="replace")
    assert done.returncode == expect, (f"{' '.join(arguments)}: ended with {done.returncode} instead of"
                                       f" {expect}:\n{text}")
    return text


class ServiceManager(threading.Thread):
    """Starts servers again that have ended, as systemd does."""

    def __init__(self, servers, history, fail):
        super().__init__(name="service manager", daemon=True)
        self.servers = servers
        self.history = history
        self.fail = fail
        self.is_over = threading.Event()
        # Seconds until a server that has ended starts again; a fault can choose more.
        self.pauses = {server: 0.1 for server in servers}
        self.ended_at = {}
        self.exits = {}

    def run(self):
        try:
            while not self.is_over.is_set():
                for server in self.servers:
                    self.watch(server)
                time.sleep(0.02)
        except Exception as failure:
            self.fail(failure)

    def stop(self):
        self.is_over.set()
        self.join()

    def watch(self, server):
        status = server.process.poll()
        if status is None:
            return
        if server not in self.ended_at:
            self.ended_at[server] = time.monotonic()
            self.on_exit(server, status)
        if time.monotonic() - self.ended_at[server] >= self.pauses[server]:
            del self.ended_at[server]
            self.pauses[server] = 0.1
            server.workspace.forget(server.process)
            server.start()

    def on_exit(self, server, status):
        process = server.process
        self.history.process_ended(process.pid)
        self.exits[status] = self.exits.get(status, 0) + 1
        text = process.text()
        expected = {NOT_LEADING}
        if signal.SIGTERM in process.signals:
            expected.add(0)
        if signal.SIGKILL in process.signals:
            expected.add(-signal.SIGKILL)
        assert status in expected and "panicked" not in text, (
            f"{process.name} (pid {process.pid}) ended with {status}, after the signals"
            f" {process.signals}; its log is {process.log}:\n{process.tail(40)}")

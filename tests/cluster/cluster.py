"""A whole cluster on loopback: etcd, servers that reach it through proxies, and HAProxy.

         clients ---- HAProxy ---- server 1 --- proxies --- etcd 1
            |                \\---- server 2 --- proxies --- etcd 2
            '--- directly to each server                    etcd 3
"""
import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from workspace import PATIENCE_S, Worker, Workspace, wait_until
from beanstalk import Closed, Connection
from etcd import Etcd
from proxies import Proxies

# The exit statuses of the contract.
USAGE, REFUSED, NOT_LEADING, NO_SOCKET = 5, 10, 75, 111
# What operators use.
HAPROXY_CFG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "dist", "cluster", "haproxy.cfg")


class Server:
    """A server that is started again and again, always with the same addresses and flags."""

    def __init__(self, workspace, program, name, binlog, flags=(), environment=None, links=()):
        self.workspace = workspace
        self.program = program
        self.name = name
        self.binlog = binlog
        self.flags = list(flags)
        self.environment = environment
        # Its proxies, one for each node of etcd.
        self.links = list(links)
        self.host = workspace.address()
        self.address = self.host, workspace.port(self.host)
        self.metrics_port = workspace.port(self.host)
        self.starts = 0
        self.process = None

    def start(self):
        """Starts a new process, with a log of its own."""
        self.starts += 1
        arguments = [self.program, "-V", "-l", self.host, "-p", str(self.address[1]), "--metrics",
                     f"{self.host}:{self.metrics_port}", *(["-b", self.binlog] if self.binlog else []), *self.flags]
        log = self.workspace.path(f"{self.name}-{self.starts}.log")
        self.process = self.workspace.start(self.name, arguments, self.environment, log)
        return self

    def kill(self):
        self.process.kill()

    def terminate(self):
        """Ends the server with SIGTERM."""
        self.process.signal(signal.SIGTERM)
        self.expect_exit(0)

    def restart(self):
        """Ends the server with SIGKILL, if it still runs; a new process leads."""
        self.process.kill()
        return self.start().wait_until_active()

    def connect(self, patience_s=PATIENCE_S):
        return Connection(self.address, patience_s)

    def http(self, path, timeout_s=PATIENCE_S):
        """Returns the status and the text of a page of the metrics listener."""
        connection = http.client.HTTPConnection(self.host, self.metrics_port, timeout=timeout_s)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        return None, ""

    def metric(self, name):
        found = re.search(rf"^{name} (\S+)$", self.http("/metrics")[1], re.MULTILINE)
        assert found, f"there is no metric {name}"
        return float(found[1])

    def is_active(self):
        return self.http("/readyz", timeout_s=2)[0] == 200

    def is_standby(self):
        return [self.http(path, timeout_s=2)[0] for path in ("/healthz", "/readyz")] == [200, 503]

    def wait_until_active(self, patience_s=PATIENCE_S):
        return self.wait_for("it is active", self.is_active, patience_s)

    def wait_until_standby(self):
        return self.wait_for("it stands by", self.is_standby)

    def wait_for_log(self, text):
        return self.wait_for(f"a line with {text}", lambda: text in self.process.text())

    def wait_for(self, what, condition, patience_s=PATIENCE_S):
        def is_true():
            status = self.process.poll()
            assert status is None, f"it ended with {status}"
            return condition()
        try:
            wait_until(what, is_true, patience_s)
        except AssertionError as failure:
            raise AssertionError(f"{self.name}: {failure}; the log is:\n{self.process.tail()}") from None
        return self

    def expect_exit(self, status):
        """Waits for the end of the process; returns its log."""
        found = self.process.wait()
        assert found == status, f"{self.name} ended with {found} instead of {status}:\n{self.process.tail()}"
        return self.process.text()


def etcd_url(endpoints, prefix, scheme="etcd"):
    return f"{scheme}://" + ",".join(f"{address}:{port}" for address, port in endpoints) + prefix


def answers(address):
    try:
        with Connection(address, 5) as connection:
            return connection.ask("list-tube-used")[0] == "USING"
    except Closed:
        return False


class Cluster:
    """etcd and servers that use it. As a context it ends with everything that belongs to it."""

    def __init__(self, program, nodes=3, lease_ttl_s=2, flags=(), has_proxies=True, **of_etcd):
        self.program = program
        self.lease_ttl_s = lease_ttl_s
        self.flags = ["--lease-ttl", str(lease_ttl_s), *flags]
        self.has_proxies = has_proxies
        self.of_etcd = {"nodes": nodes, **of_etcd}
        # The queue of the servers that are made from now on.
        self.prefix = "/jobs"
        self.servers = []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.workspace = stack.enter_context(Workspace())
            self.etcd = Etcd(self.workspace, **self.of_etcd)
            if self.has_proxies:
                self.proxies = stack.enter_context(Proxies(self.workspace))
                self.etcd.connect_through(self.proxies)
            self.etcd.start()
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind, failure, trace):
        if kind is not None:
            self.print_logs()
        return self.stack.__exit__(kind, failure, trace)

    def print_logs(self):
        """Prints the logs of all servers. One that has closed its connections may be about to log why."""
        time.sleep(2)
        for server in self.servers:
            if server.process is not None:
                print(f"the log of {server.name}, pid {server.process.pid}, exit status"
                      f" {server.process.poll()}:\n{server.process.tail()}", file=sys.stderr)

    def new_server(self, flags=(), environment=None, scheme="etcd"):
        """Returns a server, not started, with a link of its own to each node."""
        name = f"server{len(self.servers) + 1}"
        endpoints, links = self.etcd.endpoints(), []
        if self.has_proxies:
            links = [f"{self.prefix}-{name}-{node.name}" for node in self.etcd.nodes]
            endpoints = [self.proxies.add(link, endpoint) for link, endpoint in zip(links, endpoints)]
        url = etcd_url(endpoints, self.prefix, scheme)
        flags = [*self.flags, *flags]
        self.servers.append(Server(self.workspace, self.program, name, url, flags, environment, links))
        return self.servers[-1]

    def start(self, count=1, flags=()):
        """Starts new servers, the first of which becomes active; returns all, or the only one."""
        servers = [self.new_server(flags) for _ in range(count)]
        for server in servers:
            server.start()
            if server is servers[0]:
                server.wait_until_active()
            else:
                server.wait_until_standby()
        return servers if count > 1 else servers[0]

    def wait_for_active(self):
        return wait_until("a server is active", lambda: next(
            (server for server in self.servers if server.process.poll() is None and server.is_active()), None))

    def items(self, name=""):
        """Returns the keys of the queue that begin with its prefix and `name`, and their values."""
        return self.etcd.items(self.prefix + name)

    def run(self, *arguments, expect=0):
        """Runs the server program on the queue until it ends; returns its output."""
        url = etcd_url(self.etcd.endpoints(), self.prefix)
        return run(self.program, "-b", url, *arguments, expect=expect)


def run(program, *arguments, expect=0):
    """Runs a program until it ends. Returns its standard output and error as one text."""
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, timeout=PATIENCE_S)
    text = done.stdout.decode(errors="replace")
    assert done.returncode == expect, (f"{' '.join(arguments)}: ended with {done.returncode} instead of"
                                       f" {expect}:\n{text}")
    return text


def start_haproxy(cluster):
    """Starts HAProxy in front of all servers; returns its address when it finds one that is active."""
    host = cluster.workspace.address()
    address = host, cluster.workspace.port(host)
    with open(HAPROXY_CFG, encoding="ascii") as file:
        text = re.sub(r"    server .*\n", "", file.read())
    for old, new in ("bind 127.0.0.1:11300", "bind %s:%d" % address), ("inter 500ms", "inter 200ms"):
        assert text.count(old) == 1, f"{HAPROXY_CFG}: no {old}"
        text = text.replace(old, new)
    for server in cluster.servers:
        text += f"    server {server.name} {server.host}:{server.address[1]} check port {server.metrics_port}\n"
    path = cluster.workspace.path(f"haproxy-{host}.cfg")
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
    # Debian has it outside of the PATH of a user.
    program = shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin")
    cluster.workspace.start("haproxy", [program, "-db", "-f", path])
    wait_until("a server answers through HAProxy", lambda: answers(address))
    return address


class ServiceManager(Worker):
    """Starts servers again that have ended, as systemd does."""

    def __init__(self, servers, failures):
        super().__init__(failures)
        self.servers = servers
        # Seconds until a server that has ended starts again; a fault can choose more.
        self.pauses = {server: 0.1 for server in servers}
        self.ended_at = {}

    def work(self):
        self.is_over.wait(0.02)
        for server in self.servers:
            self.watch(server)

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
            server.start()

    def on_exit(self, server, status):
        process = server.process
        expected = {NOT_LEADING}
        if signal.SIGTERM in process.signals:
            expected.add(0)
        if signal.SIGKILL in process.signals:
            expected.add(-signal.SIGKILL)
        assert status in expected and "panicked" not in process.text(), (
            f"{process.name} (pid {process.pid}) ended with {status}, after the signals"
            f" {process.signals}; its log is {process.log}:\n{process.tail(40)}")

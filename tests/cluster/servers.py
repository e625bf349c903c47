"""Servers that share a queue in etcd, and HAProxy in front of them."""
import http.client
import os
import re
import shutil

from client import Closed, Connection
from workspace import PATIENCE_S, wait_until

# The exit statuses of the contract.
USAGE, REFUSED, NOT_LEADING = 5, 10, 75


class Server:
    """A server that is started again and again, always with the same addresses and flags."""

    def __init__(self, workspace, program, name, binlog, flags=(), environment=None):
        self.workspace = workspace
        self.program = program
        self.name = name
        self.binlog = binlog
        self.flags = list(flags)
        self.environment = environment
        self.address = workspace.address()
        self.port = workspace.port(self.address)
        self.metrics_port = workspace.port(self.address)
        self.starts = 0
        self.process = None

    def start(self):
        """Starts a new process, with a log of its own."""
        self.starts += 1
        arguments = [self.program, "-V", "-l", self.address, "-p", str(self.port), "--metrics",
                     f"{self.address}:{self.metrics_port}", "-b", self.binlog, *self.flags]
        log = self.workspace.path(f"{self.name}-{self.starts}.log")
        self.process = self.workspace.start(self.name, arguments, self.environment, log)
        return self

    def kill(self):
        self.process.kill()

    def connect(self, patience=PATIENCE_S):
        return Connection((self.address, self.port), patience)

    def http(self, path, timeout=PATIENCE_S):
        """Returns the status and the text of a page of the metrics listener."""
        connection = http.client.HTTPConnection(self.address, self.metrics_port, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"no page {path}: {error}") from error
        finally:
            connection.close()

    def status(self, path, timeout=PATIENCE_S):
        """Returns the HTTP status of a page, or `None` when the server does not reply."""
        try:
            return self.http(path, timeout)[0]
        except OSError:
            return None

    def metric(self, name):
        """Returns the value of a metric without labels."""
        found = re.search(rf"^{name} (\S+)$", self.http("/metrics")[1], re.MULTILINE)
        assert found, f"there is no metric {name}"
        return float(found[1])

    def is_active(self):
        return self.status("/readyz", timeout=2) == 200

    def is_standby(self):
        return self.status("/healthz", timeout=2) == 200 and self.status("/readyz", timeout=2) == 503

    def wait_until_active(self, patience=PATIENCE_S):
        self.wait_for("it is active", self.is_active, patience)
        return self

    def wait_until_standby(self, patience=PATIENCE_S):
        self.wait_for("it stands by", self.is_standby, patience)
        return self

    def wait_for(self, what, condition, patience):
        def is_true():
            status = self.process.poll()
            assert status is None, f"{self.name} ended with {status}:\n{self.process.tail()}"
            return condition()
        try:
            wait_until(f"{self.name}: {what}", is_true, patience)
        except AssertionError as failure:
            raise AssertionError(f"{failure}; the log is:\n{self.process.tail()}") from None

    def expect_exit(self, status, patience=PATIENCE_S):
        """Waits for the end of the process; returns its log."""
        found = self.process.wait(patience)
        assert found == status, f"{self.name} ended with {found} instead of {status}:\n{self.process.tail()}"
        return self.process.text()

    def answers(self):
        """Returns whether the server answers a client."""
        try:
            with self.connect(patience=2) as connection:
                return connection.ask("list-tube-used")[0] == "USING"
        except Closed:
            return False


def etcd_url(endpoints, prefix, scheme="etcd"):
    return f"{scheme}://" + ",".join(f"{address}:{port}" for address, port in endpoints) + prefix


class HAProxy:
    """HAProxy as dist/README.md configures it, with shorter intervals between its checks."""

    CONFIGURATION = """
global
    maxconn 4000
defaults
    mode tcp
    timeout connect 1s
    timeout client 1h
    timeout server 1h
    timeout check 1s
    retries 3
    option redispatch 1
listen beanstalkd
    bind {address}:{port}
    option httpchk GET /readyz
    default-server check inter 200ms fall 2 rise 1 on-marked-down shutdown-sessions
{servers}
"""

    def __init__(self, workspace, servers):
        self.workspace = workspace
        self.servers = servers
        # Debian has it outside of the PATH of a user.
        self.program = shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin")
        self.host = workspace.address()
        self.port = workspace.port(self.host)
        self.process = None

    @property
    def address(self):
        return self.host, self.port

    def start(self):
        servers = "\n".join(f"    server {server.name} {server.address}:{server.port} "
                            f"port {server.metrics_port}" for server in self.servers)
        path = self.workspace.path("haproxy.cfg")
        with open(path, "w", encoding="ascii") as file:
            file.write(self.CONFIGURATION.format(address=self.host, port=self.port, servers=servers))
        self.process = self.workspace.start("haproxy", [self.program, "-db", "-f", path])
        return self

    def connect(self, patience=PATIENCE_S):
        return Connection(self.address, patience)

    def wait_until_answering(self, patience=PATIENCE_S):
        """Waits until a client gets replies through HAProxy."""
        def is_answering():
            try:
                with self.connect(patience=5) as connection:
                    return connection.ask("list-tube-used")[0] == "USING"
            except Closed:
                return False
        wait_until("a server answers through HAProxy", is_answering, patience)

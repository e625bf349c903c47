"""etcd: nodes that can be stopped, killed and started again, and requests to them.

Requests use the JSON gateway, which is a part of every node. Keys and values are bytes.
"""
import base64
import http.client
import json
import os
import signal
import ssl
import subprocess
import time

from workspace import PATIENCE_S, wait_until


class EtcdError(Exception):
    """etcd replied with an error."""


class Node:
    """One node of a cluster."""

    def __init__(self, cluster, name):
        self.cluster = cluster
        self.name = name
        self.address = cluster.workspace.address()
        self.client_port = cluster.workspace.port(self.address)
        self.peer_port = cluster.workspace.port(self.address)
        self.peer_url = f"http://{self.address}:{self.peer_port}"
        # The other nodes use this one, which may lead through a proxy.
        self.advertised_url = self.peer_url
        self.process = None

    def start(self):
        scheme = "https" if self.cluster.tls else "http"
        client_url = f"{scheme}://{self.address}:{self.client_port}"
        workspace = self.cluster.workspace
        arguments = [
            "etcd", "--name", self.name, "--data-dir", workspace.path(self.name),
            "--listen-client-urls", client_url, "--advertise-client-urls", client_url,
            "--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.advertised_url,
            "--initial-cluster", ",".join(f"{n.name}={n.advertised_url}" for n in self.cluster.nodes),
            "--initial-cluster-token", workspace.network, "--log-level", "warn",
            "--logger", "zap", *self.cluster.flags,
        ]
        self.process = workspace.start(self.name, arguments)

    def kill(self):
        self.process.kill()
        self.cluster.workspace.forget(self.process)

    def suspend(self):
        self.process.signal(signal.SIGSTOP)

    def resume(self):
        self.process.signal(signal.SIGCONT)

    def request(self, path, body, timeout=PATIENCE_S, token=None):
        """Returns the reply to a JSON request. Raises OSError when there is none."""
        if self.cluster.tls:
            connection = http.client.HTTPSConnection(self.address, self.client_port, timeout=timeout,
                                                     context=self.cluster.tls.context())
        else:
            connection = http.client.HTTPConnection(self.address, self.client_port, timeout=timeout)
        headers = {"Authorization": token} if token else {}
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            raise OSError(f"no reply from {self.name}: {error}") from error
        finally:
            connection.close()
        reply = json.loads(text)
        if response.status != 200:
            raise EtcdError(reply.get("error", text))
        return reply

    def is_healthy(self):
        """Returns whether the node knows a leader and applies transactions."""
        try:
            status = self.request("maintenance/status", {}, timeout=2)
            return int(status.get("leader", 0)) != 0
        except (OSError, EtcdError, ValueError):
            return False


class Etcd:
    """A cluster of nodes on loopback."""

    def __init__(self, workspace, nodes=3, flags=(), tls=None, name="etcd"):
        self.workspace = workspace
        self.tls = tls
        # The compaction that dist/README.md asks for.
        self.flags = ["--auto-compaction-mode=periodic", "--auto-compaction-retention=1m", *flags]
        if tls:
            self.flags += tls.etcd_flags()
        self.nodes = [Node(self, f"{name}{number}") for number in range(1, nodes + 1)]
        # The name and the password of root while users are checked.
        self.root = None

    def connect_through(self, proxies):
        """Lets each node be reached by the others through a link with its name. Before the start."""
        for node in self.nodes:
            address, port = proxies.add(node.name, (node.address, node.peer_port))
            node.advertised_url = f"http://{address}:{port}"

    def start(self):
        for node in self.nodes:
            node.start()
        self.wait_until_healthy()
        return self

    def wait_until_healthy(self):
        for node in self.nodes:
            wait_until(f"{node.name} is healthy", node.is_healthy)

    def endpoints(self):
        return [(node.address, node.client_port) for node in self.nodes]

    def request(self, path, body, timeout=5):
        """Asks one node after the other until one replies."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            for node in self.nodes:
                try:
                    return node.request(path, body, timeout, self.token(node))
                except OSError as error:
                    if time.monotonic() > give_up_at:
                        raise AssertionError(f"no node of etcd replies to {path}: {error}") from error
            time.sleep(0.1)

    def token(self, node):
        if self.root is None:
            return None
        name, password = self.root
        return node.request("auth/authenticate", {"name": name, "password": password})["token"]

    def leader(self):
        """Returns the node that leads etcd, or `None` during an election."""
        for node in self.nodes:
            try:
                status = node.request("maintenance/status", {}, timeout=0.5)
            except (OSError, EtcdError, ValueError):
                continue
            if status.get("leader") == status["header"]["member_id"]:
                return node
        return None

    def items(self, prefix):
        """Returns the keys with this prefix and their values."""
        reply = self.request("kv/range", {"key": encode(prefix), "range_end": encode(after(prefix))})
        return {decode(item["key"]): decode(item.get("value", "")) for item in reply.get("kvs", [])}

    def keys(self, prefix):
        body = {"key": encode(prefix), "range_end": encode(after(prefix)), "keys_only": True}
        return [decode(item["key"]) for item in self.request("kv/range", body).get("kvs", [])]

    def lease_of(self, key):
        """Returns the number of the lease of a key, as a string."""
        return self.request("kv/range", {"key": encode(key)})["kvs"][0].get("lease", "0")

    def wait_for_change(self, prefix, filters, patience):
        """Waits until a key with this prefix is put or deleted, or until the patience ends."""
        create = {"key": encode(prefix), "range_end": encode(after(prefix)), "filters": filters}
        node = next((node for node in self.nodes if node.is_healthy()), self.nodes[0])
        connection = http.client.HTTPConnection(node.address, node.client_port, timeout=patience)
        try:
            connection.request("POST", "/v3/watch", json.dumps({"create_request": create}))
            response = connection.getresponse()
            while line := response.readline():
                if b'"events"' in line:
                    return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()

    def put(self, key, value):
        self.request("kv/put", {"key": encode(key), "value": encode(value)})

    def control(self, *arguments, expect=0):
        """Runs etcdctl, and returns its output."""
        scheme = "https" if self.tls else "http"
        endpoints = ",".join(f"{scheme}://{address}:{port}" for address, port in self.endpoints())
        flags = ["--endpoints", endpoints]
        if self.tls:
            flags += self.tls.etcdctl_flags()
        if self.root:
            flags += ["--user", ":".join(self.root)]
        done = subprocess.run(["etcdctl", *flags, *arguments], capture_output=True, text=True,
                              timeout=PATIENCE_S, env={**os.environ, "ETCDCTL_API": "3"})
        if done.returncode != expect:
            raise AssertionError(f"etcdctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout


class Certificates:
    """An authority, and certificates for the nodes and for a client, made with openssl."""

    def __init__(self, workspace):
        self.directory = workspace.path("certificates")
        os.mkdir(self.directory)
        self.network = workspace.network
        self.make_authority("ca")
        # The gateway inside a node is a client of that node, with the certificate of the node.
        self.make("node", "ca", "serverAuth,clientAuth")
        self.make("client", "ca", "clientAuth")
        # An authority that the nodes do not know.
        self.make_authority("other-ca")
        self.make("stranger", "other-ca", "clientAuth")

    def file(self, name):
        return os.path.join(self.directory, name)

    def openssl(self, *arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self.directory)

    def make_authority(self, name):
        self.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                     "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out",
                     f"{name}.crt")

    def make(self, name, authority, usage):
        addresses = ",".join(f"IP:{self.network}.{number}" for number in range(1, 255))
        with open(self.file(f"{name}.ext"), "w", encoding="ascii") as file:
            file.write(f"subjectAltName=DNS:localhost,{addresses}\nextendedKeyUsage={usage}\n")
        self.openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
                     f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        self.openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt", "-CAkey",
                     f"{authority}.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext",
                     "-out", f"{name}.crt")

    def etcd_flags(self):
        return ["--cert-file", self.file("node.crt"), "--key-file", self.file("node.key"),
                "--trusted-ca-file", self.file("ca.crt"), "--client-cert-auth"]

    def etcdctl_flags(self):
        return ["--cacert", self.file("ca.crt"), "--cert", self.file("client.crt"),
                "--key", self.file("client.key")]

    def context(self):
        context = ssl.create_default_context(cafile=self.file("ca.crt"))
        context.load_cert_chain(self.file("client.crt"), self.file("client.key"))
        return context


def encode(data):
    """Returns bytes or text in base64, as the JSON gateway has them."""
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def decode(text):
    return base64.b64decode(text)


def after(prefix):
    """Returns the first key after all that begin with `prefix`."""
    prefix = prefix.encode() if isinstance(prefix, str) else prefix
    return prefix[:-1] + bytes([prefix[-1] + 1])

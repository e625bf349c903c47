"""etcd: nodes that can be stopped, killed and started again, and requests to them.

Requests use the JSON gateway, which is a part of every node. Keys and values are bytes.
"""
import base64
import contextlib
import http.client
import json
import os
import ssl
import subprocess
import time

from workspace import PATIENCE_S, wait_until


class EtcdError(Exception):
    """etcd replied with an error."""


class Node:
    def __init__(self, cluster, name):
        self.cluster = cluster
        self.name = name
        self.host = cluster.workspace.address()
        self.address = self.host, cluster.workspace.port(self.host)
        self.peer_address = self.host, cluster.workspace.port(self.host)
        # The other nodes use this one, which may lead through a proxy.
        self.advertised_address = self.peer_address
        self.process = None

    def start(self):
        cluster = self.cluster
        client_url = "%s://%s:%d" % ("https" if cluster.tls else "http", *self.address)
        peer_url = "http://%s:%d" % self.peer_address
        members = ",".join("%s=http://%s:%d" % (node.name, *node.advertised_address) for node in cluster.nodes)
        self.process = cluster.workspace.start(self.name, [
            "etcd", "--name", self.name, "--data-dir", cluster.workspace.path(f"{self.name}-{self.host}"),
            "--listen-client-urls", client_url, "--advertise-client-urls", client_url,
            "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls",
            "http://%s:%d" % self.advertised_address, "--initial-cluster", members,
            "--initial-cluster-token", cluster.workspace.network, "--log-level", "warn",
            "--logger", "zap", *cluster.flags])

    def request(self, path, body, timeout_s=PATIENCE_S, token=None):
        """Returns the reply to a JSON request. Raises OSError when there is none."""
        tls = self.cluster.tls
        connect, options = (http.client.HTTPSConnection, {"context": tls.context()}) if tls else (
            http.client.HTTPConnection, {})
        try:
            with contextlib.closing(connect(*self.address, timeout=timeout_s, **options)) as connection:
                connection.request("POST", f"/v3/{path}", json.dumps(body), {"Authorization": token} if token else {})
                response = connection.getresponse()
                reply = json.loads(response.read())
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"no reply from {self.name}: {error}") from error
        if response.status != 200:
            raise EtcdError(reply.get("error", reply))
        return reply

    def status(self, timeout_s=2):
        """Returns the status of the node; empty when it does not reply."""
        try:
            return self.request("maintenance/status", {}, timeout_s)
        except (OSError, EtcdError):
            return {}


class Etcd:
    """A cluster of nodes on loopback."""

    def __init__(self, workspace, nodes=3, etcd_flags=(), tls=False):
        self.workspace = workspace
        self.tls = Certificates(workspace) if tls else None
        # The compaction that dist/README.md asks for.
        self.flags = ["--auto-compaction-mode=periodic", "--auto-compaction-retention=1m", *etcd_flags]
        if tls:
            self.flags += self.tls.etcd_flags()
        self.nodes = [Node(self, f"etcd{number}") for number in range(1, nodes + 1)]
        # The name and the password of root while users are checked.
        self.root = None

    def connect_through(self, proxies):
        """Lets each node be reached by the others through a link with its name. Before the start."""
        for node in self.nodes:
            node.advertised_address = proxies.add(node.name, node.peer_address)

    def start(self):
        for node in self.nodes:
            node.start()
        self.wait_until_healthy()
        return self

    def wait_until_healthy(self):
        """Waits until each node knows a leader and applies transactions."""
        for node in self.nodes:
            wait_until(f"{node.name} is healthy", lambda: int(node.status().get("leader", 0)) != 0)

    def endpoints(self):
        return [node.address for node in self.nodes]

    def request(self, path, body, timeout_s=5):
        """Asks one node after the other until one replies."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            for node in self.nodes:
                try:
                    return node.request(path, body, timeout_s, self.token(node))
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
        """Returns the node that leads etcd; during an election the first one."""
        for node in self.nodes:
            status = node.status(0.5)
            if status and status.get("leader") == status["header"]["member_id"]:
                return node
        return self.nodes[0]

    def items(self, prefix):
        reply = self.request("kv/range", {"key": encode(prefix), "range_end": encode(after(prefix))})
        return {decode(item["key"]): decode(item.get("value", "")) for item in reply.get("kvs", [])}

    def revoke_lease_of(self, key):
        lease = self.request("kv/range", {"key": encode(key)})["kvs"][0]["lease"]
        self.request("lease/revoke", {"ID": lease})

    def wait_for_change(self, prefix, filters, patience_s):
        """Waits until a key with this prefix is put or deleted, or until the patience ends."""
        create = {"key": encode(prefix), "range_end": encode(after(prefix)), "filters": filters}
        connection = http.client.HTTPConnection(*self.leader().address, timeout=patience_s)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("POST", "/v3/watch", json.dumps({"create_request": create}))
            response = connection.getresponse()
            while (line := response.readline()) and b'"events"' not in line:
                pass

    def put(self, key, value):
        self.request("kv/put", {"key": encode(key), "value": encode(value)})

    def delete(self, key):
        self.request("kv/deleterange", {"key": encode(key)})

    def compact(self):
        """Drops old revisions, and gives their space back."""
        revision = self.leader().request("maintenance/status", {})["header"]["revision"]
        self.request("kv/compaction", {"revision": revision, "physical": True})
        for node in self.nodes:
            node.request("maintenance/defragment", {})


class Certificates:
    """An authority, and certificates for the nodes and for a client, made with openssl."""

    def __init__(self, workspace):
        self.directory = workspace.path("certificates")
        os.mkdir(self.directory)
        addresses = ",".join(f"IP:{workspace.network}.{number}" for number in range(1, 255))
        self.names = f"subjectAltName=DNS:localhost,{addresses}"
        # The nodes do not know the other authority.
        for authority in "ca", "other-ca":
            self.make(authority)
        # The gateway inside a node is a client of that node, with the certificate of the node.
        self.sign("node", "ca", "serverAuth,clientAuth")
        self.sign("client", "ca", "clientAuth")
        self.sign("stranger", "other-ca", "clientAuth")

    def file(self, name):
        return os.path.join(self.directory, name)

    def make(self, name, *arguments):
        subprocess.run(["openssl", "req", "-x509", "-days", "2", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                        "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt", *arguments],
                       check=True, capture_output=True, cwd=self.directory)

    def sign(self, name, authority, usage):
        extensions = "basicConstraints=critical,CA:FALSE", self.names, f"extendedKeyUsage={usage}"
        added = [argument for extension in extensions for argument in ("-addext", extension)]
        self.make(name, "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", *added)

    def etcd_flags(self):
        return ["--cert-file", self.file("node.crt"), "--key-file", self.file("node.key"),
                "--trusted-ca-file", self.file("ca.crt"), "--client-cert-auth"]

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

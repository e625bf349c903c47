"""A server that tells metrics, a load for it, and a real Prometheus that scrapes it: what
metrics.py and picture.py share. Everything is on loopback, on ports that the kernel chose,
and ends with the `with` that began it."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DASHBOARD = os.path.join(ROOT, "dist/grafana/beanstalkd.json")
RULES = os.path.join(ROOT, "dist/prometheus/beanstalkd.rules.yml")
CLUSTER_RULES = os.path.join(ROOT, "dist/prometheus/cluster.rules.yml")
# Metrics that only a server with its binlog in etcd has.
CLUSTER_METRIC = re.compile(r"\bbeanstalkd_(leading|lease|etcd)_?")

# Only something that never comes takes so long.
PATIENCE_S = 20


def fail(what):
    """Ends the check."""
    raise SystemExit(f"FAILED: {what}")


# So that child processes end too when the check is interrupted.
signal.signal(signal.SIGTERM, lambda *_: fail("it took too long"))


def wait_for(what, is_so, seconds=PATIENCE_S):
    """Polls until a condition without an event of its own holds. Returns its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = is_so()
        if found:
            return found
        time.sleep(0.05)
    return fail(f"in {seconds} seconds it never came to be that {what}")


class Process:
    """A program that logs; killed at the end, by its id. Its log is read by a thread, so that
    the program never waits for a reader."""

    def __init__(self, arguments, patterns):
        self.lines = []
        self.child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        self.found = [wait_for(f"{arguments[0]} logs {pattern}", lambda: self._find(pattern))
            for pattern in patterns]

    def _read(self):
        for line in self.child.stderr:
            self.lines.append(line)

    def _find(self, pattern):
        if self.child.poll() is not None:
            fail(f"{self.child.args[0]} has ended:\n{''.join(self.lines)}")
        matches = (re.search(pattern, line) for line in list(self.lines))
        return next((match.group(1) for match in matches if match), None)

    def end(self):
        self.child.kill()
        self.child.wait()


@contextlib.contextmanager
def server(program, directory, *flags, max_memory=1 << 28):
    """Our server with a binlog; `address` is for clients, `metrics` for Prometheus."""
    process = Process(
        [program, "-V", "-l", "127.0.0.1", "-p", "0", "-b", directory, "-f", "50",
         "--metrics", "127.0.0.1:0", "--max-memory", str(max_memory), *flags],
        [r"listening on (\S+)", r"serving metrics on (\S+)"])
    process.address, process.metrics = process.found
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def prometheus(directory, targets, interval="2s", rules=RULES, etcd=()):
    """Prometheus with these rules, which scrapes the targets as a job called beanstalkd, and members
    of etcd as a job called etcd."""
    config = os.path.join(directory, "prometheus.yml")
    with open(config, "w", encoding="ascii") as file:
        json.dump({
            "global": {"scrape_interval": interval, "scrape_timeout": interval,
                "evaluation_interval": interval},
            "rule_files": [rules],
            "scrape_configs": [
                {"job_name": "beanstalkd", "static_configs": [{"targets": targets}]},
                {"job_name": "etcd", "static_configs": [{"targets": list(etcd)}]}],
        }, file)
    process = Process(
        ["prometheus", f"--config.file={config}", "--storage.tsdb.path=" + directory + "/data",
         "--web.listen-address=127.0.0.1:0", "--storage.tsdb.retention.time=1d"],
        [r'msg="Listening on" address=(\S+)', r"(Server is ready)"])
    process.api = Api(process.found[0])
    try:
        yield process
    finally:
        process.end()


class Api:
    """What a Prometheus is asked over HTTP."""

    def __init__(self, address):
        self.url = f"http://{address}/api/v1/"

    def ask(self, path, **parameters):
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=PATIENCE_S) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            fail(f"{path} {parameters}: {error.read().decode()}")
        return answer["data"]

    def query(self, expression):
        """Series of labels and numbers."""
        result = self.ask("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def value(self, expression):
        """The only number; none if there is none."""
        found = self.query(expression)
        return found[0][1] if len(found) == 1 else None

    def expect(self, expression, value):
        """Waits until the only number is this."""
        wait_for(f"{expression} is {value}", lambda: self.value(expression) == value)


class Client:
    """A client of the queue that waits for each reply."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), PATIENCE_S)
        self.replies = self.socket.makefile("rb")

    def send(self, text):
        self.socket.sendall(text.replace("\n", "\r\n").encode())

    def say(self, text, replies=1):
        """Sends commands and takes as many replies; the last one, in words. Of RESERVED the body is
        taken too."""
        self.send(text)
        words = []
        for _ in range(replies):
            words = self.replies.readline().decode().split()
            if words and words[0] == "RESERVED":
                self.replies.read(int(words[2]) + 2)
        return words

    def close(self):
        self.replies.close()
        self.socket.close()


def get(address, path, method="GET", head="", version="1.1", timeout=PATIENCE_S):
    """The whole answer to a request, as text, until the server closes."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout) as stream:
        stream.sendall(f"{method} {path} HTTP/{version}\r\nHost: x\r\n{head}\r\n".encode())
        stream.settimeout(timeout)
        parts = []
        while part := stream.recv(65536):
            parts.append(part)
        return b"".join(parts).decode()


def is_closed(stream, seconds):
    """Whether the other end closes it within so long."""
    ready, _, _ = select.select([stream], [], [], seconds)
    try:
        return bool(ready) and stream.recv(1) == b""
    except ConnectionResetError:
        return True


def panels(dashboard):
    """All panels that show something, of rows that are folded too."""
    for panel in dashboard["panels"]:
        yield from panel.get("panels", [])
        if panel["type"] != "row":
            yield panel


def expressions(is_of_cluster):
    """The titles and expressions of the dashboard that are for a cluster, or those that are not."""
    with open(DASHBOARD, encoding="utf-8") as file:
        dashboard = json.load(file)
    found = [(panel["title"], substituted(target["expr"]))
        for panel in panels(dashboard) for target in panel["targets"]]
    return [each for each in found if bool(CLUSTER_METRIC.search(each[1])) == is_of_cluster]


def check_names(api, what, expression):
    """All metrics that are named are there."""
    for name in set(re.findall(r"\b(?:beanstalkd|process|etcd)_[a-z_]+\b|\bup\b", expression)):
        if not api.query(f"count({name})"):
            fail(f"{what} names {name}, which there is not")


def check_rules(api):
    """Each alert names only metrics that there are, and is evaluated. Returns their number."""
    groups = api.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        check_names(api, rule["name"], rule["query"])
        wait_for(f"{rule['name']} is evaluated", lambda: any(
            known["name"] == rule["name"] and known["health"] == "ok"
            for group in api.ask("rules")["groups"] for known in group["rules"]))
    return len(rules)


def substituted(expression, interval="15s", span="5m"):
    """An expression of the dashboard with its variables as they are with all chosen."""
    for name, value in [("$__rate_interval", interval), ("$__interval", interval),
                        ("$__range", span), ("$job", ".+"), ("$instance", ".+"),
                        ("$tube", ".+")]:
        expression = expression.replace(name, value)
    if "$" in expression:
        fail(f"{expression} has an unknown variable")
    return expression

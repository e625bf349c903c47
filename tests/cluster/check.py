"""Tests of a queue in etcd with real processes: one case after the other, then random faults.

Use: check.py SERVER [CASE...]. `--list` prints the names of the cases.
"""
import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback

import chaos
from checker import Checker
from client import Closed, encode
from cluster import PREFIX, Cluster, run
from etcd import Certificates, Etcd
from history import History, Violation
from observers import Observers
from proxies import BACK, TO
from servers import NOT_LEADING, REFUSED, USAGE, Server, etcd_url
from workspace import PATIENCE_S, Workspace, wait_until

CASES = {}
HERE = os.path.dirname(os.path.abspath(__file__))
JOBS_SCRIPT = os.path.join(HERE, "..", "packages", "jobs.py")
# So long that a failover that waits for the end of the lease is found.
LONG_LEASE = ["--lease-ttl", "60"]


def case(function):
    CASES[function.__name__.replace("_", "-")] = function
    return function


def expect(what, found, expected):
    assert found == expected, f"{what}: {found!r} instead of {expected!r}"


@contextlib.contextmanager
def running(program, start=True, **options):
    """A cluster; with `start` its servers run, and the first one is active."""
    with Workspace() as workspace, Cluster(workspace, program, **options) as cluster:
        with logs_of_failure(cluster.servers):
            yield cluster.start() if start else cluster


@contextlib.contextmanager
def logs_of_failure(servers):
    """Prints the logs of servers when the case fails."""
    try:
        yield
    except Exception:
        # A server that has closed its connections may be about to log why.
        time.sleep(2)
        for server in servers:
            if server.process is not None:
                print(f"the log of {server.name}, pid {server.process.pid}, exit status"
                      f" {server.process.poll()}:\n{server.process.tail(25)}", file=sys.stderr)
        raise


@contextlib.contextmanager
def one_node(program, etcd_flags=(), tls=False):
    """One node of etcd, and a function that makes servers. The faster half of a cluster."""
    with Workspace() as workspace:
        certificates = Certificates(workspace) if tls else None
        etcd = Etcd(workspace, nodes=1, flags=etcd_flags, tls=certificates).start()

        def server(name="server", prefix=PREFIX, flags=(), environment=None, scheme="etcd"):
            url = etcd_url(etcd.endpoints(), prefix, scheme)
            servers.append(Server(workspace, program, name, url, ["--lease-ttl", "2", *flags], environment))
            return servers[-1]
        servers = []
        with logs_of_failure(servers):
            yield etcd, server


def jobs_of(connection, ids):
    """Returns for each id the body, the state and the priority, or `None` without such a job."""
    jobs = {}
    for job in ids:
        found = connection.peek(f"peek {job}")
        facts = connection.facts(f"stats-job {job}")
        jobs[job] = found and (found[1], facts["state"], int(facts["pri"]))
    return jobs


# Failover.

@case
def failover_by_kill(program):
    with running(program) as cluster:
        first, second = cluster.servers
        client = first.connect()
        ready = client.put(b"ready", "mail", pri=7)
        delayed = client.put(b"delayed", "mail", pri=8, delay=1000)
        put_at = time.monotonic()
        short = client.put(b"due soon", "mail", pri=8, delay=5)
        buried = client.put(b"buried", "mail")
        client.peek(f"reserve-job {buried}")
        client.must("BURIED", f"bury {buried} 9")
        released = client.put(b"released", "mail")
        client.peek(f"reserve-job {released}")
        client.must("RELEASED", f"release {released} 10 0")
        reserved = client.put(b"reserved", "mail", pri=11)
        client.peek(f"reserve-job {reserved}")
        deleted = client.put(b"deleted", "mail")
        client.must("DELETED", f"delete {deleted}")
        first.kill()
        cluster.haproxy.wait_until_answering()
        expect("the old server", first.process.poll(), -signal.SIGKILL)
        second.wait_until_active()
        second.process.expect_log(f"leading {PREFIX}")
        with cluster.haproxy.connect() as client:
            expect("the jobs", jobs_of(client, [ready, delayed, buried, released, reserved, deleted]), {
                ready: (b"ready", "ready", 7), delayed: (b"delayed", "delayed", 8),
                buried: (b"buried", "buried", 9), released: (b"released", "ready", 10),
                reserved: (b"reserved", "ready", 11), deleted: None})
            left = int(client.facts(f"stats-job {delayed}")["time-left"])
            passed = time.monotonic() - put_at
            assert 1000 - passed - 3 <= left <= 1000, f"{left} s of the delay are left after {passed} s"
            client.must("WATCHING", "watch mail")
            due = wait_until("the delay ends", lambda: client.facts(f"stats-job {short}")["state"] == "ready")
            assert due and time.monotonic() - put_at >= 5, "a delay ended early"
            expect("the next id", client.put(b"next", "mail"), deleted + 1)
        # The old server comes back as a standby.
        first.start().wait_until_standby()
        first.process.expect_log(f"leads {PREFIX}")


@case
def failover_by_term(program):
    with running(program, flags=LONG_LEASE) as cluster:
        first, second = cluster.servers
        client = cluster.haproxy.connect()
        jobs = [client.put(b"%d" % number, "mail") for number in range(100)]
        began = time.monotonic()
        first.process.signal(signal.SIGTERM)
        first.expect_exit(0)
        second.wait_until_active(patience=30)
        # The lease would have ended in a minute.
        assert time.monotonic() - began < 30, "the next server has waited for the end of the lease"
        cluster.haproxy.wait_until_answering()
        with cluster.haproxy.connect() as client:
            for number, job in enumerate(jobs):
                expect("a job", client.peek(f"peek {job}"), (job, b"%d" % number))


@case
def failover_again_and_again(program):
    with running(program, servers=3) as cluster:
        jobs = []
        for number in range(6):
            active = cluster.wait_for_active()
            with active.connect() as client:
                jobs.append(client.put(b"%d" % number, "mail"))
                found = [client.peek(f"peek {job}") for job in jobs]
            expect("the jobs", found, [(job, b"%d" % index) for index, job in enumerate(jobs)])
            active.process.signal([signal.SIGTERM, signal.SIGKILL][number % 2])
            active.process.wait()
            active.start()
        expect("the ids", jobs, sorted(jobs))


@case
def a_cut_after_a_standby_has_read(program):
    """A standby server reads the log while it waits. Another one leads first, cuts a batch that is not
    complete, and uses its chunk's number again: the standby must not use what it has read."""
    with running(program, servers=3, lease_ttl=5) as cluster:
        first = cluster.servers[0]
        with first.connect() as client:
            jobs = [client.put(b"%d" % number) for number in range(3)]
        first.kill()
        # While no server leads, as if the batch had come late. The others read it in the next seconds.
        key, value = max(cluster.etcd.items(f"{PREFIX}/log/").items())
        file, offset = struct.unpack("<IQ", value[:12])
        record = value[12:]
        next_key = b"%s%016x" % (key[:-16], int(key[-16:], 16) + 1)
        cluster.etcd.put(next_key, struct.pack("<IQ", file, offset + len(record)) + record[:40])
        for _ in range(2):
            active = cluster.wait_for_active()
            with active.connect() as client:
                jobs.append(client.put(b"%d" % len(jobs)))
                found = [client.peek(f"peek {job}") for job in jobs]
            expect("the jobs", found, [(job, b"%d" % index) for index, job in enumerate(jobs)])
            assert next_key in cluster.etcd.keys(f"{PREFIX}/log/"), "the number is not used again"
            active.process.signal(signal.SIGTERM)
            active.expect_exit(0)


@case
def stopped_beyond_the_lease(program):
    with running(program) as cluster:
        first, second = cluster.servers
        client = first.connect()
        kept = client.put(b"kept", "mail")
        # Some of these commands are read before the stop, the others are not.
        first.process.signal(signal.SIGSTOP)
        client.send(("put 0 0 60 5", b"wrong"), "list-tube-used", f"delete {kept}", "stats")
        second.wait_until_active()
        client.send("list-tube-used", ("put 0 0 60 5", b"wrong"))
        with second.connect() as other:
            expect("the job", other.peek(f"peek {kept}"), (kept, b"kept"))
            next_job = other.put(b"next", "mail")
        first.process.signal(signal.SIGCONT)
        log = first.expect_exit(NOT_LEADING)
        assert f"not leading any more" in log, log
        try:
            received = client.socket.recv(1000)
        except OSError:
            received = b""
        expect("bytes of the old server", received, b"")
        with second.connect() as other:
            expect("the jobs", jobs_of(other, [kept, next_job]),
                   {kept: (b"kept", "ready", 1024), next_job: (b"next", "ready", 1024)})
            expect("other jobs", other.facts("stats")["current-jobs-ready"], "2")
        first.start().wait_until_standby()


@case
def a_late_renewal(program):
    """An answer of etcd that is late does not make the lease longer than it is in etcd."""
    with running(program, lease_ttl=5) as cluster:
        first, second = cluster.servers
        history = History()
        failures = []
        observers = Observers(history, cluster.servers, failures.append)
        observers.start()
        wait_until("an answer", lambda: first.process.pid in history.answers)
        # A renewal is two requests. The first one reaches etcd within a second, and the lease ends 5 s after
        # that. Each answer comes 1.4 s late, and the next renewal does not reach etcd.
        cluster.proxies.delay(first.links, 1.4, [BACK])
        time.sleep(3)
        cluster.proxies.stall(first.links, [TO])
        time.sleep(1)
        cluster.proxies.stall(first.links)
        first.expect_exit(NOT_LEADING)
        wait_until("an answer of the other server", lambda: second.process.pid in history.answers)
        observers.stop()
        expect("failures of the observers", failures, [])
        Checker(history).check_answers()


@case
def cut_off_from_etcd(program):
    """The active server exits before its lease ends in etcd, whichever direction is cut."""
    for directions in (["to", "back"], ["to"], ["back"], None):
        with running(program) as cluster:
            first, second = cluster.servers
            with first.connect() as client:
                kept = client.put(b"kept", "mail")
                if directions is None:
                    cluster.proxies.cut(first.links)
                else:
                    cluster.proxies.stall(first.links, directions)
                client.send(("put 0 0 60 5", b"wrong"))
                first.expect_exit(NOT_LEADING)
                try:
                    expect("bytes of the old server", client.socket.recv(1000), b"")
                except OSError:
                    pass
            second.wait_until_active()
            with second.connect() as client:
                expect("the job", client.peek(f"peek {kept}"), (kept, b"kept"))
            cluster.proxies.heal(first.links)
            first.start().wait_until_standby()


@case
def a_minority_of_etcd_is_gone(program):
    # An election of etcd takes up to 2 s, and must not cost the lease.
    with running(program, lease_ttl=5) as cluster:
        first, _ = cluster.servers
        for node in cluster.etcd.nodes:
            # Two elections one after the other may cost it.
            wait_until("the lease is renewed", lambda: first.metric("beanstalkd_lease_seconds") > 3)
            node.kill()
            with first.connect() as client:
                client.put(b"x", "mail")
            node.start()
            cluster.etcd.wait_until_healthy()
        expect("the server", first.process.poll(), None)


@case
def a_majority_of_etcd_is_gone(program):
    with running(program) as cluster:
        first, second = cluster.servers
        with first.connect() as client:
            kept = client.put(b"kept", "mail")
        for node in cluster.etcd.nodes[:2]:
            node.kill()
        first.expect_exit(NOT_LEADING)
        expect("the standby", second.process.poll(), None)
        for node in cluster.etcd.nodes[:2]:
            node.start()
        second.wait_until_active()
        with second.connect() as client:
            expect("the job", client.peek(f"peek {kept}"), (kept, b"kept"))


@case
def leader_key_deleted(program):
    with running(program) as cluster:
        first, second = cluster.servers
        cluster.etcd.control("del", f"{PREFIX}/leader")
        log = first.expect_exit(NOT_LEADING)
        assert f"not leading any more" in log, log
        second.wait_until_active()


@case
def lease_revoked(program):
    with running(program, flags=LONG_LEASE) as cluster:
        first, second = cluster.servers
        lease = int(cluster.etcd.lease_of(f"{PREFIX}/leader"))
        cluster.etcd.control("lease", "revoke", f"{lease:x}")
        first.expect_exit(NOT_LEADING)
        second.wait_until_active(patience=30)


@case
def standby(program):
    with running(program) as cluster:
        first, second = cluster.servers
        expect("the standby answers", second.answers(), False)
        try:
            socket.create_connection((second.address, second.port), timeout=5).close()
            raise AssertionError("the standby accepts connections")
        except ConnectionRefusedError:
            pass
        for server, is_leading in (first, 1), (second, 0):
            expect("/healthz", server.status("/healthz"), 200)
            expect("/readyz", server.status("/readyz"), 200 if is_leading else 503)
            expect("beanstalkd_leading", server.metric("beanstalkd_leading"), is_leading)
        lease = first.metric("beanstalkd_lease_seconds")
        assert 0 < lease <= cluster.lease_ttl, f"{lease} s of the lease are left"
        with first.connect() as client:
            client.put(b"x" * 1000)
        assert first.metric("beanstalkd_etcd_written_bytes_total") > 1000
        expect("bytes without an acknowledgement", first.metric("beanstalkd_etcd_unacknowledged_bytes"), 0)
        assert first.metric("beanstalkd_etcd_waiting_seconds") >= 0
        assert first.metric("beanstalkd_etcd_transaction_seconds_count") > 0
        # The standby ends at once, and nothing happens to the active server.
        second.process.signal(signal.SIGTERM)
        second.expect_exit(0)
        expect("the active server", first.is_active(), True)


@case
def etcd_does_not_answer_for_a_while(program):
    """Health checks are answered meanwhile, memory is bounded, and every reply comes in the end."""
    with running(program, flags=LONG_LEASE) as cluster:
        first, _ = cluster.servers
        first.connect().put(b"before")
        cluster.proxies.stall(first.links)
        body = b"x" * 60_000
        puts = encode(("put 0 0 60 %d" % len(body), body)) * 20
        clients = [first.connect() for _ in range(15)]
        sent = {}
        for client in clients:
            client.socket.setblocking(False)
            sent[client] = 0
        # Until no client can send more.
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 2 and min(sent.values()) < 20 * len(puts):
            for client in clients:
                with contextlib.suppress(BlockingIOError):
                    sent[client] += client.socket.send(puts[sent[client] % len(puts):])
                    quiet_since = time.monotonic()
        expect("/healthz", first.status("/healthz"), 200)
        assert first.metric("beanstalkd_etcd_waiting_seconds") > 1
        waiting = first.metric("beanstalkd_etcd_unacknowledged_bytes")
        assert 0 < waiting < 20e6, f"{waiting} bytes wait"
        with open(f"/proc/{first.process.pid}/status", encoding="ascii") as status:
            resident = int(re.search(r"VmRSS:\s+(\d+)", status.read())[1])
        # One body and some input a connection, and what waits for etcd.
        assert resident < 60_000, f"{resident} KiB of memory"
        for client in clients:
            client.socket.settimeout(0.01)
            try:
                line = client.socket.recv(100)
                raise AssertionError(f"a reply before etcd has answered: {line}")
            except TimeoutError:
                pass
        cluster.proxies.heal(first.links)
        for client in clients:
            client.socket.settimeout(PATIENCE_S)
            command = len(puts) // 20
            for _ in range(sent[client] // command):
                expect("a reply", client.reply()[0][0], "INSERTED")
            client.close()


@case
def jobs_larger_than_a_chunk(program):
    with running(program, flags=["-z", "8000000"]) as cluster:
        first, second = cluster.servers
        body = random.Random(1).randbytes(5_000_000)
        with first.connect() as client:
            jobs = [client.put(body[number:]) for number in range(3)]
        first.kill()
        second.wait_until_active()
        with second.connect() as client:
            for number, job in enumerate(jobs):
                assert client.peek(f"peek {job}") == (job, body[number:]), "a large body has changed"


@case
def greenstalk_workers(program):
    python = os.path.join(HERE, "..", "..", "target", "clients", "bin", "python")
    if not os.path.exists(python):
        python = sys.executable
    if subprocess.run([python, "-c", "import greenstalk"], stderr=subprocess.DEVNULL).returncode:
        if os.environ.get("CI"):
            raise AssertionError("greenstalk is not installed")
        return "SKIPPED: greenstalk is not installed"
    with running(program) as cluster:
        host, port = cluster.haproxy.address
        script = os.path.join(HERE, "greenstalk_workers.py")
        workers = cluster.workspace.start("workers", [python, "-B", script, host, str(port)])
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            lines = workers.text().count("done")
            wait_until("the workers work", lambda: workers.poll() is not None
                       or workers.text().count("done") >= lines + 20)
            active = cluster.wait_for_active()
            active.process.signal(number)
            active.process.wait()
            active.start()
        expect(f"the workers: {workers.tail()}", workers.wait(), 0)


# What servers refuse.

def expect_refused(server, words, status=REFUSED):
    log = server.start().expect_exit(status)
    assert any(word in log for word in words), f"none of {words} in the log:\n{log}"
    return log


@case
def default_port_and_service_manager(program):
    with Workspace() as workspace:
        etcd = Etcd(workspace, nodes=1)
        etcd.nodes[0].client_port = 2379
        etcd.start()
        path = workspace.path("notify")
        notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notices.bind(path)
        notices.settimeout(PATIENCE_S)
        url = f"etcd://{etcd.nodes[0].address}{PREFIX}"
        flags = ["--lease-ttl", "2"]
        first = Server(workspace, program, "first", url, flags).start().wait_until_active()
        second = Server(workspace, program, "second", url, flags, {"NOTIFY_SOCKET": path}).start()

        def expect_notice(*words):
            while True:
                notice = notices.recv(10_000).decode()
                if all(word in notice for word in words):
                    return
        expect_notice("READY=1", "standing by")
        first.kill()
        second.wait_until_active()
        expect_notice("STATUS=", "jobs")
        notices.close()


@case
def different_file_sizes(program):
    with one_node(program) as (etcd, new_server):
        server = new_server(flags=["-s", "1048576"]).start().wait_until_active()
        with server.connect() as client:
            client.put(b"kept")
        before = etcd.items(PREFIX)
        expect_refused(new_server("other", flags=["-s", "2097152"]), ["1048576"])
        expect("the keys", etcd.items(PREFIX), before)
        server.process.signal(signal.SIGTERM)
        server.expect_exit(0)
        before = etcd.items(PREFIX)
        expect_refused(new_server("other", flags=["-s", "2097152"]), ["1048576"])
        expect("the keys", etcd.items(PREFIX), before)
        new_server("same", flags=["-s", "1048576"]).start().wait_until_active()


@case
def foreign_prefix(program):
    for key, value in ((f"{PREFIX}/config", "x"), (f"{PREFIX}/format", "something else\n"),
                       (f"{PREFIX}/log/0000000000000001", "x"),
                       (f"{PREFIX}/format", "beanstalkd-binlog 2 file-size 10485760\n")):
        with one_node(program) as (etcd, new_server):
            etcd.put(key, value)
            expect_refused(new_server(), [PREFIX])
            expect("the keys", etcd.items("/"), {key.encode(): value.encode()})


@case
def prefixes_next_to_each_other(program):
    with one_node(program) as (etcd, new_server):
        etcd.put(f"{PREFIX}2/config", "x")
        etcd.put(f"{PREFIX}-config", "x")
        etcd.put(PREFIX, "x")
        names = ("/jobs", "/team/jobs", "/team/mail")
        servers = [new_server(f"server{index}", name) for index, name in enumerate(names)]
        for index, server in enumerate(servers):
            server.start().wait_until_active()
            with server.connect() as client:
                expect("the first id", client.put(b"%d" % index), 1)
        for index, server in enumerate(servers):
            server.kill()
            server.start().wait_until_active()
            with server.connect() as client:
                expect("the job", client.peek("peek 1"), (1, b"%d" % index))
        expect("a foreign key", etcd.items(f"{PREFIX}2"), {b"/jobs2/config": b"x"})


@case
def usage(program):
    url = "etcd://127.0.0.1:1/jobs"
    for flags in (
        ["-b", url, "-f", "0"], ["-b", url, "-f50"], ["-b", url, "-F"],
        ["-b", "etcd://127.0.0.1:1"], ["-b", "etcd://127.0.0.1:1/"], ["-b", "etcd:///jobs"],
        ["-b", "etcd://127.0.0.1:x/jobs"], ["-b", "etcd://127.0.0.1:99999/jobs"],
        ["-b", "etcd://127.0.0.1:1,/jobs"],
        ["-b", url, "--lease-ttl", "1"], ["-b", url, "--lease-ttl", "61"],
        ["-b", url, "--lease-ttl", "x"], ["-b", url, "--lease-ttl"],
        ["-b", url, "--binlog-limit", "x"],
        ["-b", "etcds://127.0.0.1:1/jobs"],
        ["-b", url, "--etcd-cert", "/dev/null"], ["-b", url, "--etcd-key", "/dev/null"],
        ["-b", url, "-u", "nobody", "-p", "1000"],
        ["--import", "/tmp"], ["--export", "/tmp"], ["-b", "/tmp", "--import", "/tmp"],
    ):
        text = run(program, *flags, expect=USAGE)
        assert text.startswith("beanstalkd: "), f"{flags}: {text}"


@case
def inherited_sockets(program):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = 'exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@"'
        done = subprocess.run(["sh", "-c", script, program, "-b", "etcd://127.0.0.1:1/jobs"],
                              stdin=listener, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode not in (0, -signal.SIGKILL) and done.stderr, done
    expect("the exit status", done.returncode, USAGE)


@case
def etcd_unreachable_at_the_start(program):
    with Workspace() as workspace:
        etcd = Etcd(workspace, nodes=1)
        server = Server(workspace, program, "server", etcd_url(etcd.endpoints(), PREFIX), ["--lease-ttl", "2"])
        server.start().wait_until_standby()
        address = f"{etcd.nodes[0].address}:{etcd.nodes[0].client_port}"
        wait_until("two lines about etcd",
                   lambda: sum("etcd" in line and "WARN" in line
                               for line in server.process.text().splitlines()) >= 2)
        assert address in server.process.text(), server.process.text()
        etcd.start()
        server.wait_until_active()
        with server.connect() as client:
            client.put(b"x")


@case
def passwords(program):
    # A password is checked in a few ms, and not in 100 ms as with the default cost.
    with one_node(program, ["--auth-token-ttl", "4", "--bcrypt-cost", "4"]) as (etcd, new_server):
        etcd.control("user", "add", "root:secret")
        etcd.control("user", "grant-role", "root", "root")
        # A user that may use this prefix only.
        etcd.control("role", "add", "queue")
        etcd.control("role", "grant-permission", "queue", "--prefix=true", "readwrite", f"{PREFIX}/")
        etcd.control("user", "add", "queue:pass:word")
        etcd.control("user", "grant-role", "queue", "queue")
        etcd.control("auth", "enable")
        etcd.root = ("root", "secret")

        def server(name, user, password, prefix=PREFIX):
            environment = {}
            if user is not None:
                environment["BEANSTALKD_ETCD_USER"] = user
            if password is not None:
                environment["BEANSTALKD_ETCD_PASSWORD"] = password
            return new_server(name, prefix, ["--lease-ttl", "5"], environment)
        for user, password in (None, None), ("queue", "wrong"), ("nobody", "pass:word"):
            expect_refused(server("refused", user, password), ["etcd"])
        expect_refused(server("elsewhere", "queue", "pass:word", "/other"), ["etcd"])
        expect("keys", etcd.items("/"), {})
        active = server("right", "queue", "pass:word").start().wait_until_active()
        standby = server("second", "queue", "pass:word").start().wait_until_standby()
        with active.connect() as client:
            kept = client.put(b"kept")
            # Longer than a token is valid.
            time.sleep(10)
            client.put(b"later")
            # The passwords are not in the arguments of the process, and not in the log.
            assert "pass:word" not in active.process.text()
        active.kill()
        standby.wait_until_active()
        with standby.connect() as client:
            expect("the job", client.peek(f"peek {kept}"), (kept, b"kept"))
        # etcd forgets its tokens when it starts again.
        etcd.nodes[0].kill()
        etcd.nodes[0].start()
        etcd.wait_until_healthy()

        def works():
            if standby.process.poll() is not None:
                expect("the exit status", standby.process.poll(), NOT_LEADING)
                standby.start()
            try:
                with standby.connect(patience=10) as client:
                    return client.put(b"again")
            except Closed:
                return None
        wait_until("a put works after a restart of etcd", works)


@case
def certificates(program):
    with one_node(program, tls=True) as (etcd, new_server):
        files = etcd.tls.file
        ca = ["--etcd-ca", files("ca.crt")]
        client = ["--etcd-cert", files("client.crt"), "--etcd-key", files("client.key")]
        stranger = ["--etcd-cert", files("stranger.crt"), "--etcd-key", files("stranger.key")]
        for name, flags in (("no-certificate", ca), ("stranger", [*ca, *stranger]),
                            ("other-authority", ["--etcd-ca", files("other-ca.crt"), *client])):
            expect_refused(new_server(name, flags=flags, scheme="etcds"), ["etcd"])
        for name in "missing", "ca.key":
            log = new_server("bad-file", flags=["--etcd-ca", files(name), *client], scheme="etcds").start()
            status = log.process.wait()
            assert status in (USAGE, REFUSED) and name in log.process.text(), (status, log.process.text())
        server = new_server("right", flags=[*ca, *client], scheme="etcds").start().wait_until_active()
        with server.connect() as connection:
            kept = connection.put(b"kept")
        server.kill()
        server.start().wait_until_active()
        with server.connect() as connection:
            expect("the job", connection.peek(f"peek {kept}"), (kept, b"kept"))


# Space.

@case
def quota_of_etcd_reached(program):
    with one_node(program, ["--quota-backend-bytes", str(24 << 20)]) as (etcd, new_server):
        server = new_server(flags=["-s", "1048576"]).start().wait_until_active()
        jobs, refused = {}, 0
        # Others fill etcd too, until it has no space.
        with server.connect(patience=10) as client:
            for number in range(20):
                body = b"%d" % number
                jobs[client.put(body)] = body
            fill_etcd(etcd)
            try:
                for number in range(200):
                    body = b"%d" % number * 20000
                    words = client.ask(f"put 0 0 60 {len(body)}", body)
                    if words[0] == "INSERTED":
                        jobs[int(words[1])] = body
                    else:
                        expect("the reply", words, ["OUT_OF_MEMORY"])
                        refused += 1
                        if refused == 3:
                            break
            except Closed:
                pass
        wait_until("a line about the quota", lambda: "quota" in server.process.text()
                   or "space" in server.process.text())
        free_etcd(etcd)

        def works():
            if server.process.poll() is not None:
                expect("the exit status", server.process.poll(), NOT_LEADING)
                server.start()
            try:
                with server.connect(patience=10) as client:
                    return client.ask("put 0 0 60 1", b"x")[0] == "INSERTED"
            except Closed:
                return False
        wait_until("a put works after the quota", works)
        with server.connect() as client:
            for job, body in jobs.items():
                expect("a job", client.peek(f"peek {job}"), (job, body))


def fill_etcd(etcd):
    """Fills etcd up to its quota with a key that is not ours."""
    from etcd import EtcdError
    for _ in range(200):
        try:
            etcd.put("/other", os.urandom(400_000))
        except EtcdError as error:
            assert "space" in str(error), error
            return
    raise AssertionError("etcd has no quota")


def free_etcd(etcd):
    etcd.control("del", "/other")
    status = etcd.nodes[0].request("maintenance/status", {})
    etcd.control("compact", status["header"]["revision"])
    etcd.control("defrag")
    etcd.control("alarm", "disarm")


@case
def binlog_limit(program):
    limit = 4 << 20
    with one_node(program) as (etcd, new_server):
        flags = ["-s", "262144", "--binlog-limit", str(limit)]
        server = new_server(flags=flags).start().wait_until_active()
        with server.connect() as client:
            for _ in range(3):
                jobs = []
                while (words := client.ask("put 0 0 600 30000", b"x" * 30000))[0] == "INSERTED":
                    jobs.append(int(words[1]))
                    assert len(jobs) * 30000 < 2 * limit, "no limit"
                expect("the reply", words, ["OUT_OF_MEMORY"])
                assert len(jobs) * 30000 > limit / 3, f"only {len(jobs)} jobs in {limit} bytes"
                size = sum(len(value) for value in etcd.items(f"{PREFIX}/log/").values())
                assert size <= limit * 1.1, f"{size} bytes in etcd"
                for job in jobs:
                    client.must("DELETED", f"delete {job}")
        server.kill()
        server.start().wait_until_active()
        with server.connect() as client:
            expect("jobs", client.facts("stats")["current-jobs-ready"], "0")


@case
def space_is_given_back(program):
    """A queue of few jobs stays small in etcd, whatever passes through it."""
    with one_node(program) as (etcd, new_server):
        server = new_server(flags=["-s", "65536"]).start().wait_until_active()
        with server.connect() as client:
            kept = [client.put(b"kept %d" % number) for number in range(50)]
            for _ in range(60):
                client.send(*[("put 5000 0 60 1000", b"x" * 1000)] * 50)
                jobs = [client.reply()[0][1] for _ in range(50)]
                client.send(*[f"delete {job}" for job in jobs])
                for _ in jobs:
                    expect("a reply", client.reply()[0], ["DELETED"])
            keys = etcd.items(PREFIX)
            size = sum(map(len, keys.values()))
            assert size < 12 * 65536, f"{size} bytes in {len(keys)} keys"
            files = [key for key in keys if key.startswith(b"/jobs/file/")]
            assert len(files) < 12, files
        server.kill()
        server.start().wait_until_active()
        with server.connect() as client:
            for number, job in enumerate(kept):
                expect("a job", client.peek(f"peek {job}"), (job, b"kept %d" % number))


# Tools.

def c_beanstalkd():
    """Returns the path of C beanstalkd, or `None`."""
    program = os.environ.get("C_BEANSTALKD", "/usr/bin/beanstalkd")
    if not os.path.exists(program):
        return None
    version = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=PATIENCE_S).stdout
    return program if version.startswith("beanstalkd") and "server" not in version else None


def start_on_directory(workspace, program, directory, name):
    """Starts a server on a directory; returns its address as HOST:PORT, and its process."""
    host = workspace.address()
    port = workspace.port(host)
    # C beanstalkd drops a job of the largest size that it is to read without this.
    arguments = [program, "-l", host, "-p", str(port), "-b", directory, "-z", "65537"]
    process = workspace.start(name, arguments)

    def accepts():
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=5).close()
            return True
        return False
    wait_until(f"{name} accepts connections", accepts)
    return f"{host}:{port}", process


def run_jobs_script(workspace, manifest, address, verb):
    """Runs `fill`, `work` or `expect` of the script that describes every kind of job."""
    arguments = [sys.executable, "-B", JOBS_SCRIPT, manifest, address, verb]
    if verb == "expect":
        run(*arguments)
        return
    # It holds a job until the server ends.
    word = {"fill": "filled", "work": "worked"}[verb]
    process = workspace.start(verb, arguments, log=workspace.path(f"{verb}-{time.monotonic()}.log"))
    wait_until(word, lambda: word in process.text() or process.poll() is not None)
    assert word in process.text(), process.text()


@case
def import_and_export(program):
    """Moves every kind of job from C beanstalkd into etcd and back."""
    original = c_beanstalkd()
    with one_node(program) as (etcd, new_server):
        workspace = etcd.workspace
        manifest, source = workspace.path("manifest"), workspace.path("source")
        os.mkdir(source)
        address, process = start_on_directory(workspace, original or program, source, "original")
        run_jobs_script(workspace, manifest, address, "fill")
        process.kill()
        files = {name: open(os.path.join(source, name), "rb").read() for name in os.listdir(source)}
        server = new_server()
        run(program, "-b", server.binlog, "--import", source)
        expect("the source", {name: open(os.path.join(source, name), "rb").read()
                              for name in os.listdir(source)}, files)
        server.start().wait_until_active()
        address = f"{server.address}:{server.port}"
        run_jobs_script(workspace, manifest, address, "expect")
        before = etcd.items(PREFIX)
        run(program, "-b", server.binlog, "--import", source, expect=REFUSED)
        expect("the keys", etcd.items(PREFIX), before)
        run_jobs_script(workspace, manifest, address, "work")
        server.process.signal(signal.SIGTERM)
        server.expect_exit(0)
        for number, reader in enumerate([program, original]):
            if reader is None:
                continue
            target = workspace.path(f"target{number}")
            os.mkdir(target)
            run(program, "-b", server.binlog, "--export", target)
            address, process = start_on_directory(workspace, reader, target, f"reader{number}")
            run_jobs_script(workspace, manifest, address, "expect")
            process.kill()
            run(program, "-b", target, "--check")
        # Nothing is written into a directory that has a binlog.
        text = run(program, "-b", server.binlog, "--export", workspace.path("target0"), expect=REFUSED)
        assert "target0" in text, text
        if original is None:
            return "SKIPPED in part: C beanstalkd is not installed"


@case
def check_and_dump(program):
    with one_node(program) as (etcd, new_server):
        server = new_server().start().wait_until_active()
        with server.connect() as client:
            jobs = {client.put(body): body.decode() for body in (b"a", b"b", b"c")}
            client.must("DELETED", f"delete {max(jobs)}")
            del jobs[max(jobs)]
            before = etcd.items(PREFIX)
            text = run(program, "-b", server.binlog, "--check")
            assert "2 ready" in text, text
            lines = run(program, "-b", server.binlog, "--dump").splitlines()
            dumped = {job["id"]: job["body"] for job in map(json.loads, lines)}
            expect("the dump", dumped, jobs)
            expect("the keys", etcd.items(PREFIX), before)
            # Next to a server that writes.
            for _ in range(20):
                client.send(*[("put 5000 0 60 1000", b"x" * 1000)] * 200)
                check = subprocess.run([program, "-b", server.binlog, "--check"], capture_output=True,
                                       text=True, timeout=PATIENCE_S)
                expect(f"the check: {check.stdout}{check.stderr}", check.returncode, 0)
                for _ in range(200):
                    expect("a reply", client.reply()[0][0], "INSERTED")
        expect("the active server", server.process.poll(), None)
        run(program, "-b", etcd_url(etcd.endpoints(), "/empty"), "--check", expect=REFUSED)
        expect("keys of the empty prefix", etcd.items("/empty"), {})


@case
def damage(program):
    """A file that is damaged in etcd is reported and set aside, and the intact jobs of all are kept."""
    for damaged in 0, 20, 38:
        with one_node(program) as (etcd, new_server):
            # Jobs of 8 KiB, several files.
            server = new_server(flags=["-s", "65536"]).start().wait_until_active()
            bodies = [b"body of job %d. " % number * 500 for number in range(40)]
            with server.connect() as client:
                jobs = [client.put(body) for body in bodies]
            server.process.signal(signal.SIGTERM)
            server.expect_exit(0)
            assert len(etcd.keys(f"{PREFIX}/file/")) > 3
            word = b"body of job %d. " % damaged
            chunks = {key: value for key, value in etcd.items(f"{PREFIX}/log/").items() if word in value}
            key, value = chunks.popitem()
            etcd.put(key, value.replace(word, word.upper(), 1))
            run(program, "-b", server.binlog, "--check", expect=1)
            expected = [None if number == damaged else (job, bodies[number])
                        for number, job in enumerate(jobs)]
            for _ in range(3):
                server.start().wait_until_active()
                with server.connect() as client:
                    found = [client.peek(f"peek {job}") for job in jobs]
                    wrong = [job for job, one, other in zip(jobs, found, expected) if one != other]
                    expect(f"wrong jobs after damage of job {damaged + 1}", wrong, [])
                    expected.append((client.put(b"new"), b"new"))
                    jobs.append(expected[-1][0])
                server.kill()
            server.start().wait_until_active()
            assert etcd.items(f"{PREFIX}/damaged/"), "the damaged file is not set aside"


@case
def killed_while_a_damaged_file_is_set_aside(program):
    with one_node(program) as (etcd, new_server):
        # A chunk for each job, several hundred in a file.
        server = new_server(flags=["-s", "131072"]).start().wait_until_active()
        bodies = [b"body of job %d" % number for number in range(2500)]
        with server.connect() as client:
            jobs = [client.put(body) for body in bodies]
        server.process.signal(signal.SIGTERM)
        server.expect_exit(0)
        files = sorted(etcd.keys(f"{PREFIX}/file/"))
        assert len(files) >= 3, files
        damaged = len(jobs) // 2
        key, value = next((key, value) for key, value in etcd.items(f"{PREFIX}/log/").items()
                          if bodies[damaged] in value)
        etcd.put(key, value.replace(b"body", b"BODY"))
        expected = [None if number == damaged else (job, bodies[number]) for number, job in enumerate(jobs)]
        server.start()
        etcd.wait_for_change(f"{PREFIX}/file/", ["NOPUT"], patience=20)
        server.kill()
        server.start().wait_until_active()
        with server.connect() as client:
            found = [client.peek(f"peek {job}") for job in jobs]
        wrong = [job for job, one, other in zip(jobs, found, expected) if one != other]
        expect("wrong jobs", wrong, [])


@case
def a_chunk_is_missing(program):
    """No server writes such a log. The server does not start, and changes nothing."""
    with one_node(program) as (etcd, new_server):
        server = new_server().start().wait_until_active()
        with server.connect() as client:
            for number in range(9):
                client.put(b"body %d" % number)
        server.kill()
        keys = sorted(etcd.keys(f"{PREFIX}/log/"))
        assert len(keys) >= 9, keys
        etcd.control("del", keys[len(keys) // 2].decode())
        run(program, "-b", server.binlog, "--check", expect=1)
        before = etcd.items(f"{PREFIX}/log/")
        log = server.start().expect_exit(1)
        assert "missing" in log, log
        expect("the chunks", etcd.items(f"{PREFIX}/log/"), before)


@case
def random_faults(program):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"   SEED={seed}", flush=True)
    figures = chaos.run_chaos(program, float(os.environ.get("FOR_SECONDS") or 120), seed, 3,
                              lambda text: print(f"   {text}", flush=True))
    return figures


def main():
    program = os.path.abspath(sys.argv[1])
    names = sys.argv[2:]
    if "--list" in names:
        print("\n".join(CASES))
        return
    failed = []
    for name in names or CASES:
        began = time.monotonic()
        try:
            note = CASES[name](program)
        except Exception as failure:
            # These have all that was observed in their text; other errors are those of the test.
            if not isinstance(failure, (AssertionError, Violation)):
                traceback.print_exc()
            print(f"FAILED {name}: {failure}", flush=True)
            failed.append(name)
            continue
        print(f"ok {name} ({time.monotonic() - began:.1f} s)" + (f"\n{note}" if note else ""), flush=True)
    if failed:
        print(f"{len(failed)} of {len(names or CASES)} cases failed: {', '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()

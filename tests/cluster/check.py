"""Tests of a queue in etcd with real processes.

Use: check.py SERVER [CASE...]. `--list` prints the names of the cases: those of this file, each fault of
faults.py, and random-faults, which FOR_SECONDS and SEED in the environment are for. Each case of this file has
a cluster of its own.
"""
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "packages"))
import jobs as all_kinds
from workspace import PATIENCE_S, wait_until
from beanstalk import Closed, Connection, encode
from chaos import run_chaos, run_each_once
from cluster import NOT_LEADING, NO_SOCKET, REFUSED, USAGE, Cluster, answers, etcd_url, run, start_haproxy
from etcd import Etcd, EtcdError, encode as base64_of
from faults import FAULTS
from history import Violation

# Each case, and the options of its cluster. Proxies are between three nodes and the servers.
CASES = {}


def case(nodes=1, **options):
    def add(function):
        CASES[function.__name__.replace("_", "-")] = function, {"nodes": nodes, "has_proxies": nodes == 3, **options}
        return function
    return add


def expect(what, found, expected):
    assert found == expected, f"{what}: {found!r} instead of {expected!r}"


def put_jobs(server, bodies):
    """Puts a job for each body; returns the bodies by id."""
    with server.connect() as client:
        return {client.put(body): body for body in bodies}


def expect_jobs(server, jobs):
    """Each job, by its id, must have this body, or be gone."""
    with server.connect() as client:
        found = {job: client.peek(f"peek {job}") for job in jobs}
    expect("wrong jobs", [job for job, body in jobs.items() if found[job] != (body and (job, body))], [])


@contextlib.contextmanager
def nothing_written(cluster):
    before = cluster.items()
    yield
    expect("the keys", cluster.items(), before)


def expect_refused(server, word="etcd"):
    log = server.start().expect_exit(REFUSED)
    assert word in log, f"no {word} in the log:\n{log}"


def put_until_it_works(server):
    """Puts a job, again and again; starts the server again when it has ended."""
    def works():
        if server.process.poll() is not None:
            server.expect_exit(NOT_LEADING)
            server.start()
        with contextlib.suppress(Closed), server.connect(10) as client:
            return client.ask("put 0 0 60 1", b"x")[0] == "INSERTED"
    wait_until("a put works again", works)


# Servers that follow one another.

@case(nodes=3)
def a_standby_takes_over(cluster):
    """Conversations on etcd show what becomes of each kind of job when a server ends."""
    first, second = cluster.start(2, flags=["-z", "8000000"])
    expect_standby(first, second)
    haproxy = start_haproxy(cluster)
    # More than a chunk.
    jobs = put_jobs(first, [random.Random(1).randbytes(5_000_000)])
    first.kill()
    second.wait_until_active().wait_for_log(f"leading {cluster.prefix}")
    wait_until("a server answers through HAProxy", lambda: answers(haproxy))
    expect_jobs(second, jobs)
    first.start().wait_until_standby().wait_for_log(f"leads {cluster.prefix}")
    # A standby ends at once, and nothing happens to the active server.
    first.terminate()
    expect("the active server", second.is_active(), True)


def expect_standby(active, standby):
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(standby.address, timeout=5).close()
        raise AssertionError("the standby accepts connections")
    for server, is_leading in (active, 1), (standby, 0):
        expect("/healthz", server.http("/healthz")[0], 200)
        expect("/readyz", server.http("/readyz")[0], 200 if is_leading else 503)
        expect("beanstalkd_leading", server.metric("beanstalkd_leading"), is_leading)
    assert 0 < active.metric("beanstalkd_lease_seconds") <= 2, "the lease is 2 s"
    put_jobs(active, [b"x" * 1000])
    assert active.metric("beanstalkd_etcd_written_bytes_total") > 1000
    expect("bytes without an acknowledgement", active.metric("beanstalkd_etcd_unacknowledged_bytes"), 0)
    assert active.metric("beanstalkd_etcd_waiting_seconds") >= 0
    assert active.metric("beanstalkd_etcd_transaction_seconds_count") > 0


@case(nodes=3)
def a_cut_after_a_standby_has_read(cluster):
    """A standby server reads the log while it waits. Another one leads first, and cuts a batch that is
    not complete: the standby must not use what it has read."""
    first, *_ = cluster.start(3, flags=["--lease-ttl", "5"])
    jobs = put_jobs(first, [b"1", b"2", b"3"])
    first.kill()
    # While no server leads, as if the batch had come late. The others read it in the next seconds.
    key, value = max(cluster.items("/log/").items())
    file, offset = struct.unpack("<IQ", value[:12])
    record = value[12:]
    next_key = b"%s%016x" % (key[:-16], int(key[-16:], 16) + 1)
    cluster.etcd.put(next_key, struct.pack("<IQ", file, offset + len(record)) + record[:40])
    for _ in range(2):
        active = cluster.wait_for_active()
        jobs |= put_jobs(active, [b"next"])
        expect_jobs(active, jobs)
        active.terminate()


@case(nodes=3)
def etcd_does_not_answer_for_a_while(cluster):
    """Health checks are answered meanwhile, memory is bounded, and every reply comes in the end."""
    server = cluster.start(flags=["--lease-ttl", "60"])
    put_jobs(server, [b"before"])
    cluster.proxies.stall(server.links)
    body = b"x" * 60_000
    put = encode((f"put 0 0 60 {len(body)}", body))
    clients = [server.connect() for _ in range(15)]
    sent = {client: 0 for client in clients}
    for client in clients:
        client.socket.setblocking(False)
    # Until no client can send more.
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 2 and min(sent.values()) < 400 * len(put):
        for client in clients:
            with contextlib.suppress(BlockingIOError):
                sent[client] += client.socket.send(put[sent[client] % len(put):])
                quiet_since = time.monotonic()
    expect("/healthz", server.http("/healthz")[0], 200)
    assert server.metric("beanstalkd_etcd_waiting_seconds") > 1
    waiting = server.metric("beanstalkd_etcd_unacknowledged_bytes")
    assert 0 < waiting < 20e6, f"{waiting} bytes wait"
    with open(f"/proc/{server.process.pid}/status", encoding="ascii") as status:
        resident_kib = int(re.search(r"VmRSS:\s+(\d+)", status.read())[1])
    # One body and some input a connection, and what waits for etcd.
    assert resident_kib < 60_000, f"{resident_kib} KiB of memory"
    for client in clients:
        assert not client.is_closed(), "a connection is closed"
        with contextlib.suppress(BlockingIOError):
            raise AssertionError(f"a reply before etcd has answered: {client.socket.recv(100)}")
    cluster.proxies.heal(server.links)
    for client in clients:
        client.socket.settimeout(PATIENCE_S)
        for _ in range(sent[client] // len(put)):
            expect("a reply", client.reply()[0][0], "INSERTED")
        client.close()


# What servers refuse, and how they reach etcd.

@case()
def etcd_is_late_and_has_the_default_port(cluster):
    """Servers start before etcd, and report to the service manager."""
    etcd = Etcd(cluster.workspace, nodes=1)
    etcd.nodes[0].address = etcd.nodes[0].host, 2379
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(cluster.workspace.path("notify"))
        notices.settimeout(PATIENCE_S)

        def expect_notice(*words):
            notice = ""
            while not all(word in notice for word in words):
                notice = notices.recv(10_000).decode()
        first = cluster.new_server()
        second = cluster.new_server(environment={"NOTIFY_SOCKET": notices.getsockname()})
        first.binlog = second.binlog = f"etcd://{etcd.nodes[0].host}{cluster.prefix}"
        first.start().wait_until_standby().wait_for("it logs two lines about etcd", lambda: sum(
            "etcd" in line and "WARN" in line for line in first.process.text().splitlines()) >= 2)
        first.wait_for_log("%s:%d" % etcd.nodes[0].address)
        etcd.start()
        put_until_it_works(first.wait_until_active())
        second.start()
        expect_notice("READY=1", "standing by")
        first.kill()
        second.wait_until_active()
        expect_notice("STATUS=", " job")
    etcd.nodes[0].process.kill()


@case()
def a_port_that_is_taken(cluster):
    """A server that would stand by finds it at its start, not at a failover."""
    active, standby = cluster.start(2)
    standby.terminate()
    with socket.create_server(standby.address):
        log = standby.start().expect_exit(NO_SOCKET)
        assert "in use" in log, log
    standby.start().wait_until_standby()
    expect_standby(active, standby)


@case()
def foreign_prefix(cluster):
    for key, value in (("config", "x"), ("format", "something else\n"), ("log/0000000000000001", "x"),
                       ("format", "beanstalkd-binlog 2 file-size 10485760\n")):
        cluster.prefix += "-"
        cluster.etcd.put(f"{cluster.prefix}/{key}", value)
        with nothing_written(cluster):
            expect_refused(cluster.new_server(), cluster.prefix)
    # Another size of files, next to an active server.
    cluster.prefix += "-"
    put_jobs(cluster.start(flags=["-s", "1048576"]), [b"kept"])
    with nothing_written(cluster):
        expect_refused(cluster.new_server(["-s", "2097152"]), "1048576")


@case()
def prefixes_next_to_each_other(cluster):
    jobs = f"{cluster.prefix}/jobs"
    foreign = {f"{jobs}2/config".encode(): b"x", f"{jobs}-config".encode(): b"x", jobs.encode(): b"x"}
    for key, value in foreign.items():
        cluster.etcd.put(key, value)
    bodies = {}
    for name in "/jobs", "/team/jobs", "/team/mail":
        cluster.prefix = jobs.removesuffix("/jobs") + name
        server = cluster.start()
        bodies[server] = put_jobs(server, [name.encode()])
        expect("the first id", list(bodies[server]), [1])
    for server, body in bodies.items():
        expect_jobs(server.restart(), body)
    found = cluster.etcd.items(jobs)
    expect("foreign keys", {key: found.get(key) for key in foreign}, foreign)


@case()
def usage(cluster):
    url = "etcd://127.0.0.1:1/jobs"
    for flags in (
        ["-b", url, "-f", "0"], ["-b", url, "-f50"], ["-b", url, "-F"],
        ["-b", "etcd://127.0.0.1:1"],
        ["-b", url, "--lease-ttl", "1"], ["-b", url, "--lease-ttl", "61"],
        ["-b", url, "--lease-ttl", "x"], ["-b", url, "--lease-ttl"],
        ["-b", url, "--binlog-limit", "x"],
        ["-b", "etcds://127.0.0.1:1/jobs"],
        ["-b", url, "--etcd-cert", "/dev/null"], ["-b", url, "--etcd-key", "/dev/null"],
        ["-b", url, "-u", "nobody", "-p", "1000"],
        ["--import", "/tmp"], ["--export", "/tmp"], ["-b", "/tmp", "--import", "/tmp"],
    ):
        text = run(cluster.program, *flags, expect=USAGE)
        assert text.startswith("beanstalkd: ") and "Try 'beanstalkd --help'." in text, f"{flags}: {text}"
    # A socket of the service manager.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = 'exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@"'
        done = subprocess.run(["sh", "-c", script, cluster.program, "-b", url], stdin=listener,
                              capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == USAGE and done.stderr, done


# A password is checked in a few ms, and not in 100 ms as with the default cost.
@case(lease_ttl_s=5, etcd_flags=["--auth-token-ttl", "4", "--bcrypt-cost", "4"])
def passwords(cluster):
    etcd = cluster.etcd
    # A user that may use this prefix only.
    own = {"permType": "READWRITE", "key": base64_of("/jobs/"), "range_end": base64_of("/jobs0")}
    for path, body in (
        ("user/add", {"name": "root", "password": "secret"}), ("user/grant", {"user": "root", "role": "root"}),
        ("role/add", {"name": "queue"}), ("role/grant", {"name": "queue", "perm": own}),
        ("user/add", {"name": "queue", "password": "pass:word"}), ("user/grant", {"user": "queue", "role": "queue"}),
        ("role/add", {"name": "reader"}), ("role/grant", {"name": "reader", "perm": {**own, "permType": "READ"}}),
        ("user/add", {"name": "reader", "password": "pass:word"}), ("user/grant", {"user": "reader", "role": "reader"}),
        ("enable", {}),
    ):
        etcd.request(f"auth/{path}", body)
    etcd.root = ("root", "secret")

    def server(user, password):
        return cluster.new_server(environment={"BEANSTALKD_ETCD_USER": user, "BEANSTALKD_ETCD_PASSWORD": password})
    for refused in cluster.new_server(), server("queue", "wrong"), server("nobody", "pass:word"):
        expect_refused(refused)
    cluster.prefix = "/other"
    expect_refused(server("queue", "pass:word"))
    cluster.prefix = "/jobs"
    expect("keys", etcd.items("/"), {})
    active = server("queue", "pass:word").start().wait_until_active()
    # Before it is needed.
    expect_refused(server("reader", "pass:word"))
    standby = server("queue", "pass:word").start().wait_until_standby()
    with active.connect() as client:
        kept = client.put(b"kept")
        # Longer than a token is valid.
        time.sleep(6)
        client.put(b"later")
        # The passwords are not in the arguments of the process, and not in the log.
        assert "pass:word" not in active.process.text()
    active.kill()
    expect_jobs(standby.wait_until_active(), {kept: b"kept"})
    # etcd forgets its tokens when it starts again.
    etcd.nodes[0].process.kill()
    etcd.start()
    put_until_it_works(standby)


@case(tls=True)
def certificates(cluster):
    file = cluster.etcd.tls.file

    def server(ca, name=None):
        certificate = ["--etcd-cert", file(f"{name}.crt"), "--etcd-key", file(f"{name}.key")] if name else []
        return cluster.new_server(["--etcd-ca", file(ca), *certificate], scheme="etcds")
    for arguments in ["ca.crt"], ["ca.crt", "stranger"], ["other-ca.crt", "client"]:
        expect_refused(server(*arguments))
    for ca in "missing", "ca.key":
        process = server(ca, "client").start().process
        assert process.wait() in (USAGE, REFUSED) and ca in process.text(), process.text()
    right = server("ca.crt", "client").start().wait_until_active()
    kept = put_jobs(right, [b"kept"])
    expect_jobs(right.restart(), kept)
    standby = server("ca.crt", "client").start().wait_until_standby()
    # Certificates are renewed in place, here by another authority.
    with open(file("ca.crt"), "a", encoding="ascii") as known, open(file("other-ca.crt"), encoding="ascii") as other:
        known.write(other.read())
    cluster.etcd.tls.sign("node", "other-ca", "serverAuth,clientAuth")
    cluster.etcd.nodes[0].process.kill()
    cluster.etcd.start()
    right.kill()
    expect_jobs(standby.wait_until_active(), kept)


# Space.

def fill(etcd):
    """As another program does, until etcd has no space."""
    try:
        for _ in range(200):
            etcd.put("/other", os.urandom(400_000))
        raise AssertionError("etcd has no quota")
    except EtcdError as error:
        assert "space" in str(error), error


def make_space(etcd):
    etcd.delete("/other")
    etcd.compact()
    for alarm in etcd.request("maintenance/alarm", {})["alarms"]:
        etcd.request("maintenance/alarm", {"action": "DEACTIVATE", **alarm})


@case(etcd_flags=["--quota-backend-bytes", str(24 << 20)])
def quota_of_etcd_reached(cluster):
    etcd = cluster.etcd
    server = cluster.start(flags=["-s", "1048576"])
    jobs = put_jobs(server, [b"%d" % number for number in range(20)])
    with server.connect(10) as client:
        fill(etcd)
        expect("/readyz", server.http("/readyz")[0], 200)
        refused = 0
        with contextlib.suppress(Closed):
            while refused < 3:
                body = b"%d" % len(jobs) * 20000
                words = client.ask(f"put 0 0 60 {len(body)}", body)
                if words[0] == "INSERTED":
                    jobs[int(words[1])] = body
                else:
                    expect("the reply", words, ["OUT_OF_MEMORY"])
                    refused += 1
                assert len(jobs) < 220, "no put is refused"
    wait_until("a line about the quota", lambda: "quota" in server.process.text()
               or "space" in server.process.text())
    # No client waits for longer than the lease, with any command.
    expect("/readyz", server.http("/readyz")[0], 503)
    uncertain = jobs.popitem()[0]
    for command in f"delete {uncertain}", "peek 1", "reserve-with-timeout 0":
        with server.connect(10) as client, contextlib.suppress(Closed):
            raise AssertionError(f"a reply without an acknowledgement: {client.ask(command)}")
    make_space(etcd)
    put_until_it_works(server)
    expect_jobs(server, jobs)
    # Without space no server can lead, and it names what helps.
    fill(etcd)
    server.kill()
    log = server.start().wait_for_log("disarm its alarm").process.text()
    assert "URL of -b" not in log, log
    make_space(etcd)
    expect_jobs(server.wait_until_active(), jobs)


@case(etcd_flags=["--quota-backend-bytes", str(32 << 20)])
def puts_are_refused_before_etcd_is_full(cluster):
    server = cluster.start(flags=["--etcd-quota", str(32 << 20)])
    jobs = put_jobs(server, [b"%d" % number for number in range(20)])
    # Another program fills etcd nearly, at last slower than the server looks.
    for _ in range(30):
        cluster.etcd.put("/other", os.urandom(500_000))
    with server.connect() as client:
        while client.ask("put 0 0 60 1", b"x")[0] == "INSERTED":
            cluster.etcd.put("/other", os.urandom(500_000))
            time.sleep(0.5)
        for job in jobs:
            client.must("DELETED", f"delete {job}")
    expect("/readyz", server.http("/readyz")[0], 200)
    assert "--etcd-quota" in server.process.text(), "no line about the quota"


@case(etcd_flags=["--max-request-bytes", "65536"])
def a_low_limit_of_requests(cluster):
    server = cluster.start()
    with server.connect() as client:
        client.send(*[("put 0 0 60 3000", b"x" * 3000)] * 500)
        jobs = [client.reply()[0][1] for _ in range(500)]
    expect("different jobs", len(set(jobs)), 500)
    server.restart()
    expect("jobs", put_jobs(server, [b"last"]), {501: b"last"})


@case(lease_ttl_s=10)
def a_killed_process_leaves(cluster):
    """As a service manager does it: the next server is active long before the lease has ended."""
    runtime = cluster.workspace.path("runtime")
    os.mkdir(runtime)
    first = cluster.new_server(environment={"RUNTIME_DIRECTORY": runtime}).start().wait_until_active()
    jobs = put_jobs(first, [b"kept"])
    second = cluster.new_server().start().wait_until_standby()

    def leave():
        run(cluster.program, "-b", first.binlog, "--leave", os.path.join(runtime, "lease"))
    # A process that only stands still keeps its lease.
    first.process.signal(signal.SIGSTOP)
    leave()
    first.process.signal(signal.SIGCONT)
    expect("the active server", first.is_active(), True)
    first.kill()
    killed_at = time.monotonic()
    leave()
    second.wait_until_active()
    took_s = time.monotonic() - killed_at
    expect_jobs(second, jobs)
    leave()
    expect("the active server", second.is_active(), True)
    run(cluster.program, "--leave", os.path.join(runtime, "missing"))
    return f"the next server was active after {took_s:.2f} s"


@case()
def drain(cluster):
    """A server that drains keeps its workers, also behind HAProxy, and one that stands by logs the signal."""
    first, second = cluster.start(2)
    for name in "SIGUSR1", "SIGUSR2":
        second.process.signal(getattr(signal, name))
        second.wait_for_log(f"{name}: ")
    with Connection(start_haproxy(cluster), PATIENCE_S) as worker:
        worker.put(b"last")
        first.process.signal(signal.SIGUSR1)
        wait_until("it is not ready", lambda: first.http("/readyz")[0] == 503)
        assert not worker.is_closed(2), "HAProxy has closed the connection"
        expect("a reply", worker.ask("put 0 0 1 1", b"x"), ["DRAINING"])
        _, job, _ = worker.must("RESERVED", "reserve")
        worker.must("DELETED", f"delete {job}")


# Tools.

@case()
def import_and_export(cluster):
    """Moves every kind of job from C beanstalkd into etcd and back."""
    original = os.environ.get("C_BEANSTALKD", "/usr/bin/beanstalkd")
    if not os.path.exists(original) or "server" in run(original, "-v"):
        assert not os.environ.get("CI"), "C beanstalkd is not installed"
        return "SKIPPED: C beanstalkd is not installed"
    workspace = cluster.workspace
    source, *targets = map(workspace.path, ["source", "target", "target-of-c"])
    manifest = {}
    for directory in source, *targets:
        os.mkdir(directory)

    @contextlib.contextmanager
    def running_on(directory, program):
        """Runs a server on a directory meanwhile."""
        host = workspace.address()
        port = workspace.port(host)
        # C beanstalkd drops a job of the largest size that it is to read without this.
        process = workspace.start("reader", [program, "-l", host, "-p", str(port), "-b", directory, "-z", "65537"])
        # The client is there until the end of the server, as the worker of a reserved job.
        yield Connection.when_listening((host, port))
        process.kill()

    def files(directory):
        return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}
    with running_on(source, original) as client:
        all_kinds.fill(client, manifest)
    # A killed server has left two files without records, and C beanstalkd continues behind them.
    newest = max(int(path.suffix[1:]) for path in pathlib.Path(source).glob("binlog.*"))
    for number in newest + 1, newest + 2:
        pathlib.Path(source, f"binlog.{number}").write_bytes(struct.pack("=i", 7))
    with running_on(source, original) as client:
        client.must("DELETED", f"delete {client.put(b'behind them')}")
    before = files(source)
    # A damaged binlog leaves the prefix as it was.
    broken = shutil.copytree(source, workspace.path("broken"))
    largest = max(pathlib.Path(broken).glob("binlog.*"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(60)
        file.write(b"\xff" * 240)
    with nothing_written(cluster):
        assert "damaged" in cluster.run("--import", broken, expect=REFUSED), "no word of the damage"
    cluster.run("--import", source)
    cluster.run("--check")
    expect("the source", files(source), before)
    server = cluster.start()
    client = server.connect()
    all_kinds.expect(client, manifest)
    with nothing_written(cluster):
        assert "leads" in cluster.run("--import", source, expect=REFUSED), "no word of the server"
    all_kinds.work(client, manifest)
    server.terminate()
    with nothing_written(cluster):
        text = cluster.run("--import", source, expect=REFUSED)
    assert f"delete all keys that begin with {cluster.prefix}/" in text, text
    for directory, reader in zip(targets, [cluster.program, original]):
        cluster.run("--export", directory)
        with running_on(directory, reader) as client:
            all_kinds.expect(client, manifest)
        run(cluster.program, "-b", directory, "--check")
    # Nothing is written into a directory that has a binlog.
    text = cluster.run("--export", targets[0], expect=REFUSED)
    assert targets[0] in text, text
    text = cluster.run("--import", "/nonexistent", expect=REFUSED)
    assert text.startswith("beanstalkd: /nonexistent: cannot lock"), text
    return None


@case()
def check_and_dump(cluster):
    server = cluster.start()
    put_jobs(server, [b"a", b"b", b"c"])
    with server.connect() as client:
        client.must("DELETED", "delete 3")
        with nothing_written(cluster):
            assert "2 ready" in cluster.run("--check"), "not two jobs"
            dumped = [json.loads(line) for line in cluster.run("--dump").splitlines()]
        expect("the dump", [(job["id"], job["body"]) for job in dumped], [(1, "a"), (2, "b")])
        copy = cluster.workspace.path("copy")
        os.mkdir(copy)
        cluster.run("--export", copy)
        assert '"body":"b"' in run(cluster.program, "-b", copy, "--dump"), "the copy has no job"
        # Next to a server that writes.
        for _ in range(20):
            client.send(*[("put 5000 0 60 1000", b"x" * 1000)] * 200)
            cluster.run("--check")
            for _ in range(200):
                expect("a reply", client.reply()[0][0], "INSERTED")
    expect("the active server", server.process.poll(), None)
    cluster.prefix = "/empty"
    with nothing_written(cluster):
        cluster.run("--check", expect=REFUSED)


@case()
def export_that_fails(cluster):
    """It leaves nothing that passes for a binlog, even if it is killed."""
    # The second file is too large.
    put_jobs(cluster.start(flags=["-s", "65536"]), [b"x" * 10_000, b"x" * 60_000])
    directory = cluster.workspace.path("part")
    os.mkdir(directory)
    url = etcd_url(cluster.etcd.endpoints(), cluster.prefix)
    script = "trap '' XFSZ; ulimit -f 32; exec \"$@\""
    text = run("sh", "-c", script, "sh", cluster.program, "-b", url, "--export", directory, expect=REFUSED)
    assert "binlog.2: File too large" in text, text
    expect("the files", os.listdir(directory), ["lock"])
    # The third name that it changes is that of the second file.
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "inject=rename:signal=KILL:when=3"]
    run(*strace, cluster.program, "-b", url, "--export", directory, expect=-signal.SIGKILL)
    text = cluster.run("--export", directory, expect=REFUSED)
    assert "empty it and export again" in text, text


@case()
def damage(cluster):
    """A file that is damaged in etcd is reported and set aside, and the intact jobs of all are kept."""
    large = [b"body of job %d. " % number * 500 for number in range(40)]
    # A chunk for each job, several hundred in a file.
    small = [b"body of job %d; all differ" % number for number in range(2500)]
    for damaged, bodies, file_size in (0, large, 65536), (20, large, 65536), (38, large, 65536), (1250, small, 131072):
        cluster.prefix = f"/damage-{damaged}"
        server = cluster.start(flags=["-s", str(file_size)])
        jobs = put_jobs(server, bodies)
        server.terminate()
        assert len(cluster.items("/file/")) >= 3, "too few files"
        word = bodies[damaged][:20]
        key, value = next(item for item in cluster.items("/log/").items() if word in item[1])
        cluster.etcd.put(key, value.replace(word, word.upper(), 1))
        jobs[list(jobs)[damaged]] = None
        cluster.run("--check", expect=1)
        if bodies is small:
            # It is killed while it sets the file aside.
            server.start()
            cluster.etcd.wait_for_change(f"{cluster.prefix}/file/", ["NOPUT"], patience_s=20)
            server.kill()
        for end in server.terminate, server.kill, server.terminate:
            expect_jobs(server.start().wait_until_active(), jobs)
            jobs |= put_jobs(server, [b"new"])
            end()
        assert cluster.items("/damaged/"), "the damaged file is not set aside"


# All cases.

def run_case(name, function):
    """Runs a case, and returns whether it holds; a failure is printed."""
    began = time.monotonic()
    try:
        note = function()
    except Exception as failure:
        # These have all that was observed in their text; other errors are those of the test.
        if not isinstance(failure, (AssertionError, Violation)):
            traceback.print_exc()
        print(f"FAILED {name}: {failure}", flush=True)
        return False
    print(f"ok {name} ({time.monotonic() - began:.1f} s)" + (f"\n{note}" if note else ""), flush=True)
    return True


def run_on_cluster(program, function, options):
    with Cluster(program, **options) as cluster:
        return function(cluster)


def random_faults(program):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"   SEED={seed}", flush=True)
    return run_chaos(program, float(os.environ.get("FOR_SECONDS") or 30), seed, log)


def log(text):
    print(f"   {time.strftime('%H:%M:%S')} {text}", flush=True)


def main():
    program = os.path.abspath(sys.argv[1])
    names = [*CASES, *(fault.name for fault in FAULTS), "random-faults"]
    chosen = sys.argv[2:] or names
    if "--list" in chosen:
        print("\n".join(names))
        return
    unknown = [name for name in chosen if name not in names]
    if unknown:
        sys.exit(f"no such case: {', '.join(unknown)}")
    runs = {name: lambda case=case: run_on_cluster(program, *case) for name, case in CASES.items() if name in chosen}
    if faults := [fault for fault in FAULTS if fault.name in chosen]:
        runs["each fault once"] = lambda: run_each_once(program, faults, log)
    if "random-faults" in chosen:
        runs["random-faults"] = lambda: random_faults(program)
    failed = [name for name, function in runs.items() if not run_case(name, function)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

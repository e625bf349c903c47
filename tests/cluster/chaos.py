"""Clients that work while a checker verifies what they saw: in a cluster with faults, and in soak.py.

The faults are random, or each one strikes once. The seed chooses the faults and what clients send. Moments
differ from run to run.
"""
import contextlib
import random
import time

from workspace import PATIENCE_S, stop, wait_until
from beanstalk import Closed
from checker import Checker
from cluster import NOT_LEADING, Cluster, ServiceManager, start_haproxy
from faults import ANY, Faults
from history import History, Violation
from workload import STATES, Observer, Session, Workload

# Deleted jobs that are asked for, besides all others; the last time it is all of them.
DELETED_SAMPLE = 3000
# A client gets a reply again this long after a fault that strikes once. It is much shorter than the
# longest lease.
SUCCESSION_S = 30


class Run:
    """One run: servers, clients, and the verification of what clients saw."""

    def __init__(self, cluster, seed, log, **of_clients):
        self.cluster = cluster
        self.log = log
        self.random = random.Random(f"{seed}/chaos")
        self.history = History()
        self.workload = Workload(self.history, seed, **of_clients)
        self.verified_pids = set()
        self.verifications = 0
        self.began = time.monotonic()

    def finish(self):
        """Verifies all jobs, takes every job out of the queue, and verifies once more."""
        self.workload.stop()
        self.verify(is_last=True)
        self.drain()
        self.workload.raise_failure()

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.workload.raise_failure()
            time.sleep(0.05)

    def wait_until_answering(self, patience_s=PATIENCE_S):
        began = time.monotonic()

        def answers():
            self.workload.raise_failure()
            with self.history.lock:
                return any(each.last_sent > began for each in self.history.answers.values())
        wait_until("a server answers clients", answers, patience_s)

    def verify(self, is_last=False):
        """Lets the clients pause, asks the active server for jobs, and checks the history."""
        with self.workload.gate.closed():
            self.workload.raise_failure()
            began = time.monotonic()
            self.ask_for_jobs(is_last)
            self.workload.notice_ends()
            Checker(self.history).check(only_changed=not is_last)
            self.workload.raise_failure()
            self.verified_pids |= self.history.answers.keys()
            self.verifications += 1
            self.history.backlog = len(self.history.jobs)
            self.log(f"verified {len(self.history.jobs)} jobs and {len(self.history.gone)} deleted ones"
                     f" in {time.monotonic() - began:.1f} s")

    def ask_for_jobs(self, is_last=False, server=None):
        """Asks for the body and the state of every job. A change of leader makes it begin again.

        `server` is the server to ask, instead of the active one. Clients must pause.
        """
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                active = server or self.cluster.wait_for_active()
                with contextlib.closing(Session(self.history, active.address)) as session:
                    return self.ask_session(session, self.jobs_to_ask_for(is_last))
            except Closed as closed:
                if time.monotonic() > give_up_at:
                    raise AssertionError(f"the verification of jobs did not end: {closed}") from closed

    def jobs_to_ask_for(self, is_last):
        jobs, gone = set(self.history.jobs), self.history.gone
        if is_last:
            # Puts with unknown outcomes may have made jobs with ids that no client knows.
            return range(1, max(jobs | gone, default=0) + 1000)
        return sorted(jobs) + self.random.sample(sorted(gone), min(DELETED_SAMPLE, len(gone)))

    def ask_session(self, session, jobs):
        for first in range(0, len(jobs), 100):
            commands = []
            for job in jobs[first:first + 100]:
                # A job that is not known is gone, or no client knows it.
                is_known = job in self.history.jobs
                commands.append(session.on_job("peek", job, is_known=is_known))
                if is_known:
                    commands.append(session.stats_job(job))
            session.run(*commands)

    def drain(self):
        server = self.cluster.wait_for_active()
        with contextlib.closing(Session(self.history, server.address)) as session:
            session.watch(self.workload.tubes)
            give_up_at = time.monotonic() + PATIENCE_S
            # The server may still be about to notice the end of a client with reserved jobs.
            while left := self.count_jobs(session.connection):
                while session.run(*[session.reserve() for _ in range(500)]) and session.held:
                    session.run(*[session.on_job("delete", job) for job in session.held])
                    session.held.clear()
                if jobs := list(self.history.jobs):
                    # Near --binlog-limit a kick can be refused, a delete cannot.
                    session.run(session.on_job("delete", jobs[0]))
                    session.run(*[session.on_job("kick-job", job) for job in jobs])
                if time.monotonic() > give_up_at:
                    raise Violation("left over", f"jobs that no reserve returned: {left}")
        Checker(self.history).check()
        jobs = [job for job, operations in self.history.jobs.items()
                if any(operation.kind == "put" for operation in operations)]
        if jobs:
            raise Violation("lost", f"jobs that no reserve returned: {sorted(jobs)[:20]}")

    @staticmethod
    def count_jobs(connection):
        """Returns the states in which there are jobs, and their numbers."""
        facts = connection.facts("stats")
        counts = {state: int(facts[f"current-jobs-{state}"]) for state in STATES}
        return {state: count for state, count in counts.items() if count}

    def figures(self):
        puts = sum(put.result == "INSERTED" for put in self.history.puts)
        return (f"{puts} of {len(self.history.puts)} puts have replies, {self.verifications} verifications; flags:"
                f" {' '.join(self.cluster.servers[0].flags)}")


class Chaos(Run):
    """A cluster, clients of HAProxy and of each server, observers, and faults."""

    def __init__(self, cluster, seed, log):
        super().__init__(cluster, seed, log)
        failures = self.workload.failures
        self.manager = ServiceManager(cluster.servers, failures)
        self.observers = [Observer(self.history, server.address, failures) for server in cluster.servers]
        self.faults = Faults(self, seed)

    def __enter__(self):
        haproxy = start_haproxy(self.cluster)
        for worker in self.manager, *self.observers:
            worker.start()
        for number in range(1, 9):
            self.workload.start(f"client{number}", haproxy)
        for server in self.cluster.servers:
            self.workload.start(f"{server.name}-client", server.address)
        return self

    def __exit__(self, *_):
        self.workload.stop()
        stop([self.manager, *self.observers])

    def run(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wait(self.random.uniform(0.5, 4))
            self.faults.strike()
            self.wait_until_answering()
            if not self.history.answers.keys() <= self.verified_pids:
                self.verify()
            self.workload.raise_failure()

    def run_once(self, fault, tries=3):
        """Strikes with one fault, and verifies what must hold after it."""
        self.wait(0.5)
        if fault.status is None:
            self.wait_for_lease()
        active = self.cluster.wait_for_active().process
        self.faults.strike_once(fault)
        status = fault.status if fault.status == ANY else active.poll() if fault.status is None else active.wait()
        self.wait_until_answering(SUCCESSION_S)
        self.verify()
        if status == NOT_LEADING != fault.status and "not renewed in time" in active.text() and tries > 1:
            self.log("the machine was too busy to renew the lease: once more")
            self.run_once(fault, tries - 1)
            return
        assert status == fault.status, (f"{fault.name}: {active.name} ended with {status} instead of"
                                        f" {fault.status}:\n{active.tail()}")
        assert fault.logged in active.text(), f"{fault.name}: not logged: {fault.logged}\n{active.tail()}"

    def wait_for_lease(self):
        """Waits until the active server has just renewed its lease."""
        active = self.cluster.wait_for_active()
        enough_s = 0.6 * self.cluster.lease_ttl_s
        active.wait_for("the lease is renewed", lambda: active.metric("beanstalkd_lease_seconds") > enough_s)

    def figures(self):
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.counts.items()))
        return f"{super().figures()}; {len(self.history.answers) - 1} changes of leader after {faults}"


def run_chaos(program, seconds, seed, log):
    draw = random.Random(f"{seed}/cluster")
    # Small files are removed often, and a limit refuses puts.
    flags = draw.choice([["-s", "65536"], ["-s", "65536", "--binlog-limit", "3000000"], ["-s", "262144"], ["-s", "1048576"]])
    # Nodes of etcd that are behind get a snapshot.
    etcd_flags = draw.choice([[], ["--snapshot-count", "200"]])
    with Cluster(program, lease_ttl_s=draw.choice([2, 3, 5]), flags=flags, etcd_flags=etcd_flags) as cluster:
        cluster.start(3)
        with Chaos(cluster, seed, log) as chaos:
            chaos.run(seconds)
            chaos.finish()
            return chaos.figures()


def run_each_once(program, faults, log):
    """Strikes with each of these faults once; one cluster for each lease. Returns the figures."""
    figures = []
    for lease_ttl_s in sorted({fault.lease_ttl_s for fault in faults}):
        with Cluster(program, lease_ttl_s=lease_ttl_s, flags=["-s", "65536"]) as cluster:
            cluster.start(3)
            with Chaos(cluster, "once", log) as chaos:
                for fault in faults:
                    if fault.lease_ttl_s == lease_ttl_s:
                        chaos.run_once(fault)
                chaos.finish()
                figures.append(chaos.figures())
    return "\n".join(figures)

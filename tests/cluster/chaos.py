"""Random faults in a cluster, while clients work and a checker verifies what they saw.

Use: chaos.py SERVER [--seconds N] [--seed N] [--servers N] [--faults NAME,...]

The seed chooses the faults and what clients send; it is printed, and SEED in the environment sets
it too. Moments differ from run to run.
"""
import argparse
import contextlib
import os
import random
import sys
import time

from checker import Checker
from cluster import Cluster, ServiceManager
from faults import Faults
from history import History, Violation
from observers import Observers
from verifier import Verifier
from workload import TUBES, Session, Workload
from workspace import PATIENCE_S, Workspace, wait_until

class Chaos:
    """One run."""

    def __init__(self, cluster, seed, log):
        self.cluster = cluster
        self.log = log
        self.random = random.Random(f"{seed}/chaos")
        self.history = History()
        self.workload = Workload(self.history, seed)
        self.manager = ServiceManager(cluster.servers, self.history, self.workload.fail)
        self.observers = Observers(self.history, cluster.servers, self.workload.fail)
        self.verifier = Verifier(cluster, self.history, seed)
        self.faults = Faults(cluster, self.manager, self.workload, self.verifier, seed, log)
        self.verified_pids = set()
        self.verifications = 0
        self.began = time.monotonic()

    def __enter__(self):
        self.manager.start()
        self.observers.start()
        for number in range(1, 9):
            self.workload.start(f"client{number}", self.cluster.haproxy.address)
        for server in self.cluster.servers:
            self.workload.start(f"{server.name}-client", (server.address, server.port))
        return self

    def __exit__(self, *_):
        self.workload.stop()
        self.observers.stop()
        self.manager.stop()

    def run(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wait(self.random.uniform(0.5, 4))
            self.faults.strike()
            self.wait_until_active()
            if self.has_new_leader():
                self.verify()
            self.workload.raise_failure()

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.workload.raise_failure()
            time.sleep(0.05)

    def wait_until_active(self):
        """Waits until clients get replies again."""
        began = time.monotonic()

        def answers():
            self.workload.raise_failure()
            with self.history.lock:
                return any(each.last_sent > began for each in self.history.answers.values())
        wait_until("a server answers clients", answers)

    def has_new_leader(self):
        with self.history.lock:
            return not self.history.answers.keys() <= self.verified_pids

    def verify(self, is_last=False):
        """Lets the clients pause, asks the active server for jobs, and checks the history."""
        with self.workload.gate.closed():
            self.workload.raise_failure()
            began = time.monotonic()
            self.verifier.ask_for_jobs(is_last)
            self.workload.notice_ends()
            self.verifier.check(is_last)
            with self.history.lock:
                self.verified_pids |= self.history.answers.keys()
            self.verifications += 1
            self.workload.backlog = len(self.history.jobs)
            self.log(f"verified {len(self.history.jobs)} jobs and {len(self.history.gone)} deleted ones"
                     f" in {time.monotonic() - began:.1f} s")

    def drain(self):
        """Takes every job out of the queue, and verifies once more."""
        with self.workload.gate.closed():
            server = self.cluster.wait_for_active()
            with contextlib.closing(Session(self.history, (server.address, server.port))) as session:
                session.watch(TUBES)
                taken = 0
                give_up_at = time.monotonic() + PATIENCE_S
                # The server may still be about to notice the end of a client with reserved jobs.
                while left := self.count_jobs(session):
                    while jobs := session.reserve("reserve-batch 500"):
                        session.run([session.delete(job) for job in jobs])
                        taken += len(jobs)
                    taken += self.kick_all(session)
                    if time.monotonic() > give_up_at:
                        raise Violation("left over", f"jobs that no reserve returned: {left}")
            checker = Checker(self.history)
            checker.check_all()
            jobs = {job for job, operations in self.history.jobs.items()
                    if any(operation.kind == "put" for operation in operations)}
            if jobs:
                raise Violation("lost", f"jobs that no reserve returned: {sorted(jobs)[:20]}")
        return taken

    @staticmethod
    def count_jobs(session):
        """Returns the states in which there are jobs, and their numbers."""
        facts = session.connection.facts("stats")
        counts = {state: int(facts[f"current-jobs-{state}"])
                  for state in ("ready", "reserved", "delayed", "buried")}
        return {state: count for state, count in counts.items() if count}

    @staticmethod
    def kick_all(session):
        """Kicks buried jobs of all tubes, or delayed ones where none are buried.

        Near --binlog-limit a kick can be refused. Then the first buried jobs are deleted; returns their
        number.
        """
        deleted = 0
        for tube in TUBES:
            is_kicked = session.kick(tube, 1000)
            if not is_kicked and (job := session.peek_buried(tube)) is not None:
                session.run([session.delete(job)])
                deleted += 1
        return deleted

    def figures(self):
        history = self.history
        seconds = time.monotonic() - self.began
        changes = len(history.answers) - 1
        replies = history.counts
        puts = sum(1 for put in history.puts if put.result == "INSERTED")
        gap, gap_end = history.longest_gap
        lines = [
            f"{seconds:.0f} s, {len(self.cluster.servers)} servers with {' '.join(self.cluster.flags)}",
            f"{puts} jobs put, {sum(replies.values())} commands: {replies['acknowledged']} acknowledged,"
            f" {replies['refused']} refused, {replies['unknown']} with unknown outcome",
            f"{sum(self.faults.counts.values())} faults: "
            + ", ".join(f"{count} {name}" for name, count in sorted(self.faults.counts.items())),
            f"exit statuses of servers: "
            + ", ".join(f"{count} with {status}" for status, count in sorted(self.manager.exits.items())),
            f"{changes} changes of leader, {self.verifications} verifications",
            f"longest time without an active server: {gap:.1f} s",
            "lost 0, resurrected 0, two active servers 0",
        ]
        return "\n".join(lines)


def run_chaos(program, seconds, seed, servers=2, log=print, faults=None):
    """Runs random faults, and returns the figures. Raises Violation when a promise is broken.

    `faults` are the names of those to choose from; `None` stands for all.
    """
    draw = random.Random(f"{seed}/cluster")
    # Small files are removed often, and a limit refuses puts.
    flags = draw.choice([["-s", "65536"], ["-s", "65536", "--binlog-limit", "3000000"], ["-s", "262144"], []])
    # Nodes of etcd that are behind get a snapshot.
    etcd_flags = draw.choice([[], ["--snapshot-count", "200"]])
    options = {"lease_ttl": draw.choice([2, 3, 5]), "flags": flags, "etcd_flags": etcd_flags}
    with Workspace() as workspace, Cluster(workspace, program, servers, **options) as cluster:
        cluster.start()
        with Chaos(cluster, seed, log) as chaos:
            if faults is not None:
                chaos.faults.select(faults)
            try:
                chaos.run(seconds)
                chaos.workload.stop()
                chaos.verify(is_last=True)
                taken = chaos.drain()
                log(f"took the last {taken} jobs out of the queue")
            except BaseException as failure:
                log(f"FAILED: {failure}")
                for server in cluster.servers:
                    log(f"the log of {server.name}, pid {server.process.pid}:\n{server.process.tail()}")
                raise
            chaos.workload.raise_failure()
            return chaos.figures()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=os.environ.get("SEED"))
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--faults", type=lambda names: names.split(","))
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else int(options.seed)
    print(f"SEED={seed}", flush=True)
    began = time.monotonic()

    def log(text):
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)
    try:
        print(run_chaos(os.path.abspath(options.program), options.seconds, seed, options.servers, log,
                        options.faults))
    except (Violation, AssertionError) as failure:
        print(f"FAILED with SEED={seed}: {failure}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

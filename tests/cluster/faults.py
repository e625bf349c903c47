"""Faults of a running cluster. FAULTS, at the end, is the table of all.

A fault does its harm, holds it for a while and repairs. A run of random faults chooses among them, and
how long they last. The cases of check.py strike with each one once, for so long that the end of the
active server is certain, or that it must go on.
"""
import concurrent.futures
import contextlib
import copy
import random
import time
import typing
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from cluster import NOT_LEADING
from proxies import BACK, TO
from workload import Session
from workspace import wait_until

# The active server may end or not.
ANY = "any"


class Fault(typing.NamedTuple):
    name: str
    # How often it is chosen at random, in proportion to the others; 0 is never.
    weight: int
    # The status that the active server ends with; `None` if it must go on.
    status: object
    harm: typing.Callable
    # What ends the harm, after it was held.
    repair: typing.Callable = None
    # How long it is held at random, in leases.
    leases: tuple = (0, 0)
    # What the active server must log.
    logged: str = ""
    # The lease when it strikes once. With 60 s, a next server that waits for its end is found.
    lease_ttl_s: int = 2
    # While a write waits for etcd, no reply leaves. A server that answers without its lease shows that
    # only when nothing is written. Clients pause in such a fault when it strikes once, and often at random.
    is_quiet: bool = False
    is_of_etcd: bool = False


class Faults:
    """The faults of one cluster. The same seed chooses the same faults in the same order."""

    def __init__(self, chaos, seed):
        self.chaos = chaos
        self.cluster = chaos.cluster
        self.etcd = chaos.cluster.etcd
        self.proxies = chaos.cluster.proxies
        self.random = random.Random(f"{seed}/faults")
        self.counts = {}
        self.of_etcd = [fault for fault in FAULTS if fault.weight and fault.is_of_etcd]
        self.of_servers = [fault for fault in FAULTS if fault.weight and not fault.is_of_etcd]

    def strike(self):
        """Runs a random fault, or one of the servers and one of etcd at one time."""
        if self.random.random() < 0.2:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                other = copy.copy(self)
                other.random = random.Random(self.random.random())
                running = pool.submit(other.strike_one_of, self.of_etcd)
                self.strike_one_of(self.of_servers)
                running.result()
        else:
            self.strike_one_of(self.of_servers + self.of_etcd)

    def strike_one_of(self, kinds):
        fault = self.random.choices(kinds, [each.weight for each in kinds])[0]
        self.strike_with(fault, fault.is_quiet and self.random.random() < 0.6, lambda: self.sleep(*fault.leases))

    def strike_once(self, fault):
        """Runs a fault for so long that its outcome is certain."""
        victim = self.active().process

        def hold():
            # A server that is stopped does not end.
            if fault.status == NOT_LEADING and SIGSTOP not in victim.signals:
                victim.wait()
            else:
                self.sleep(*(0.3, 0.3) if fault.status is None else (2, 2))
        self.strike_with(fault, fault.is_quiet, hold)

    def strike_with(self, fault, is_quiet, hold):
        self.counts[fault.name] = self.counts.get(fault.name, 0) + 1
        self.chaos.log(f"{fault.name}{', the clients pause' if is_quiet else ''}")
        with self.chaos.workload.gate.closed() if is_quiet else contextlib.nullcontext():
            # What the harm returns is what is repaired.
            harmed = fault.harm(self)
            if fault.repair:
                hold()
                fault.repair(self, harmed)
            if fault.is_of_etcd:
                self.etcd.wait_until_healthy()

    def sleep(self, shortest, longest):
        """Waits for a random time, given in leases."""
        time.sleep(self.random.uniform(shortest, longest) * self.cluster.lease_ttl_s)

    # Whom a fault concerns.

    def active(self):
        return self.cluster.wait_for_active()

    def others(self, server):
        return [each for each in self.cluster.servers if each is not server]

    def leader_key(self):
        return f"{self.cluster.prefix}/leader"

    def two_nodes(self):
        return self.random.sample(self.etcd.nodes, 2)

    # Harm and repair. `each` is a server, or a node of etcd.

    def signal(self, number, *each):
        for one in each:
            one.process.signal(number)
        return each

    def resume(self, each):
        self.signal(SIGCONT, *each)

    def kill_nodes(self, *nodes):
        for node in nodes:
            node.process.kill()
        return nodes

    def start_nodes(self, nodes):
        for node in nodes:
            node.start()

    def stall(self, links, *directions):
        """Nothing arrives, in one direction or in both."""
        self.proxies.stall(links, directions or (TO, BACK))
        return links

    def cut(self, links):
        self.proxies.cut(links)
        return links

    def slow(self, links):
        directions = self.random.choice([(TO, BACK), (TO,), (BACK,)])
        self.proxies.delay(links, self.random.uniform(0.05, 0.5), directions)
        return links

    def heal(self, links):
        """Delivers what was held back, or drops it."""
        if self.random.random() < 0.5:
            self.proxies.reset(links)
        self.proxies.heal(links)

    # Faults of several steps.

    def kill_active(self):
        server = self.active()
        self.chaos.manager.pauses[server] = self.random.choice([0.1, 0.1, 3])
        server.process.signal(SIGKILL)

    def kill_active_at(self, keys, without):
        """Kills the active server at the moment when it has changed one of these keys."""
        process = self.active().process
        self.etcd.wait_for_change(f"{self.cluster.prefix}/{keys}", [without], patience_s=5)
        process.signal(SIGKILL)

    def stop_next_leader(self):
        """Kills the active server, and stops all others while one of them begins to lead."""
        active = self.active()
        others = [each.process for each in self.others(active)]
        self.chaos.manager.pauses[active] = 3
        active.process.signal(SIGKILL)
        self.sleep(0.3, 1.5)
        for process in others:
            process.signal(SIGSTOP)
        self.sleep(0.5, 2.5)
        for process in others:
            process.signal(SIGCONT)
            self.sleep(0, 0.5)

    def deliver_a_write_late(self):
        """A write of the active server reaches etcd when another server leads, which is killed then.

        The other server only answers questions. Its successor must give the same answers.
        """
        with self.chaos.workload.gate.closed():
            old = self.active()
            history = self.chaos.history
            with contextlib.closing(Session(history, old.address)) as session:
                self.proxies.stall(old.links, [TO])
                jobs = self.random.sample(sorted(history.jobs), min(50, len(history.jobs)))
                commands = [session.on_job("delete", job) for job in jobs]
                commands += [session.put("mail", 0, 0, 60, 100) for _ in range(10)]
                session.abandon(commands, 1, is_reset=False)
                # The write is on its way, and its time limit has not passed.
                time.sleep(self.random.uniform(0.03, 0.15))
                old.process.signal(SIGSTOP)
                new = wait_until("another server is active", lambda: next(
                    (each for each in self.others(old) if each.is_active()), None))
                self.chaos.ask_for_jobs(server=new)
                self.proxies.heal(old.links)
                time.sleep(0.3)
                new.process.signal(SIGKILL)
                old.process.signal(SIGCONT)

    def slow_then_stall_active(self):
        """Replies of etcd are late, then requests do not arrive, and at last nothing does.

        A lease that is counted from a late reply is longer than that of etcd.
        """
        links = self.active().links
        late_by = self.random.uniform(0.35, 0.58)
        self.proxies.delay(links, late_by * self.cluster.lease_ttl_s, [BACK])
        # The lease is renewed once in this time.
        self.sleep(0.3, 0.6)
        self.proxies.stall(links, [TO])
        self.sleep(late_by, late_by + 0.01)
        return self.stall(links)

    def reset_active(self):
        """Connections break: first after requests have reached etcd whose answers are lost."""
        links = self.active().links
        for directions in [BACK], []:
            self.proxies.stall(links, directions)
            time.sleep(0.05)
            self.proxies.reset(links)
            self.proxies.heal(links)


FAULTS = [
    Fault("kill-active", 6, -SIGKILL, Faults.kill_active),
    Fault("kill-active-at-a-removal", 4, -SIGKILL, lambda f: f.kill_active_at("file/", "NOPUT")),
    Fault("kill-active-at-a-write", 3, -SIGKILL, lambda f: f.kill_active_at("log/", "NODELETE")),
    Fault("kill-standby", 2, None, lambda f: f.signal(SIGKILL, f.random.choice(f.others(f.active())))),
    Fault("kill-all-servers", 1, -SIGKILL, lambda f: f.signal(SIGKILL, *f.cluster.servers)),
    Fault("stop-next-leader", 3, -SIGKILL, Faults.stop_next_leader),
    Fault("terminate-active", 3, 0, lambda f: f.signal(SIGTERM, f.active()), lease_ttl_s=60),
    Fault("stop-active-beyond-the-lease", 4, NOT_LEADING, lambda f: f.signal(SIGSTOP, f.active()), Faults.resume,
          (1.1, 2.5), "not leading any more", is_quiet=True),
    Fault("stop-active-shortly", 2, None, lambda f: f.signal(SIGSTOP, f.active()), Faults.resume, (0.1, 0.9),
          lease_ttl_s=5),
    Fault("deliver-a-write-late", 6, NOT_LEADING, Faults.deliver_a_write_late, logged="not leading any more"),
    Fault("cut-active-off", 4, NOT_LEADING, lambda f: f.cut(f.active().links), Faults.heal, (0.2, 3)),
    Fault("stall-active", 2, NOT_LEADING, lambda f: f.stall(f.active().links), Faults.heal, (0.2, 3), is_quiet=True),
    Fault("stall-active-to-etcd", 2, NOT_LEADING, lambda f: f.stall(f.active().links, TO), Faults.heal, (0.2, 3),
          is_quiet=True),
    Fault("stall-active-from-etcd", 2, NOT_LEADING, lambda f: f.stall(f.active().links, BACK), Faults.heal, (0.2, 3)),
    Fault("slow-active", 2, None, lambda f: f.slow(f.active().links), Faults.heal, (0.5, 3), lease_ttl_s=5),
    Fault("slow-then-stall-active", 10, NOT_LEADING, Faults.slow_then_stall_active, Faults.heal, (0.5, 2),
          is_quiet=True),
    Fault("reset-active", 4, None, Faults.reset_active, lease_ttl_s=5),
    Fault("kill-leader-of-etcd", 4, None, lambda f: f.kill_nodes(f.etcd.leader()), Faults.start_nodes, (0, 2),
          lease_ttl_s=5, is_of_etcd=True),
    Fault("kill-majority-of-etcd", 0, NOT_LEADING, lambda f: f.kill_nodes(*f.two_nodes()), Faults.start_nodes,
          is_of_etcd=True),
    Fault("kill-all-of-etcd", 1, ANY, lambda f: f.kill_nodes(*f.etcd.nodes), Faults.start_nodes, is_of_etcd=True),
    Fault("stop-leader-of-etcd", 2, ANY, lambda f: f.signal(SIGSTOP, f.etcd.leader()), Faults.resume, (0.3, 2.5),
          is_of_etcd=True),
    Fault("stop-majority-of-etcd", 3, NOT_LEADING, lambda f: f.signal(SIGSTOP, *f.two_nodes()), Faults.resume,
          (0.2, 2.5), is_of_etcd=True),
    Fault("mute-leader-of-etcd", 2, ANY, lambda f: f.stall([f.etcd.leader().name]), Faults.heal, (0.3, 2.5),
          is_of_etcd=True),
    Fault("compact-etcd", 1, None, lambda f: f.etcd.compact(), lease_ttl_s=5, is_of_etcd=True),
    Fault("delete-leader-key", 0, NOT_LEADING, lambda f: f.etcd.delete(f.leader_key()),
          logged="not leading any more", lease_ttl_s=60, is_of_etcd=True),
    Fault("revoke-lease", 0, NOT_LEADING, lambda f: f.etcd.revoke_lease_of(f.leader_key()), lease_ttl_s=60,
          is_of_etcd=True),
]

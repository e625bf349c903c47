"""Faults of a running cluster, chosen at random.

Each fault is a function: it does its harm, waits and repairs. Afterwards the caller waits until a
server is active again.
"""
import concurrent.futures
import contextlib
import copy
import random
import signal
import time

from cluster import PREFIX
from proxies import BACK, TO
from workload import Session
from workspace import wait_until


class Faults:
    """The faults of one cluster. The same seed chooses the same faults in the same order."""

    def __init__(self, cluster, manager, workload, verifier, seed, log):
        self.cluster = cluster
        self.manager = manager
        self.workload = workload
        self.verifier = verifier
        self.random = random.Random(f"{seed}/faults")
        self.log = log
        self.counts = {}
        # How often each is chosen, in proportion to the others.
        self.of_servers = {
            "kill_active": 6, "stop_active_beyond_the_lease": 4, "stop_active_shortly": 2,
            "terminate_active": 3, "cut_active_off": 4, "stall_active": 6, "slow_then_stall_active": 10,
            "slow_active": 2, "reset_active": 2, "kill_standby": 2, "kill_all_servers": 1,
            "kill_active_at_a_removal": 4, "kill_active_at_a_write": 3, "deliver_a_write_late": 6,
            "stop_next_leader": 3, "stall_all_servers": 2,
        }
        self.of_etcd = {
            "kill_leader_of_etcd": 4, "stop_leader_of_etcd": 2, "stop_majority_of_etcd": 3,
            "compact_etcd": 1, "mute_leader_of_etcd": 2, "kill_all_of_etcd": 1,
        }

    def select(self, names):
        """Keeps only the faults with these names."""
        for kinds in self.of_servers, self.of_etcd:
            for kind in list(kinds):
                if kind.replace("_", "-") not in names:
                    del kinds[kind]
        assert self.of_servers or self.of_etcd, f"no fault has one of the names {names}"

    def strike(self):
        """Runs a random fault, or one of the servers and one of etcd at one time."""
        if self.of_servers and self.of_etcd and self.random.random() < 0.2:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                other = copy.copy(self)
                other.random = random.Random(self.random.random())
                running = pool.submit(other.strike_one, self.of_etcd)
                self.strike_one(self.of_servers)
                running.result()
        else:
            self.strike_one({**self.of_servers, **self.of_etcd})

    def strike_one(self, kinds):
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        name = kind.replace("_", " ")
        self.counts[name] = self.counts.get(name, 0) + 1
        # While a write waits for etcd, no reply leaves. A server that answers without its lease shows
        # that only when nothing is written.
        is_quiet = kind in self.OF_LEASES and self.random.random() < 0.6
        if is_quiet:
            self.log("the clients pause")
        with self.workload.gate.closed() if is_quiet else contextlib.nullcontext():
            getattr(self, kind)()

    OF_LEASES = ("stop_active_beyond_the_lease", "cut_active_off", "stall_active",
                 "slow_then_stall_active")

    def sleep(self, shortest, longest):
        """Waits for a random time, given in leases."""
        time.sleep(self.random.uniform(shortest, longest) * self.cluster.lease_ttl)

    def active(self):
        return self.cluster.wait_for_active()

    def kill_active(self):
        server = self.active()
        self.manager.pauses[server] = self.random.choice([0.1, 0.1, 3])
        self.log(f"kill -9 of {server.name}")
        server.process.signal(signal.SIGKILL)

    def kill_active_at_a_removal(self):
        """Kills the active server at the moment when it has removed a file."""
        self.kill_active_at("file/", ["NOPUT"])

    def kill_active_at_a_write(self):
        """Kills the active server at the moment when it has written a chunk."""
        self.kill_active_at("log/", ["NODELETE"])

    def kill_active_at(self, keys, filters):
        process = self.active().process
        self.log(f"kill -9 of {process.name} at a change of {keys}")
        self.cluster.etcd.wait_for_change(f"{PREFIX}/{keys}", filters, patience=5)
        process.signal(signal.SIGKILL)

    def deliver_a_write_late(self):
        """A write of the active server reaches etcd when another server leads, which is killed then.

        The other server only answers questions. Its successor must give the same answers.
        """
        with self.workload.gate.closed():
            old = self.active()
            self.log(f"a write of {old.name} is late")
            history = self.verifier.history
            with contextlib.closing(Session(history, (old.address, old.port))) as session:
                self.cluster.proxies.stall(old.links, [TO])
                jobs = self.random.sample(sorted(history.jobs), min(50, len(history.jobs)))
                commands = [session.delete(job) for job in jobs]
                commands += [session.put("mail", 0, 0, 60, 100) for _ in range(10)]
                session.connection.send_bytes(b"".join(command for command, _, _ in commands))
                history.count("unknown", len(commands))
                # The write is on its way, and its time limit has not passed.
                time.sleep(self.random.uniform(0.03, 0.15))
                old.process.signal(signal.SIGSTOP)
                new = wait_until("another server is active", lambda: next(
                    (each for each in self.cluster.servers if each is not old and each.is_active()), None))
                self.verifier.ask_for_jobs(server=new)
                self.cluster.proxies.heal(old.links)
                time.sleep(0.3)
                new.process.signal(signal.SIGKILL)
                old.process.signal(signal.SIGCONT)

    def stop_active_beyond_the_lease(self):
        process = self.active().process
        self.log(f"SIGSTOP of {process.name} beyond its lease")
        process.signal(signal.SIGSTOP)
        self.sleep(1.1, 2.5)
        process.signal(signal.SIGCONT)

    def stop_active_shortly(self):
        process = self.active().process
        self.log(f"SIGSTOP of {process.name} within its lease")
        process.signal(signal.SIGSTOP)
        self.sleep(0.1, 0.9)
        process.signal(signal.SIGCONT)

    def terminate_active(self):
        server = self.active()
        self.log(f"SIGTERM of {server.name}")
        server.process.signal(signal.SIGTERM)

    def stop_next_leader(self):
        """Kills the active server, and stops all others while one of them begins to lead."""
        active = self.active()
        others = [each.process for each in self.cluster.servers if each is not active]
        self.log(f"kill -9 of {active.name}, then SIGSTOP of all others")
        self.manager.pauses[active] = 3
        active.process.signal(signal.SIGKILL)
        self.sleep(0.3, 1.5)
        for process in others:
            process.signal(signal.SIGSTOP)
        self.sleep(0.5, 2.5)
        for process in others:
            process.signal(signal.SIGCONT)
            self.sleep(0, 0.5)

    def kill_standby(self):
        active = self.active()
        standby = self.random.choice([each for each in self.cluster.servers if each is not active])
        self.log(f"kill -9 of {standby.name}, which stands by")
        standby.process.signal(signal.SIGKILL)

    def kill_all_servers(self):
        self.log("kill -9 of all servers")
        for server in self.cluster.servers:
            server.process.signal(signal.SIGKILL)

    def kill_leader_of_etcd(self):
        node = self.leader_of_etcd()
        self.log(f"kill -9 of {node.name}, the leader of etcd")
        node.kill()
        self.sleep(0, 2)
        node.start()
        self.cluster.etcd.wait_until_healthy()

    def stop_leader_of_etcd(self):
        node = self.leader_of_etcd()
        self.log(f"SIGSTOP of {node.name}, the leader of etcd")
        node.suspend()
        self.sleep(0.3, 2.5)
        node.resume()
        self.cluster.etcd.wait_until_healthy()

    def mute_leader_of_etcd(self):
        """Nothing that the leader of etcd sends to the other nodes arrives."""
        node = self.leader_of_etcd()
        self.log(f"{node.name}, the leader of etcd, cannot reach the other nodes")
        self.cluster.proxies.stall([node.name])
        self.sleep(0.3, 2.5)
        self.repair([node.name])
        self.cluster.etcd.wait_until_healthy()

    def kill_all_of_etcd(self):
        self.log("kill -9 of all nodes of etcd")
        for node in self.cluster.etcd.nodes:
            node.kill()
        for node in self.cluster.etcd.nodes:
            node.start()
        self.cluster.etcd.wait_until_healthy()

    def leader_of_etcd(self):
        return self.cluster.etcd.leader() or self.cluster.etcd.nodes[0]

    def stop_majority_of_etcd(self):
        nodes = self.random.sample(self.cluster.etcd.nodes, 2)
        self.log(f"SIGSTOP of {nodes[0].name} and {nodes[1].name}")
        for node in nodes:
            node.suspend()
        self.sleep(0.2, 2.5)
        for node in nodes:
            node.resume()
        self.cluster.etcd.wait_until_healthy()

    def links_of_active(self):
        server = self.active()
        return server, server.links

    def cut_active_off(self):
        server, links = self.links_of_active()
        self.log(f"{server.name} is cut off from etcd at once")
        self.cluster.proxies.cut(links)
        self.sleep(0.2, 3)
        self.cluster.proxies.heal(links)

    def stall_active(self):
        """Nothing arrives, in one direction or in both, and then everything does, or nothing."""
        server, links = self.links_of_active()
        directions = self.random.choice([(TO, BACK), (TO,), (BACK,)])
        self.log(f"{server.name} is cut off from etcd: {' and '.join(directions)} stalled")
        self.cluster.proxies.stall(links, directions)
        self.sleep(0.2, 3)
        self.repair(links)

    def stall_all_servers(self):
        self.log("all servers are cut off from etcd: stalled")
        servers = self.random.sample(self.cluster.servers, len(self.cluster.servers))
        for server in servers:
            self.cluster.proxies.stall(server.links)
        self.sleep(0.2, 2)
        for server in servers:
            self.repair(server.links)
            self.sleep(0, 0.3)

    def slow_active(self):
        server, links = self.links_of_active()
        seconds = self.random.uniform(0.05, 0.5)
        directions = self.random.choice([(TO, BACK), (TO,), (BACK,)])
        self.log(f"{server.name} reaches etcd {seconds:.2f} s later: {' and '.join(directions)}")
        self.cluster.proxies.delay(links, seconds, directions)
        self.sleep(0.5, 3)
        self.repair(links)

    def slow_then_stall_active(self):
        """Replies of etcd are late, then requests do not arrive, and at last nothing does.

        A lease that is counted from a late reply is longer than that of etcd.
        """
        server, links = self.links_of_active()
        seconds = self.random.uniform(0.35, 0.58) * self.cluster.lease_ttl
        self.log(f"{server.name} gets replies {seconds:.2f} s later, then none")
        self.cluster.proxies.delay(links, seconds, [BACK])
        # The lease is renewed once in this time.
        self.sleep(0.3, 0.6)
        self.cluster.proxies.stall(links, [TO])
        time.sleep(seconds + 0.05)
        self.cluster.proxies.stall(links)
        self.sleep(0.5, 2)
        self.repair(links)

    def reset_active(self):
        server, links = self.links_of_active()
        self.log(f"the connections of {server.name} to etcd are reset")
        self.cluster.proxies.reset(links)

    def repair(self, links):
        """Delivers what was held back, or drops it."""
        if self.random.random() < 0.5:
            self.cluster.proxies.reset(links)
        self.cluster.proxies.heal(links)

    def compact_etcd(self):
        etcd = self.cluster.etcd
        self.log("compaction and defragmentation of etcd")
        status = etcd.nodes[0].request("maintenance/status", {})
        etcd.request("kv/compaction", {"revision": status["header"]["revision"], "physical": True})
        for node in etcd.nodes:
            node.request("maintenance/defragment", {})

"""The server under stress: many clients work at random, and the checker of clusters verifies what they saw.

Use: soak.py SERVER SCENARIO SEED SECONDS. With 0 seconds it is one small round.

Clients crash at any point: their last commands have no replies, are cut short, or are half-closed. The server is
stopped, or killed and started on its binlog. In the other scenarios clients come and go for a long time, while
memory and disk use must stay as they are.
"""
import contextlib
import os
import sys
import time
import typing
from signal import SIGCONT, SIGSTOP

from workspace import Workspace, wait_until
from beanstalk import Connection
from chaos import Run
from cluster import Server, run
from workload import TUBES

# A small round ends after this number of puts and troubles.
ENOUGH_PUTS, TROUBLES = 1500, 8
# Bodies that come and go leave holes of all sizes in memory: this much varies by chance.
MARGIN_KIB = 8 * 1024


class Plan(typing.NamedTuple):
    # The number of clients in a small round and in a whole one.
    clients: tuple
    # How many actions a connection has.
    life: int
    crashes: bool = True
    tubes: tuple = TUBES
    # What befalls the server: "stop" or "kill".
    trouble: str = ""
    # The size of the files of the binlog, if there is one.
    file_size: int = 0


CHURN = Plan((20, 20), 100, crashes=False, tubes=tuple(f"tube-{number}" for number in range(500)))
PLANS = {
    # Connections of an action or two, next to a client that stays.
    "storms": Plan((6, 12), 2),
    "workers": Plan((12, 55), 30, trouble="stop"),
    "workers-killed": Plan((12, 55), 30, trouble="kill", file_size=1 << 16),
    "churn-plain": CHURN,
    "churn-binlog": CHURN._replace(file_size=1 << 20),
}


class Alone:
    """One server in the place of a cluster."""

    def __init__(self, workspace, program, file_size):
        binlog = workspace.path("binlog") if file_size else None
        if binlog:
            os.mkdir(binlog)
        flags = ["-s", str(file_size), "-f0"] if binlog else []
        self.servers = [Server(workspace, program, "server", binlog, flags)]

    def wait_for_active(self):
        return self.servers[0].wait_until_active()


class Soak(Run):
    def __init__(self, workspace, program, plan, seed, seconds):
        self.plan = plan
        self.seconds = seconds
        cluster = Alone(workspace, program, plan.file_size)
        super().__init__(cluster, seed, lambda _: None, tubes=plan.tubes, crashes=plan.crashes, pause_s=0.01)
        self.server = cluster.servers[0].start().wait_until_active()
        self.files_before = self.open_files()
        # KiB of memory beyond the bodies of jobs, now and then.
        self.samples = []
        self.troubles = 0

    def play(self):
        plan, address = self.plan, self.server.address
        for number in range(plan.clients[self.seconds > 0]):
            self.workload.start(f"client{number}", address, plan.life)
        self.workload.start("steady", address, 1000)
        try:
            while not self.is_over():
                self.wait(self.random.uniform(0.05, 1.5) if self.seconds else 0.02)
                if self.seconds or len(self.history.puts) * TROUBLES >= ENOUGH_PUTS * self.troubles:
                    self.make_trouble()
                    self.troubles += 1
                    if self.troubles % 4 == 0:
                        self.verify()
            self.finish()
        finally:
            self.workload.stop()
        if plan.trouble != "kill":
            self.check_nothing_is_left()
        self.check_samples()
        if plan.file_size:
            self.check_binlog_is_empty()
        return self.figures()

    def is_over(self):
        if self.seconds:
            return time.monotonic() > self.began + self.seconds
        return len(self.history.puts) >= ENOUGH_PUTS and self.troubles >= TROUBLES

    def make_trouble(self):
        process = self.server.process
        if self.plan.trouble == "stop":
            process.signal(SIGSTOP)
            time.sleep(self.random.uniform(0, 0.05))
            process.signal(SIGCONT)
        elif self.plan.trouble == "kill":
            # Under load, or when all replies have been read.
            with self.workload.gate.closed() if self.random.random() < 0.5 else contextlib.nullcontext():
                process.kill()
            self.server.flags[-1] = self.random.choice(["-f0", "-f50", "-f1000", "-F"])
            self.server.start().wait_until_active()

    # While no client works.

    def ask_for_jobs(self, is_last=False, server=None):
        """Does so when the server has done what was asked, and checks its figures."""
        self.workload.notice_ends()
        count = sum(client.session is not None and client.session.caller.ended is None
                    for client in self.workload.clients)
        with Connection(self.server.address) as connection:
            self.wait_for_stat(connection, "current-connections", count + 1)
            self.history.settle()
            super().ask_for_jobs(is_last)
            if self.plan.crashes:
                return
            # Each job is known to a client.
            puts = [each for operations in self.history.jobs.values() for each in operations if each.kind == "put"
                    and not any(other.result == "DELETED" for other in operations)]
            found = sum(self.count_jobs(connection).values())
            assert found == len(puts), f"{found} jobs, {len(puts)} are known"
        # The format needs 84 bytes for each job, the name of its tube, and its body.
        bodies = sum(84 + len(put.details.tube) + put.details.size for put in puts)
        self.samples.append(self.resident_kib() - bodies // 1024)
        if self.plan.file_size:
            used, limit = self.disk_bytes(), 3 * bodies + 2 * self.plan.file_size
            assert used <= limit, f"{used} bytes of files where {limit} are allowed"

    @staticmethod
    def wait_for_stat(connection, key, value):
        wait_until(f"{key} is {value}", lambda: connection.facts("stats")[key] == str(value))

    def open_files(self):
        """Without those that the server keeps in reserve, which are copies of its log: at any moment one is used."""
        directory, count = f"/proc/{self.server.process.pid}/fd", 0
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):
                count += not os.readlink(f"{directory}/{name}").endswith(".log")
        return count

    def resident_kib(self):
        with open(f"/proc/{self.server.process.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))

    def disk_bytes(self):
        total = 0
        for entry in os.scandir(self.server.binlog):
            # A file may be removed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_blocks * 512
        return total

    # At the end.

    def check_nothing_is_left(self):
        with Connection(self.server.address) as connection:
            # A connection that watches many tubes is closed in steps.
            for key, value in {"current-connections": 1, "current-waiting": 0, "current-workers": 0,
                               "current-producers": 0, "current-tubes": 1}.items():
                self.wait_for_stat(connection, key, value)
        wait_until("no descriptor is left", lambda: self.open_files() <= self.files_before)

    def check_samples(self):
        """The memory of the last quarter may not be much more than that of the second one."""
        quarter = len(self.samples) // 4
        if self.seconds and quarter:
            earlier, later = max(self.samples[quarter:2 * quarter]), max(self.samples[-quarter:])
            assert later <= earlier + MARGIN_KIB, f"memory grows: {self.samples}"

    def check_binlog_is_empty(self):
        """Deleted jobs stay deleted, and their files are removed."""
        wait_until("one file is left", lambda: self.disk_bytes() <= self.plan.file_size + 4096)
        self.server.kill()
        report = run(self.server.program, "-b", self.server.binlog, "--check")
        assert " 0 jobs: sound" in report and "damaged" not in report, report


def main():
    program, scenario, seed, seconds = sys.argv[1:]
    with Workspace() as workspace:
        soak = Soak(workspace, os.path.abspath(program), PLANS[scenario], seed, float(seconds))
        print(soak.play())


if __name__ == "__main__":
    main()

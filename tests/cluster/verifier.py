"""Asks the active server for every job, and checks the history."""
import contextlib
import random
import time

from checker import Checker
from client import Closed
from workload import Session
from workspace import PATIENCE_S

# Deleted jobs that are asked for, besides all others; the last time it is all of them.
DELETED_SAMPLE = 3000


class Verifier:
    """Clients must pause meanwhile."""

    def __init__(self, cluster, history, seed):
        self.cluster = cluster
        self.history = history
        self.random = random.Random(f"{seed}/verifier")

    def check(self, is_last):
        checker = Checker(self.history)
        if is_last:
            checker.check_all()
        else:
            checker.check_changed()

    def ask_for_jobs(self, is_last=False, server=None):
        """Asks for the body and the state of every job. A change of leader makes it begin again.

        `server` is the server to ask, instead of the active one.
        """
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                active = server or self.cluster.wait_for_active()
                with contextlib.closing(Session(self.history, (active.address, active.port))) as session:
                    self.ask_session(session, self.jobs_to_ask_for(is_last))
                return
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
        jobs = list(jobs)
        for first in range(0, len(jobs), 100):
            commands = []
            for job in jobs[first:first + 100]:
                if job in self.history.jobs:
                    commands += [session.peek(job), session.stats_job(job)]
                else:
                    # It is gone, or no client knows it. Only a job that is found is recorded.
                    commands.append(session.peek_unknown(job))
            session.run(commands)

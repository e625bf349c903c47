"""What clients did: each command, when it was sent, when its reply came, and what the reply was.

All times are of one monotonic clock. `sent` is read before a command leaves and `replied` after its
reply has arrived, so that the command took effect between the two. A command without a reply has an
unknown outcome: it took effect after `sent`, or never.
"""
import dataclasses
import random
import threading
import time
import typing

# Replies that promise that a command had no effect.
REFUSALS = ("OUT_OF_MEMORY", "DRAINING", "JOB_TOO_BIG", "INTERNAL_ERROR", "EXPECTED_CRLF")


class Violation(Exception):
    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclasses.dataclass(slots=True, eq=False)
class Caller:
    """A connection to one server process."""
    name: str
    pid: int
    # When the client closed the connection, or noticed its end.
    ended: float = None
    # When the server had closed it: no command of it comes later.
    gone: float = None


class Put(typing.NamedTuple):
    """The details of a put. The number is in the body, so that the body names its put."""
    number: int
    tube: str
    pri: int
    delay: int
    ttr: int
    size: int


@dataclasses.dataclass(slots=True, eq=False)
class Operation:
    """One command, as far as it concerns one job, or one tube."""
    kind: str
    caller: Caller
    sent: float
    # Of a put a Put, of release (pri, delay), of bury the priority, of stats-job (pri, time-left).
    details: object = None
    replied: float = None
    # The first word of the reply, or `None` while the outcome is unknown. For stats-job the state.
    result: str = None

    def __repr__(self):
        reply = f"{self.replied:.3f} {self.result}" if self.replied is not None else "no reply"
        details = "" if self.details is None else f" {self.details}"
        return (f"{self.sent:.3f} .. {reply}: {self.kind}{details}"
                f" (connection {self.caller.name}, pid {self.caller.pid})")


@dataclasses.dataclass(slots=True)
class Answers:
    """When one server process proved that it answers clients: bounds of its first and last answer."""
    pid: int
    # It had answered at this time, and it answered after this time.
    first_replied: float
    last_sent: float


def make_body(number, size):
    """Returns the body of a put: its number and size, and random bytes that follow from them."""
    head = b"%d:%d:" % (number, size)
    return (head + random.Random(number).randbytes(max(size - len(head), 0)))[:max(size, len(head))]


def read_body(body):
    """Returns the number of the put that made this body, or `None` for a body that no put made."""
    try:
        number, size, _ = body[:50].split(b":", 2)
        number, size = int(number), int(size)
    except ValueError:
        return None
    return number if make_body(number, size) == body else None


class History:
    """All operations, by job, and the answers of each server process. Used from several threads."""

    def __init__(self):
        self.lock = threading.Lock()
        self.callers = 0
        self.puts = []
        # The operations on each job, in any order.
        self.jobs = {}
        # Jobs with operations that the checker has not seen.
        self.changed = set()
        # Jobs that are deleted for certain; their operations are dropped.
        self.gone = set()
        # The number of the put that made each job.
        self.put_of_job = {}
        self.job_of_put = {}
        self.newest_job = 1
        # The number of jobs in the queue, roughly: unknown outcomes are not counted.
        self.backlog = 0
        # Reserves without a reply, and the tubes of each.
        self.reserves = {}
        # Connections that clients have closed, and that the server may not have closed yet.
        self.closed = []
        self.answers = {}

    def caller(self, pid):
        with self.lock:
            self.callers += 1
            return Caller(str(self.callers), pid)

    def answered(self, caller, sent, replied):
        """Records that the server process of this connection answered in this interval."""
        with self.lock:
            answers = self.answers.setdefault(caller.pid, Answers(caller.pid, replied, sent))
            answers.first_replied = min(answers.first_replied, replied)
            answers.last_sent = max(answers.last_sent, sent)

    def begin(self, kind, caller, job=None, details=None, sent=None):
        """Records a command that is about to be sent, on a job if it names one."""
        operation = Operation(kind, caller, time.monotonic() if sent is None else sent, details)
        if job is not None:
            self.add(job, operation)
        return operation

    def begin_put(self, caller, tube, pri, delay, ttr, size, sent=None):
        """Records a put that is about to be sent; `make_body` returns its body."""
        with self.lock:
            number = len(self.puts)
            size = max(size, len(b"%d:%d:" % (number, size)))
            operation = self.begin("put", caller, None, Put(number, tube, pri, delay, ttr, size), sent)
            self.puts.append(operation)
        return operation

    def end(self, operation, result, replied=None):
        operation.replied = time.monotonic() if replied is None else replied
        operation.result = result
        self.backlog += {"INSERTED": 1, "DELETED": -1}.get(result, 0)
        self.answered(operation.caller, operation.sent, operation.replied)

    def found(self, operation, job, body):
        """Records that a command found this job with this body."""
        number = read_body(body)
        if number is None:
            raise Violation("changed", f"job {job} has a body of {len(body)} bytes that no client put:"
                                       f" {body[:60]!r}; {operation}")
        self.bind(job, number)

    def bind(self, job, number):
        """Records that a job comes from a put. Each put makes at most one job."""
        with self.lock:
            if number >= len(self.puts):
                raise Violation("changed", f"job {job} has the body of a put {number} that no client sent")
            put = self.puts[number]
            self.newest_job = max(self.newest_job, job)
            known = self.put_of_job.setdefault(job, number)
            if known != number:
                raise Violation("id given twice",
                                f"job {job} is that of two puts:\n  {self.puts[known]}\n  {put}")
            known = self.job_of_put.setdefault(number, job)
            if known != job:
                raise Violation("doubled", f"one put made job {known} and job {job}:\n  {put}")
            if put.result in REFUSALS:
                raise Violation("refused and kept", f"job {job} was refused:\n  {put}")
            if put not in self.jobs.setdefault(job, []) and job not in self.gone:
                self.jobs[job].append(put)
                self.changed.add(job)

    def add(self, job, operation):
        with self.lock:
            self.jobs.setdefault(job, []).append(operation)
            self.changed.add(job)

    def settle(self):
        """Records that the server has closed all connections that clients have closed."""
        for caller in self.closed:
            caller.gone = time.monotonic()
        self.closed.clear()

    def begin_reserve(self, tubes, operation):
        with self.lock:
            self.reserves[operation] = tubes

    def end_reserve(self, operation):
        with self.lock:
            del self.reserves[operation]

    def retire(self, job):
        """Drops the operations on a job that is deleted for certain."""
        with self.lock:
            self.gone.add(job)
            self.jobs.pop(job, None)

    def successions(self):
        """Returns for each server process the time at which a later one had answered."""
        with self.lock:
            order = sorted(self.answers.values(), key=lambda answers: answers.first_replied)
        return {one.pid: later.first_replied for one, later in zip(order, order[1:])}

"""What clients did: each command, when it was sent, when its reply came, and what the reply was.

All times are of one monotonic clock. `sent` is read before a command leaves and `replied` after its
reply has arrived, so that the command took effect between the two. A command without a reply has an
unknown outcome: it took effect after `sent`, or never.
"""
import random
import threading
import time

# Replies that promise that a command had no effect.
REFUSALS = ("OUT_OF_MEMORY", "DRAINING", "JOB_TOO_BIG", "INTERNAL_ERROR", "EXPECTED_CRLF")


class Caller:
    """A connection to one server process."""

    __slots__ = ("number", "pid", "ended")

    def __init__(self, number, pid):
        self.number = number
        self.pid = pid
        # When the client closed the connection, or noticed its end.
        self.ended = None


class Operation:
    """One command, as far as it concerns one job, or one tube."""

    __slots__ = ("kind", "caller", "sent", "replied", "result", "details")

    def __init__(self, kind, caller, sent, details=None):
        self.kind = kind
        self.caller = caller
        self.sent = sent
        self.replied = None
        # The first word of the reply, or `None` while the outcome is unknown. For stats-job the
        # state; EITHER for a job of a batch of which some were deleted and some were not found.
        self.result = None
        self.details = details

    def __repr__(self):
        reply = f"{self.replied:.3f} {self.result}" if self.replied is not None else "no reply"
        details = "" if self.details is None else f" {self.details}"
        return (f"{self.sent:.3f} .. {reply}: {self.kind}{details}"
                f" (connection {self.caller.number}, pid {self.caller.pid})")


class Put:
    """The details of a put. The number is in the body, so that the body names its put."""

    __slots__ = ("number", "tube", "pri", "delay", "ttr", "size")

    def __init__(self, number, tube, pri, delay, ttr, size):
        self.number = number
        self.tube = tube
        self.pri = pri
        self.delay = delay
        self.ttr = ttr
        self.size = size

    def __repr__(self):
        return (f"number {self.number} in {self.tube}, pri {self.pri}, delay {self.delay},"
                f" ttr {self.ttr}, {self.size} bytes")


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


class Violation(Exception):
    """The servers broke a promise."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Answers:
    """When one server process proved that it answers clients: bounds of its first and last answer."""

    __slots__ = ("pid", "first_replied", "last_sent", "first_sent", "last_replied", "ended")

    def __init__(self, pid, sent, replied):
        self.pid = pid
        # It had answered at this time, and it answered after this time.
        self.first_replied = replied
        self.last_sent = sent
        self.first_sent = sent
        self.last_replied = replied
        # When this test saw the end of the process.
        self.ended = None


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
        self.kicks = {}
        self.flushes = {}
        self.unknown_reserves = {}
        self.answers = {}
        self.counts = {"acknowledged": 0, "refused": 0, "unknown": 0}
        # Gaps without any answer: seconds, when the gap ended.
        self.last_answer = None
        self.longest_gap = (0, None)

    def caller(self, pid):
        with self.lock:
            self.callers += 1
            return Caller(self.callers, pid)

    def answered(self, caller, sent, replied):
        """Records that the server process of this connection answered in this interval."""
        with self.lock:
            answers = self.answers.get(caller.pid)
            if answers is None:
                answers = self.answers[caller.pid] = Answers(caller.pid, sent, replied)
            answers.first_replied = min(answers.first_replied, replied)
            answers.last_sent = max(answers.last_sent, sent)
            answers.first_sent = min(answers.first_sent, sent)
            answers.last_replied = max(answers.last_replied, replied)
            if self.last_answer is not None and replied - self.last_answer > self.longest_gap[0]:
                self.longest_gap = (replied - self.last_answer, replied)
            self.last_answer = max(self.last_answer or 0, replied)

    def begin(self, kind, caller, job=None, details=None):
        """Records a command that is about to be sent."""
        operation = Operation(kind, caller, time.monotonic(), details)
        if job is not None:
            self.add(job, operation)
        return operation

    def new_put(self, caller, tube, pri, delay, ttr, size):
        with self.lock:
            number = len(self.puts)
            size = max(size, len(b"%d:%d:" % (number, size)))
            operation = Operation("put", caller, time.monotonic(),
                                  Put(number, tube, pri, delay, ttr, size))
            self.puts.append(operation)
        return operation, make_body(number, size)

    def end(self, operation, result, replied=None):
        """Records the reply to a command."""
        operation.replied = time.monotonic() if replied is None else replied
        operation.result = result
        self.answered(operation.caller, operation.sent, operation.replied)

    def count(self, outcome, number=1):
        with self.lock:
            self.counts[outcome] += number

    def inserted(self, operation, job):
        """Records the id that a put was given."""
        with self.lock:
            self.bind(job, operation.details.number)

    def found(self, operation, job, body):
        """Records that a command found this job with this body."""
        number = read_body(body)
        if number is None:
            raise Violation("changed", f"job {job} has a body of {len(body)} bytes that no client put:"
                                       f" {body[:60]!r}; {operation}")
        with self.lock:
            self.bind(job, number)

    def bind(self, job, number):
        """Records that a job comes from a put. Each put makes at most one job. Needs the lock."""
        if number >= len(self.puts):
            raise Violation("changed", f"job {job} has the body of a put {number} that no client sent")
        put = self.puts[number]
        known = self.put_of_job.setdefault(job, number)
        if known != number:
            raise Violation("id given twice", f"job {job} is that of two puts:\n  {self.puts[known]}\n"
                                              f"  {put}")
        known = self.job_of_put.setdefault(number, job)
        if known != job:
            raise Violation("doubled", f"one put made job {known} and job {job}:\n  {put}")
        if put.result in REFUSALS:
            raise Violation("refused and kept", f"job {job} was refused:\n  {put}")
        operations = self.jobs.setdefault(job, [])
        if put not in operations and job not in self.gone:
            operations.append(put)
            self.changed.add(job)

    def add(self, job, operation):
        """Adds an operation to those of a job."""
        with self.lock:
            self.jobs.setdefault(job, []).append(operation)
            self.changed.add(job)

    def retire(self, job):
        """Drops the operations on a job that is deleted for certain."""
        with self.lock:
            self.gone.add(job)
            self.jobs.pop(job, None)

    def add_kick(self, tube, operation):
        with self.lock:
            self.kicks.setdefault(tube, []).append(operation)

    def add_flush(self, tube, operation):
        with self.lock:
            self.flushes.setdefault(tube, []).append(operation)

    def add_unknown_reserve(self, tubes, operation):
        with self.lock:
            for tube in tubes:
                self.unknown_reserves.setdefault(tube, []).append(operation)

    def process_ended(self, pid):
        with self.lock:
            if pid in self.answers:
                self.answers[pid].ended = time.monotonic()

    def successions(self):
        """Returns for each server process the time at which a later one had answered."""
        with self.lock:
            order = sorted(self.answers.values(), key=lambda answers: answers.first_replied)
        return {one.pid: later.first_replied for one, later in zip(order, order[1:])}

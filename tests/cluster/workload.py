"""Clients that send random commands and record each one in the history."""
import collections
import contextlib
import random
import threading
import time

from client import Closed, Connection, encode, parse_facts
from history import REFUSALS, Violation

# A client waits at most this long for a reply; then the outcome is unknown.
REPLY_S = 20
TUBES = ("mail", "images", "kicked", "wiped")
# Only in these do `kick` and `flush-tube` reach jobs that they do not name.
KICKED, WIPED = "kicked", "wiped"
# The number of jobs that the clients keep the queue near to.
FEW, MANY = 300, 3000


class Gate:
    """Lets clients work, or makes all of them pause between two commands."""

    def __init__(self):
        self.changed = threading.Condition()
        self.is_closed = False
        self.inside = 0

    def __enter__(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.is_closed)
            self.inside += 1

    def __exit__(self, *_):
        with self.changed:
            self.inside -= 1
            self.changed.notify_all()

    @contextlib.contextmanager
    def closed(self):
        """No client is within a command."""
        with self.changed:
            self.is_closed = True
            self.changed.wait_for(lambda: self.inside == 0)
        try:
            yield
        finally:
            with self.changed:
                self.is_closed = False
                self.changed.notify_all()


class Session:
    """A connection whose commands are recorded. The first reply has the pid of the server."""

    def __init__(self, history, address, patience=REPLY_S):
        self.history = history
        self.held = []
        self.watched = ["default"]
        sent = time.monotonic()
        self.connection = Connection(address, patience)
        try:
            facts = self.connection.facts("stats")
        except Closed:
            self.connection.close()
            raise
        self.caller = history.caller(int(facts["pid"]))
        history.answered(self.caller, sent, time.monotonic())

    def close(self):
        if self.caller.ended is None:
            self.caller.ended = time.monotonic()
        self.connection.close()

    def end(self, operation, result, allowed):
        """Records a reply, which must be one of `allowed` or a refusal."""
        self.history.end(operation, result)
        if result in REFUSALS:
            self.history.count("refused")
        elif result in allowed:
            self.history.count("acknowledged")
        else:
            raise Violation("unexpected reply", repr(operation))

    def run(self, commands):
        """Sends all commands at once, then reads their replies in order.

        A command is its bytes, its operation, and a function that takes its reply.
        """
        waiting = collections.deque(commands)
        try:
            self.connection.send_bytes(b"".join(command for command, _, _ in commands))
            while waiting:
                words, body = self.connection.reply()
                _, _, take = waiting.popleft()
                take(words, body)
        except Closed:
            self.history.count("unknown", len(waiting))
            raise

    def on_job(self, kind, job, line, allowed, details=None):
        """Returns a command that names a job."""
        operation = self.history.begin(kind, self.caller, job, details)

        def take(words, body):
            if words[0] in ("FOUND", "RESERVED"):
                self.check_id(operation, job, words)
                self.history.found(operation, job, body)
            self.end(operation, words[0], allowed)
        return encode(line), operation, take

    @staticmethod
    def check_id(operation, job, words):
        if int(words[1]) != job:
            raise Violation("unexpected reply", f"job {words[1]} instead of {job}: {operation}")

    def put(self, tube, pri, delay, ttr, size):
        operation, body = self.history.new_put(self.caller, tube, pri, delay, ttr, size)
        line = f"put-in-tube {tube} {pri} {delay} {ttr} {len(body)}"

        def take(words, _):
            self.end(operation, words[0], ["INSERTED"])
            if words[0] == "INSERTED":
                self.history.inserted(operation, int(words[1]))
        return encode((line, body)), operation, take

    def delete(self, job):
        return self.on_job("delete", job, f"delete {job}", ["DELETED", "NOT_FOUND"])

    def release(self, job, pri, delay):
        return self.on_job("release", job, f"release {job} {pri} {delay}", ["RELEASED", "NOT_FOUND"],
                           (pri, delay))

    def bury(self, job, pri):
        return self.on_job("bury", job, f"bury {job} {pri}", ["BURIED", "NOT_FOUND"], pri)

    def touch(self, job):
        return self.on_job("touch", job, f"touch {job}", ["TOUCHED", "NOT_FOUND"])

    def kick_job(self, job):
        return self.on_job("kick-job", job, f"kick-job {job}", ["KICKED", "NOT_FOUND"])

    def peek(self, job):
        return self.on_job("peek", job, f"peek {job}", ["FOUND", "NOT_FOUND"])

    def peek_unknown(self, job):
        """Returns a peek that is recorded only if there is such a job."""
        operation = self.history.begin("peek", self.caller)

        def take(words, body):
            self.end(operation, words[0], ["FOUND", "NOT_FOUND"])
            if words[0] == "FOUND":
                self.check_id(operation, job, words)
                self.history.found(operation, job, body)
                self.history.add(job, operation)
        return encode(f"peek {job}"), operation, take

    def reserve_job(self, job):
        return self.on_job("reserve-job", job, f"reserve-job {job}", ["RESERVED", "NOT_FOUND"])

    def stats_job(self, job):
        operation = self.history.begin("stats-job", self.caller, job)

        def take(words, body):
            if words[0] == "OK":
                facts = parse_facts(body)
                if int(facts["id"]) != job:
                    raise Violation("unexpected reply", f"{facts}: {operation}")
                # The details must be complete before the result is.
                operation.details = int(facts["pri"]), int(facts["time-left"])
                self.end(operation, facts["state"], ["ready", "reserved", "delayed", "buried"])
            else:
                self.end(operation, words[0], ["NOT_FOUND"])
        return encode(f"stats-job {job}"), operation, take

    def reserve(self, line):
        """Reserves jobs, and returns their ids."""
        operation = self.history.begin("reserve", self.caller)
        try:
            self.connection.send(line)
            words, body = self.connection.reply()
            jobs = [(words, body)]
            if words[0] == "RESERVED_BATCH":
                jobs = [self.connection.reply() for _ in range(int(words[1]))]
        except Closed:
            self.history.add_unknown_reserve(self.watched, operation)
            self.history.count("unknown")
            raise
        self.end(operation, words[0], ["RESERVED", "RESERVED_BATCH", "TIMED_OUT", "DEADLINE_SOON"])
        if not words[0].startswith("RESERVED"):
            return []
        reserved = []
        for words, body in jobs:
            if words[0] != "RESERVED":
                raise Violation("unexpected reply", f"{words} in a batch: {operation}")
            job = int(words[1])
            self.history.found(operation, job, body)
            one = self.history.begin("reserve", self.caller)
            one.sent, one.replied, one.result = operation.sent, operation.replied, "RESERVED"
            self.history.add(job, one)
            reserved.append(job)
        self.held += reserved
        return reserved

    def delete_batch(self, jobs):
        operations = [self.history.begin("delete", self.caller, job) for job in jobs]
        try:
            words = self.connection.ask("delete-batch " + " ".join(map(str, jobs)))
        except Closed:
            self.history.count("unknown", len(jobs))
            raise
        result, deleted = words[0], 0
        if result == "DELETED_BATCH":
            deleted, missing = int(words[1]), int(words[2])
            if deleted + missing != len(jobs):
                raise Violation("unexpected reply", f"{words} for {len(jobs)} jobs")
            result = "DELETED" if missing == 0 else "NOT_FOUND" if deleted == 0 else "EITHER"
        for operation in operations:
            self.end(operation, result, ["DELETED", "NOT_FOUND", "EITHER"])
        return deleted

    def kick(self, tube, count):
        """Kicks jobs of a tube; returns whether that was not refused."""
        self.use(tube)
        operation = self.history.begin("kick", self.caller)
        self.history.add_kick(tube, operation)
        self.end(operation, self.ask(f"kick {count}")[0], ["KICKED"])
        return operation.result == "KICKED"

    def peek_buried(self, tube):
        """Returns the first buried job of a tube, or `None`. It is not recorded."""
        self.use(tube)
        found = self.connection.peek("peek-buried")
        return found and found[0]

    def flush(self, tube):
        operation = self.history.begin("flush", self.caller)
        self.history.add_flush(tube, operation)
        words = self.ask(f"flush-tube {tube}")
        self.end(operation, words[0], ["FLUSHED", "NOT_FOUND"])
        return int(words[1]) if words[0] == "FLUSHED" else 0

    def ask(self, line):
        try:
            return self.connection.ask(line)
        except Closed:
            self.history.count("unknown")
            raise

    def notice_end(self):
        """Notes it if the server has closed the connection."""
        if self.caller.ended is None and self.connection.is_closed():
            self.caller.ended = time.monotonic()

    def use(self, tube):
        sent = time.monotonic()
        self.connection.must("USING", f"use {tube}")
        self.history.answered(self.caller, sent, time.monotonic())

    def watch(self, tubes):
        """Watches these tubes and no other."""
        for tube in tubes:
            self.connection.must("WATCHING", f"watch {tube}")
        self.connection.must("WATCHING", "ignore default")
        self.watched = list(tubes)


class Workload:
    """What all clients share."""

    def __init__(self, history, seed):
        self.history = history
        self.seed = seed
        self.gate = Gate()
        self.is_over = threading.Event()
        self.failures = []
        # Jobs that any client may name, of all ages.
        self.known = collections.deque(maxlen=2000)
        self.clients = []
        # The number of jobs in the queue, roughly: unknown outcomes are not counted.
        self.backlog = 0

    def start(self, name, address):
        client = Client(self, name, address)
        self.clients.append(client)
        client.start()

    def stop(self):
        self.is_over.set()
        for client in self.clients:
            client.join()

    def fail(self, failure):
        self.failures.append(failure)

    def raise_failure(self):
        if self.failures:
            raise self.failures[0]

    def notice_ends(self):
        """Lets clients that pause notice that their connections were closed."""
        for client in self.clients:
            if client.session is not None:
                client.session.notice_end()

    def adjust_backlog(self, by):
        with self.gate.changed:
            self.backlog += by


class Client(threading.Thread):
    """A client with random commands on one connection, which it opens again and again."""

    def __init__(self, workload, name, address):
        super().__init__(name=name, daemon=True)
        self.workload = workload
        self.history = workload.history
        self.address = address
        self.random = random.Random(f"{workload.seed}/{name}")
        self.session = None

    def run(self):
        try:
            while not self.workload.is_over.is_set():
                with self.workload.gate:
                    self.work()
                time.sleep(self.random.uniform(0, 0.03))
        except Exception as failure:
            self.workload.fail(failure)
        finally:
            self.close()

    def close(self):
        if self.session is not None:
            self.session.close()
            self.session = None

    def work(self):
        """Runs one action; connects before, where that is necessary."""
        try:
            if self.session is None:
                self.session = Session(self.history, self.address)
                self.session.watch(self.random.sample(TUBES, self.random.randint(1, len(TUBES))))
            self.choose_action()()
            if self.random.random() < 0.01:
                self.close()
        except Closed:
            self.close()
            # A server that stands by refuses connections.
            time.sleep(0.05)

    def choose_action(self):
        backlog = self.workload.backlog
        puts = 0 if backlog > MANY else 30 if backlog < FEW else 10
        actions = [
            (puts, self.put), (puts / 10, self.put_many), (10, self.reserve), (5, self.reserve_batch),
            (25, self.finish_one), (6, self.finish_batch), (5, self.name_one), (1, self.kick),
            (0.3, self.flush), (1, self.work_pipelined),
        ]
        weights, choices = zip(*actions)
        return self.random.choices(choices, weights)[0]

    def put_command(self, largest):
        draw = self.random
        size = int(largest ** draw.random())
        delay = 0 if draw.random() < 0.8 else draw.randint(1, 30)
        ttr = draw.choice([30, 60, 120])
        return self.session.put(draw.choice(TUBES), draw.choice([0, 1, 1024, 4294967295, draw.getrandbits(32)]),
                                delay, ttr, size)

    def run_commands(self, commands):
        self.session.run(commands)
        for _, operation, _ in commands:
            if operation.kind == "put" and operation.result == "INSERTED":
                self.workload.known.append(self.history.job_of_put[operation.details.number])
                self.workload.adjust_backlog(1)
            elif operation.kind == "delete" and operation.result == "DELETED":
                self.workload.adjust_backlog(-1)

    def put(self):
        self.run_commands([self.put_command(4000)])

    def put_many(self):
        """Puts of up to 2 MB in one write: a batch of several chunks."""
        largest = self.random.choice([100, 4000, 60_000])
        self.run_commands([self.put_command(largest) for _ in range(self.random.randint(2, 150))])

    def reserve(self):
        self.session.reserve(f"reserve-with-timeout {self.random.choice([0, 0, 0, 1])}")

    def reserve_batch(self):
        self.session.reserve(f"reserve-batch {self.random.randint(1, 40)}")

    def take_held(self):
        held = self.session.held
        return held.pop(self.random.randrange(len(held)))

    def finish_one(self):
        if self.session.held:
            self.run_commands([self.finish(self.take_held())])

    def finish(self, job):
        """Returns a command that ends the reservation of a job, or renews it."""
        session, draw = self.session, self.random
        kind = draw.choices(["delete", "release", "bury", "touch", "kick"], [60, 20, 12, 5, 3])[0]
        if kind == "delete":
            return session.delete(job)
        if kind == "release":
            delay = 0 if draw.random() < 0.6 else draw.randint(1, 20)
            return session.release(job, draw.randint(0, 5000), delay)
        if kind == "bury":
            return session.bury(job, draw.randint(0, 5000))
        session.held.append(job)
        return session.touch(job) if kind == "touch" else session.kick_job(job)

    def finish_batch(self):
        held = self.session.held
        jobs = [self.take_held() for _ in range(self.random.randint(0, len(held)))]
        if jobs:
            self.workload.adjust_backlog(-self.session.delete_batch(jobs))

    def work_pipelined(self):
        """Finishes several jobs and puts some, all in one write."""
        count = self.random.randint(0, len(self.session.held))
        commands = [self.finish(self.take_held()) for _ in range(count)]
        commands += [self.put_command(4000) for _ in range(self.random.randint(1, 10))]
        self.run_commands(commands)

    def name_one(self):
        """A command that names a job of any state, also one that is gone."""
        if not self.workload.known:
            return
        job = self.random.choice(self.workload.known)
        session = self.session
        kind = self.random.choice(["peek", "stats", "kick", "delete", "reserve"])
        if kind == "reserve":
            command = session.reserve_job(job)
        else:
            command = {"peek": session.peek, "stats": session.stats_job, "kick": session.kick_job,
                       "delete": session.delete}[kind](job)
        self.run_commands([command])
        if kind == "reserve" and command[1].result == "RESERVED":
            session.held.append(job)

    def kick(self):
        self.session.kick(KICKED, self.random.randint(1, 100))

    def flush(self):
        self.workload.adjust_backlog(-self.session.flush(WIPED))

"""Clients that send random commands and record each one in the history, and observers."""
import collections
import contextlib
import random
import select
import socket
import struct
import threading
import time

from workspace import Worker, stop
from beanstalk import Closed, Connection, encode, parse_facts
from history import REFUSALS, Violation, make_body

# A client waits at most this long for a reply; then the outcome is unknown.
REPLY_S = 20
TUBES = ("mail", "images", "sounds", "words")
# The number of jobs that the clients keep the queue near to.
FEW, MANY = 300, 3000
# The replies to commands that name a job, if there is one.
DONE = {"delete": "DELETED", "release": "RELEASED", "bury": "BURIED", "touch": "TOUCHED",
        "kick-job": "KICKED", "peek": "FOUND", "reserve-job": "RESERVED"}
STATES = ("ready", "reserved", "delayed", "buried")


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
    """A connection whose commands are recorded. The first reply has the pid of the server.

    A command is its bytes, its operation, and a function that takes its reply.
    """

    def __init__(self, history, address):
        self.history = history
        # Jobs that are reserved by this connection.
        self.held = []
        self.watched = ["default"]
        sent = time.monotonic()
        self.connection = Connection(address, REPLY_S)
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
        self.history.closed.append(self.caller)
        self.connection.close()

    def notice_end(self):
        """Notes it if the server has closed the connection."""
        if self.caller.ended is None and self.connection.is_closed():
            self.caller.ended = time.monotonic()

    def must(self, word, line):
        sent = time.monotonic()
        self.connection.must(word, line)
        self.history.answered(self.caller, sent, time.monotonic())

    def watch(self, tubes):
        """Watches these tubes and no other."""
        for tube in tubes:
            self.must("WATCHING", f"watch {tube}")
        self.must("WATCHING", "ignore default")
        self.watched = list(tubes)

    def run(self, *commands, is_last=False):
        """Sends all commands at once, then takes their replies in order; returns the last operation. After the
        last commands the connection is half-closed."""
        self.connection.send_bytes(b"".join(command for command, _, _ in commands))
        if is_last:
            self.connection.half_close()
        for _, operation, take in commands:
            take(*self.connection.reply())
        if is_last and not self.connection.is_closed(REPLY_S):
            raise Violation("unexpected reply", f"after the last one, {operation}")
        return operation

    def abandon(self, commands, share, is_reset):
        """Sends commands, or the first part of them, and reads no reply, as a client that crashes."""
        data = b"".join(command for command, _, _ in commands)
        self.connection.send_bytes(data[:int(share * len(data))])
        if is_reset:
            self.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def end(self, operation, result, *allowed):
        """Records a reply, which must be one of `allowed` or a refusal."""
        self.history.end(operation, result)
        if result not in (*REFUSALS, *allowed):
            raise Violation("unexpected reply", repr(operation))

    def check_id(self, operation, job, found):
        if int(found) != job:
            raise Violation("unexpected reply", f"job {found} instead of {job}: {operation}")

    def put(self, tube, pri, delay, ttr, size):
        operation = self.history.begin_put(self.caller, tube, pri, delay, ttr, size)
        body = make_body(operation.details.number, operation.details.size)

        def take(words, _):
            self.end(operation, words[0], "INSERTED")
            if words[0] == "INSERTED":
                self.history.bind(int(words[1]), operation.details.number)
        return encode((f"put-in-tube {tube} {pri} {delay} {ttr} {len(body)}", body)), operation, take

    def on_job(self, kind, job, *arguments, is_known=True):
        """Returns a command that names a job. If the job is not known, only a job that is found is recorded."""
        details = arguments if kind == "release" else arguments[0] if kind == "bury" else None
        operation = self.history.begin(kind, self.caller, job if is_known else None, details)

        def take(words, body):
            if words[0] in ("FOUND", "RESERVED"):
                self.check_id(operation, job, words[1])
                self.history.found(operation, job, body)
                if not is_known:
                    self.history.add(job, operation)
                if words[0] == "RESERVED":
                    self.held.append(job)
            self.end(operation, words[0], DONE[kind], "NOT_FOUND")
        return encode(" ".join(map(str, (kind, job, *arguments)))), operation, take

    def stats_job(self, job):
        operation = self.history.begin("stats-job", self.caller, job)

        def take(words, body):
            if words[0] == "OK":
                facts = parse_facts(body)
                self.check_id(operation, job, facts["id"])
                # The details must be complete before the result is.
                operation.details = int(facts["pri"]), int(facts["time-left"])
                words = [facts["state"]]
            self.end(operation, words[0], "NOT_FOUND", *STATES)
        return encode(f"stats-job {job}"), operation, take

    def reserve(self, timeout_s=0):
        operation = self.history.begin("reserve", self.caller)
        # Until there is a reply, it may have reserved any job of these tubes.
        self.history.begin_reserve(self.watched, operation)

        def take(words, body):
            self.history.end_reserve(operation)
            self.end(operation, words[0], "RESERVED", "TIMED_OUT", "DEADLINE_SOON")
            if words[0] == "RESERVED":
                job = int(words[1])
                self.history.found(operation, job, body)
                self.history.add(job, operation)
                self.held.append(job)
        return encode(f"reserve-with-timeout {timeout_s}"), operation, take


class Workload:
    """What all clients share."""

    def __init__(self, history, seed, tubes=TUBES, crashes=False, pause_s=0.03):
        self.history = history
        self.seed = seed
        self.tubes = tubes
        # At the end of a connection replies are not read, or it is half-closed.
        self.crashes = crashes
        # The longest pause between two actions.
        self.pause_s = pause_s
        self.gate = Gate()
        self.failures = []
        self.clients = []

    def start(self, name, address, life=100):
        """Starts a client whose connections have so many actions, on average."""
        self.clients.append(Client(self, name, address, life))
        self.clients[-1].start()

    def stop(self):
        stop(self.clients)

    def raise_failure(self):
        if self.failures:
            raise self.failures[0]

    def notice_ends(self):
        """Lets clients that pause notice that their connections were closed."""
        for client in self.clients:
            if client.session is not None:
                client.session.notice_end()


class Client(Worker):
    """A client with random commands on one connection, which it opens again and again."""

    def __init__(self, workload, name, address, life):
        super().__init__(workload.failures)
        self.workload = workload
        self.life = life
        self.history = workload.history
        self.address = address
        self.random = random.Random(f"{workload.seed}/{name}")
        self.session = None

    def work(self):
        with self.workload.gate:
            self.connect_and_act()
        time.sleep(self.random.uniform(0, self.workload.pause_s))

    def close(self):
        if self.session is not None:
            self.session.close()
            self.session = None

    def connect_and_act(self):
        """Runs one action; connects before, where that is necessary."""
        draw, tubes = self.random, self.workload.tubes
        try:
            if self.session is None:
                self.session = Session(self.history, self.address)
                self.session.watch(draw.sample(tubes, draw.randint(1, min(len(tubes), 50))))
            is_last = draw.random() * self.life < 1
            commands = self.choose(draw, self.session)
            if is_last and self.workload.crashes:
                commands = commands or [self.put(4000)]
                if draw.random() < 0.3:
                    self.session.run(*commands, is_last=True)
                else:
                    self.session.abandon(commands, draw.choice([1, draw.random()]), draw.random() < 0.5)
            elif commands:
                self.session.run(*commands)
            if is_last:
                self.close()
        except Closed:
            self.close()
            # A server that stands by refuses connections.
            time.sleep(0.05)

    def choose(self, draw, session):
        backlog = self.history.backlog
        puts = 0 if backlog > MANY else 30 if backlog < FEW else 10
        weight_of_actions = {
            lambda: [self.put(4000)]: puts,
            # Up to 2 MB in one write: a batch of several chunks.
            lambda: self.puts(draw.randint(2, 150), draw.choice([100, 4000, 60_000])): puts / 10,
            lambda: [session.reserve(draw.choice([0, 0, 0, 1]))]: 10,
            lambda: [session.reserve() for _ in range(draw.randint(1, 40))]: 5,
            lambda: [self.finish(job) for job in self.take_held(1)]: 25,
            lambda: [session.on_job("delete", job) for job in self.take_held()]: 6,
            self.name_one: 5,
            # Several jobs and puts in one write.
            lambda: [self.finish(job) for job in self.take_held()] + self.puts(draw.randint(1, 10), 4000): 1,
        }
        action, = draw.choices(list(weight_of_actions), list(weight_of_actions.values()))
        return action()

    def puts(self, count, largest):
        return [self.put(largest) for _ in range(count)]

    def put(self, largest):
        draw = self.random
        size = int(largest ** draw.random())
        delay = 0 if draw.random() < 0.8 else draw.randint(1, 30)
        pri = draw.choice([0, 1, 1024, 4294967295, draw.getrandbits(32)])
        return self.session.put(draw.choice(self.workload.tubes), pri, delay, draw.choice([30, 60, 120]), size)

    def take_held(self, count=None):
        """Returns so many jobs that the session holds, or fewer, as not held any more."""
        held = self.session.held
        count = self.random.randint(0, len(held)) if count is None else min(count, len(held))
        return [held.pop(self.random.randrange(len(held))) for _ in range(count)]

    def finish(self, job):
        """Returns a command that ends the reservation of a job, or renews it."""
        draw = self.random
        kind = draw.choices(["delete", "release", "bury", "touch", "kick-job"], [60, 20, 12, 5, 3])[0]
        if kind in ("touch", "kick-job"):
            self.session.held.append(job)
        pri, delay = draw.randint(0, 5000), 0 if draw.random() < 0.6 else draw.randint(1, 20)
        return self.session.on_job(kind, job, *{"release": (pri, delay), "bury": (pri,)}.get(kind, ()))

    def name_one(self):
        """A command that names a job of any state, also one that is gone."""
        newest = self.history.newest_job
        job = self.random.randint(max(1, newest - 2000), newest)
        if job not in self.history.put_of_job:
            # No client knows which put made it.
            return []
        kind = self.random.choice(["peek", "stats-job", "kick-job", "delete", "reserve-job"])
        return [self.session.stats_job(job) if kind == "stats-job" else self.session.on_job(kind, job)]


class Observer(Worker):
    """One direct connection to a server, which sends a command every few milliseconds.

    It does not wait for replies. A server that is stopped for a while finds commands that were sent in the
    meantime, and betrays itself when it answers them after another server has answered.
    """

    INTERVAL_S = 0.025
    # A connection with more commands than this without a reply gets no further ones.
    MOST_PENDING = 2000
    REPLY = b"USING default\r\n"

    def __init__(self, history, address, failures):
        super().__init__(failures)
        self.history = history
        self.address = address

    def work(self):
        self.is_over.wait(self.INTERVAL_S)
        # A standby refuses connections, and a server that ends closes them.
        with contextlib.suppress(Closed, OSError), contextlib.closing(Session(self.history, self.address)) as session:
            self.observe(session.caller, session.connection)

    def observe(self, caller, connection):
        # When the commands without a reply were sent.
        pending = collections.deque()
        received = b""
        while not self.is_over.is_set():
            if len(pending) < self.MOST_PENDING:
                pending.append(time.monotonic())
                connection.send("list-tube-used")
            end = time.monotonic() + self.INTERVAL_S
            while select.select([connection.socket], [], [], max(0, end - time.monotonic()))[0]:
                data = connection.socket.recv(1 << 16)
                if not data:
                    return
                received += data
                while received.startswith(self.REPLY):
                    received = received[len(self.REPLY):]
                    self.history.answered(caller, pending.popleft(), time.monotonic())
                assert self.REPLY.startswith(received), f"list-tube-used: {received}"

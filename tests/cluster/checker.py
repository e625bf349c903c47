"""Checks a history: is there an order of the commands that explains every reply?

Slow and obvious. Each job is checked alone, against a small model of a job. Commands took effect at one
moment between `sent` and `replied`. The checker walks through these times and keeps every state that
the job can be in. A reply that none of these states allows is a `Violation`, which shows the
commands.
"""
import bisect
import collections
import math

from history import REFUSALS, Violation

# After a delay has ended, a job may be seen as delayed for this long, on a machine that is busy.
LATE_S = 15
# A server notices the end of a connection earlier than the client, but by less than this.
NOTICED_S = 10

# What a job can be. `holder` is the connection that has reserved it. `early` is the time at which a
# delay or a TTR ends, if the command took effect when it was sent; `late`, when the reply came. No
# record is written when a job is reserved, or when its TTR ends: `recorded` is the state in the log,
# where it is another one.
State = collections.namedtuple("State", "name holder pri early late recorded")
ABSENT = State("absent", None, None, None, None, None)
GONE = State("gone", None, None, None, None, None)
# Of a configuration: no command that has not ended has had its effect.
NOTHING = frozenset()
# The holder of a job that was reserved by a command without a reply.
UNKNOWN = "unknown"


def ready(pri):
    return State("ready", None, pri, None, None, None)


def ready_or_delayed(operation, pri, delay):
    if delay == 0:
        return ready(pri)
    replied = math.inf if operation.replied is None else operation.replied
    return State("delayed", None, pri, operation.sent + delay, replied + delay, None)


def exists(state):
    return state.name not in ("absent", "gone")


def step(state, operation, ttr):
    """Returns the states after an operation with this result; none if the result is impossible.

    The result `None` stands for a command without a reply that took effect.
    """
    kind, result, details = operation.kind, operation.result, operation.details
    if kind == "put":
        return [ready_or_delayed(operation, details.pri, details.delay)] if state == ABSENT else []
    if kind in ("peek", "stats-job"):
        if result == "NOT_FOUND":
            return [] if exists(state) else [state]
        return [state] if exists(state) and (kind == "peek" or agrees(state, operation)) else []
    after = change(state, operation, ttr)
    if result == "NOT_FOUND":
        return [state] if after is None else []
    return [] if after is None else [after]


def change(state, operation, ttr):
    """Returns the state after a command that found the job; `None` when the reply would be NOT_FOUND."""
    kind, details, name = operation.kind, operation.details, state.name
    is_own = name == "reserved" and state.holder is operation.caller
    if kind in ("reserve", "reserve-job"):
        if name == "ready" or (kind == "reserve-job" and name in ("delayed", "buried")):
            return State("reserved", operation.caller, state.pri, operation.sent + ttr, None,
                         state.recorded or state)
    elif kind == "kick-job":
        if name in ("buried", "delayed"):
            return ready(state.pri)
    elif kind == "delete":
        if name in ("ready", "delayed", "buried") or is_own:
            return GONE
    elif is_own:
        return {
            "release": lambda: ready_or_delayed(operation, *details),
            "bury": lambda: State("buried", None, details, None, None, None),
            "touch": lambda: state._replace(early=operation.sent + ttr),
        }[kind]()
    return None


def agrees(state, operation):
    """Returns whether the reply to stats-job describes this state."""
    pri, time_left = operation.details
    if (state.name, state.pri) != (operation.result, pri):
        return False
    if state.name != "delayed":
        return True
    # The job is due between these times; seconds are rounded down.
    due_early, due_late = operation.sent + time_left, operation.replied + time_left + 1
    return state.early - LATE_S <= due_late and due_early <= state.late + LATE_S


class Windows:
    """Intervals in which something may have happened to any job of a tube."""

    def __init__(self, intervals):
        intervals = sorted(intervals)
        self.starts = [start for start, _ in intervals]
        self.ends = []
        latest = -math.inf
        for _, end in intervals:
            latest = max(latest, end)
            self.ends.append(latest)

    def overlap(self, start, end):
        count = bisect.bisect_right(self.starts, end)
        return count > 0 and self.ends[count - 1] >= start


class Checker:
    """Checks the jobs of a history. One checker sees one moment of it."""

    def __init__(self, history):
        self.history = history
        self.successions = history.successions()
        self.restarts = Windows([(time, time) for time in self.successions.values()])
        intervals = collections.defaultdict(list)
        with history.lock:
            for operation, tubes in history.reserves.items():
                for tube in tubes:
                    intervals[tube].append((operation.sent, self.latest(operation)))
        self.reserves = {tube: Windows(of_tube) for tube, of_tube in intervals.items()}

    def latest(self, operation):
        """Returns the latest time at which an operation can have had its effect.

        A command without a reply was sent to a process. When a later process answers, it has read the
        log to its end: nothing of the earlier process comes after that. Nor does anything come of a
        connection that the server has closed.
        """
        if operation.replied is not None:
            return operation.replied
        return min(self.successions.get(operation.caller.pid, math.inf), operation.caller.gone or math.inf)

    def check(self, only_changed=False):
        """Checks every job, and all jobs together; or the jobs with operations since the last check."""
        with self.history.lock:
            jobs = list(self.history.changed if only_changed else self.history.jobs)
            self.history.changed.clear()
        self.check_jobs(jobs)
        if not only_changed:
            self.check_ids()
        self.check_answers()

    def check_jobs(self, jobs):
        for job in jobs:
            with self.history.lock:
                operations = list(self.history.jobs.get(job, ()))
            states = self.check_job(job, operations)
            # No command leads out of this state, and no client has sent one that has not ended.
            if states == {GONE}:
                self.history.retire(job)

    def check_job(self, job, operations):
        """Returns the states that the job can be in after all of its operations."""
        puts = [operation for operation in operations if operation.kind == "put"]
        if not puts:
            is_gone = job in self.history.gone
            seen = [operation for operation in operations
                    if operation.result not in (None, "NOT_FOUND", *REFUSALS)]
            if seen and is_gone:
                raise Violation("resurrected", f"job {job} was deleted long before:\n  {seen[0]}")
            if seen:
                raise Violation("invented", f"no client put job {job}:\n  {seen[0]}")
            return {GONE if is_gone else ABSENT}
        put = puts[0]
        walk = Walk(put.details.ttr, self.reserves.get(put.details.tube), self.restarts)
        for time, order, operation in self.events(operations):
            if order == 0:
                walk.begin(operation, time)
                continue
            before = walk.states()
            walk.end(operation, time)
            if not walk.configurations:
                raise Violation(name_of(before, operation), explain(job, operations, operation, before))
        return walk.states()

    def events(self, operations):
        """Returns the begin and the end of each operation in the order of their times."""
        events = []
        for index, operation in enumerate(operations):
            is_read = operation.kind in ("peek", "stats-job")
            # A command that an old process got when a new one had answered has no effect.
            has_no_effect = self.latest(operation) < operation.sent
            if operation.result in REFUSALS or (is_read and operation.result is None) or has_no_effect:
                continue
            events.append((operation.sent, 0, index))
            if self.latest(operation) < math.inf:
                events.append((self.latest(operation), 1, index))
        return [(time, order, operations[index]) for time, order, index in sorted(events)]

    def check_ids(self):
        """A put that is sent after the reply to another one gets a higher id."""
        with self.history.lock:
            puts = [(put, self.history.job_of_put[number])
                    for number, put in enumerate(self.history.puts) if put.result == "INSERTED"]
        by_reply = sorted(puts, key=lambda pair: pair[0].replied)
        highest, index = (None, 0), 0
        for put, job in sorted(puts, key=lambda pair: pair[0].sent):
            while by_reply[index][0].replied < put.sent:
                highest = max(highest, by_reply[index], key=lambda pair: pair[1])
                index += 1
            if job <= highest[1]:
                raise Violation("id went back", f"job {job} was put after job {highest[1]}:\n"
                                                f"  {highest[0]}\n  {put}")

    def check_answers(self):
        """No two server processes answered clients at one time.

        One process answered wholly before the other. If each has answered before the other, both
        served clients at one time.
        """
        with self.history.lock:
            processes = sorted(self.history.answers.values(), key=lambda answers: answers.first_replied)
        for index, one in enumerate(processes):
            for other in processes[index + 1:]:
                if other.first_replied < one.last_sent and one.first_replied < other.last_sent:
                    raise Violation("two servers", f"pid {one.pid} answered a command that was sent"
                                    f" {one.last_sent - other.first_replied:.3f} s after an answer of"
                                    f" pid {other.pid}, at {one.last_sent:.3f}")


class Walk:
    """The states of one job while the checker walks through its history.

    A configuration is a state, and which of the commands that have begun and not ended have already
    had their effect.
    """

    def __init__(self, ttr, reserves, restarts):
        self.ttr = ttr
        self.reserves = reserves
        self.restarts = restarts
        self.open = {}
        self.configurations = {(ABSENT, NOTHING)}
        self.time = -math.inf

    def states(self):
        return {state for state, _ in self.configurations}

    def begin(self, operation, time):
        # What can have happened to the job before, happened before this operation.
        self.configurations = self.reach(time)
        self.time = time
        self.open[id(operation)] = operation

    def end(self, operation, time):
        """Keeps the configurations in which this operation has had its effect."""
        key = id(operation)
        reached = self.reach(time)
        del self.open[key]
        if operation.result is not None:
            reached = [(state, done) for state, done in reached if key in done]
        self.configurations = {(state, done - {key}) for state, done in reached}
        self.time = time

    def reach(self, time):
        """Returns every configuration that is possible at this time."""
        reached = set(self.configurations)
        pending = list(reached)
        while pending:
            state, done = pending.pop()
            following = [(after, done) for after in self.happen(state, time)]
            for key, operation in self.open.items():
                if key not in done:
                    following += [(after, done | {key}) for after in step(state, operation, self.ttr)]
            for configuration in following:
                if configuration not in reached:
                    reached.add(configuration)
                    pending.append(configuration)
        return reached

    def happen(self, state, time):
        """Returns what can become of the job without a command that names it."""
        if state in (ABSENT, GONE):
            return []
        after = []
        if state.recorded is not None and self.restarts.overlap(self.time, time):
            # Compaction can have recorded the present state.
            after += [state.recorded, ready(state.pri)]
        if state.name == "reserved" and (state.early <= time or has_ended(state.holder, time)):
            is_recorded = state.recorded == ready(state.pri)
            after.append(ready(state.pri)._replace(recorded=None if is_recorded else state.recorded))
        if state.name == "delayed" and state.early <= time:
            after.append(ready(state.pri))
        if state.name == "ready" and self.reserves is not None and self.reserves.overlap(self.time, time):
            after.append(State("reserved", UNKNOWN, state.pri, math.inf, None, state.recorded or state))
        return after


def has_ended(holder, time):
    """Returns whether a server can have noticed the end of a connection."""
    return holder is UNKNOWN or (holder.ended is not None and holder.ended <= time + NOTICED_S)


def name_of(states, operation):
    """Names the promise that was broken."""
    if operation.result == "NOT_FOUND" and all(exists(state) for state in states):
        return "lost"
    if operation.result != "NOT_FOUND" and states == {GONE}:
        return "resurrected"
    return "wrong state"


def explain(job, operations, operation, states):
    listing = "\n".join(f"  {'->' if each is operation else '  '} {each}"
                        for each in sorted(operations, key=lambda each: each.sent))
    possible = ", ".join(sorted({state.name for state in states}))
    return f"job {job} was {possible}, and no order of its commands allows the reply:\n{listing}"

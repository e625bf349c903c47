"""Tests the checker: it accepts what servers may do, and finds each kind of broken promise.

A history is a text with one operation a line. The first put has the number 0, and stands before what names
it:

    CONNECTION SENT REPLIED put JOB INSERTED tube=T pri=N delay=S ttr=S
    CONNECTION SENT REPLIED COMMAND JOB RESULT [put=NUMBER]
        COMMAND is reserve, reserve-job, peek, delete, touch or kick-job; also release with pri=N
        delay=S, and bury with pri=N. `put=` is the number of the put whose body was found.
    CONNECTION SENT REPLIED stats-job JOB STATE pri=N left=S       or NOT_FOUND
    CONNECTION SENT - reserve-unknown tube=T         a reserve without a reply
    CONNECTION SENT REPLIED answer                   any other command that had a reply
    CONNECTION TIME - end                            the client closed the connection or noticed its end
    CONNECTION TIME - gone                           the server has closed the connection

CONNECTION is NAME@PROCESS: processes with different names are different servers, or a server that was
started again. Times are seconds of one clock. A command without a reply has `-` for REPLIED and no
RESULT, a put without a reply no JOB either. A command that was refused has the reply as its RESULT.

The connections are a, c and g of the server process `old`, and b of `new`, which comes later.
"""
import unittest

from checker import Checker
from history import Caller, History, Operation, Violation, make_body, read_body

PUT = "a@old 1 2 put 1 INSERTED pri=1"
DELAYED = "a@old 1 2 put 1 INSERTED pri=1 delay=%d"
UNKNOWN_PUT = "a@old 1 - put"
RESERVED = PUT + "\na@old 3 4 reserve 1 RESERVED put=0"
SHORT_TTR = PUT + " ttr=10\na@old 3 4 reserve 1 RESERVED put=0"
BURIED = RESERVED + "\na@old 5 6 bury 1 BURIED pri=9"
FOUND = "b@new 7 8 peek 1 FOUND"
MISSING = "b@new 7 8 peek 1 NOT_FOUND"
IS_READY = "b@new 20 21 stats-job 1 ready pri=%d"
IS_BURIED = "b@new 20 21 stats-job 1 buried pri=%d"
DELETED = "a@old 3 4 delete 1 DELETED"
UNKNOWN_DELETE = "a@old 3 - delete 1"
NEXT_SERVER = "b@new 3 4 answer"

# What the checker says, what the history shows, and the history.
CASES = [
    # One job, one server.
    ("ok", "a life", RESERVED, "a@old 5 6 delete 1 DELETED", MISSING),
    ("lost", "a lost job", PUT, MISSING),
    ("lost", "a job that is lost while it is reserved", RESERVED, MISSING),
    ("ok", "a reply of before the put ended", "a@old 1 4 put 1 INSERTED", "b@new 2 3 peek 1 NOT_FOUND",
     "b@new 5 6 peek 1 FOUND put=0"),
    ("resurrected", "a job that was deleted", PUT, DELETED, FOUND),
    ("resurrected", "a deleted job that is reserved", PUT, DELETED, "b@new 7 8 reserve 1 RESERVED put=0"),
    ("resurrected", "a job that is deleted twice", PUT, DELETED, "b@new 5 6 delete 1 DELETED"),
    ("ok", "two deletes of which one finds the job", PUT, "a@old 3 6 delete 1 NOT_FOUND",
     "b@new 4 5 delete 1 DELETED"),
    # Unknown outcomes.
    ("ok", "an unknown delete that happened", PUT, UNKNOWN_DELETE, MISSING),
    ("ok", "an unknown delete that did not happen", PUT, UNKNOWN_DELETE, FOUND),
    ("resurrected", "an unknown delete that is undone", PUT, UNKNOWN_DELETE, MISSING,
     "b@new 9 10 peek 1 FOUND"),
    ("ok", "an unknown delete that is late on the same server", PUT, UNKNOWN_DELETE,
     "a@old 5 6 peek 1 FOUND", "a@old 7 8 peek 1 NOT_FOUND"),
    ("lost", "an unknown delete under the next server", PUT, UNKNOWN_DELETE, NEXT_SERVER,
     "b@new 5 6 peek 1 FOUND", MISSING),
    ("ok", "an unknown delete of a client that is gone", PUT, UNKNOWN_DELETE, "a@old 4 - gone",
     "c@old 5 6 peek 1 NOT_FOUND"),
    ("lost", "its late effect", PUT, UNKNOWN_DELETE, "a@old 4 - gone", "c@old 5 6 peek 1 FOUND",
     "c@old 7 8 peek 1 NOT_FOUND"),
    ("ok", "an unknown delete at a server that another one follows", PUT, NEXT_SERVER,
     "a@old 5 - delete 1", FOUND),
    ("lost", "its effect", PUT, NEXT_SERVER, "a@old 5 - delete 1", MISSING),
    ("wrong state", "an unknown put that appears late", "a@old 0 0.5 answer", UNKNOWN_PUT, NEXT_SERVER,
     "b@new 5 6 peek 1 NOT_FOUND", "b@new 7 8 peek 1 FOUND put=0"),
    ("ok", "unknown puts, of which one happened", UNKNOWN_PUT, UNKNOWN_PUT, "b@new 7 8 peek 1 FOUND put=0"),
    ("ok", "a read without a reply", PUT, "a@old 3 - stats-job 1", "a@old 3 - peek 1", FOUND),
    # States.
    ("ok", "a buried job that stays buried", BURIED, IS_BURIED % 9),
    ("wrong state", "a buried job that is ready after a failover", BURIED, IS_READY % 9),
    ("wrong state", "a buried job with its old priority", BURIED, IS_BURIED % 1),
    ("ok", "an unknown bury that happened", RESERVED, "a@old 5 - bury 1 pri=9", "a@old 6 - end", IS_BURIED % 9),
    ("ok", "an unknown bury that did not", RESERVED, "a@old 5 - bury 1 pri=9", "a@old 6 - end", IS_READY % 1),
    ("ok", "a kicked job", BURIED, "a@old 7 8 kick-job 1 KICKED", IS_READY % 9),
    ("wrong state", "a kick that is forgotten", BURIED, "a@old 7 8 kick-job 1 KICKED", IS_BURIED % 9),
    ("ok", "a release", RESERVED, "a@old 5 6 release 1 RELEASED pri=7", IS_READY % 7),
    ("wrong state", "a release that is forgotten", RESERVED, "a@old 5 6 release 1 RELEASED pri=7", IS_READY % 1),
    # Reserved jobs.
    ("ok", "a reserved job that is ready after a failover", RESERVED, "b@new 5 6 reserve 1 RESERVED put=0"),
    ("ok", "a buried and reserved job, buried after a failover", BURIED, "a@old 7 8 reserve-job 1 RESERVED",
     IS_BURIED % 9),
    ("ok", "a buried and reserved job, ready after a failover", BURIED, "a@old 7 8 reserve-job 1 RESERVED",
     IS_READY % 9),
    ("wrong state", "a buried and reserved job, buried without a failover", BURIED,
     "g@old 7 8 reserve-job 1 RESERVED", "g@old 10 - end", "a@old 20 21 stats-job 1 buried pri=9"),
    ("wrong state", "a job that two workers hold", RESERVED, "c@old 5 6 reserve 1 RESERVED put=0"),
    ("ok", "a second worker after the TTR", SHORT_TTR, "c@old 12 14 reserve 1 RESERVED put=0"),
    ("wrong state", "a TTR that ends early", SHORT_TTR, "a@old 8 9 touch 1 TOUCHED",
     "c@old 14 15 reserve 1 RESERVED put=0"),
    ("ok", "a second worker after the first one left", PUT, "g@old 3 4 reserve 1 RESERVED put=0",
     "g@old 5 - end", "a@old 5 6 reserve 1 RESERVED put=0"),
    ("wrong state", "a delete of a job that another worker holds", RESERVED, "c@old 5 6 delete 1 DELETED"),
    ("ok", "a job that an unknown reserve holds", PUT, "a@old 3 - reserve-unknown",
     "c@old 5 6 delete 1 NOT_FOUND", "a@old 7 8 peek 1 FOUND"),
    ("lost", "a ready job that is not found", PUT, "a@old 5 6 delete 1 NOT_FOUND", "a@old 7 8 peek 1 FOUND"),
    # Delays.
    ("ok", "a delay that is kept", DELAYED % 100, "b@new 50 51 stats-job 1 delayed pri=1 left=51",
     "b@new 101 102 stats-job 1 ready pri=1"),
    ("wrong state", "a delay that ends early", DELAYED % 100, "b@new 50 51 stats-job 1 ready pri=1"),
    ("wrong state", "a delay that begins again", DELAYED % 100, "b@new 50 51 stats-job 1 delayed pri=1 left=99"),
    ("wrong state", "a delay that does not end", DELAYED % 10, "b@new 50 51 stats-job 1 delayed pri=1 left=0"),
    # Ids and bodies.
    ("id given twice", "two puts", PUT, "b@new 3 4 put 1 INSERTED"),
    ("id given twice", "an unknown put", UNKNOWN_PUT, "b@new 3 4 put 1 INSERTED", "b@new 5 6 peek 1 FOUND put=0"),
    ("doubled", "a put that made two jobs", PUT, "b@new 5 6 peek 2 FOUND put=0"),
    ("refused and kept", "a refused put that made a job", "a@old 1 2 put OUT_OF_MEMORY",
     "b@new 5 6 peek 2 FOUND put=0"),
    ("changed", "a body of a put that no client sent", PUT, "b@new 5 6 peek 1 FOUND put=1"),
    ("invented", "a job that no client put", "b@new 5 6 stats-job 3 ready"),
    ("id went back", "ids that go back", "a@old 1 2 put 5 INSERTED", "b@new 3 4 put 4 INSERTED"),
    ("ok", "ids in any order at one time", "a@old 1 4 put 5 INSERTED", "c@old 2 3 put 4 INSERTED"),
    # Two servers.
    ("ok", "servers one after the other", "a@old 1 2 answer", "a@old 3 6 answer", "b@new 5 7 answer"),
    ("two servers", "an old server that answers after the new one", "a@old 1 2 answer", "b@new 5 6 answer",
     "a@old 7 8 answer"),
    ("two servers", "a command that was sent to a stopped server, which answers when it goes on",
     "a@old 1 2 answer", "b@new 5 6 answer", "a@old 6.5 20 answer", "b@new 21 22 answer"),
    ("ok", "a late reply, whose write had begun when the server was stopped", "a@old 1 2 answer",
     "a@old 3 20 answer", "b@new 5 6 answer"),
    ("two servers", "servers that take turns", "a@old 0 0.5 answer", "b@new 1 1.5 answer",
     "a@old 2 2.5 answer", "b@new 3 3.5 answer"),
]


def read_history(lines):
    history, callers = History(), {}
    for line in lines:
        read_line(history, callers, line.split())
    return history


def read_line(history, callers, words):
    name, sent, replied, kind, *words = words
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    words = [word for word in words if "=" not in word]
    caller = callers.setdefault(name, Caller(name, name.partition("@")[2]))
    sent = float(sent)
    if kind in ("end", "gone"):
        setattr(caller, "ended" if kind == "end" else kind, sent)
        return
    if kind == "answer":
        history.answered(caller, sent, float(replied))
        return
    replied, result = (None, None) if replied == "-" else (float(replied), words[-1])
    pri, delay = int(fields.get("pri", 0)), int(fields.get("delay", 0))
    tube = fields.get("tube", "default")
    if kind == "put":
        operation = history.begin_put(caller, tube, pri, delay, int(fields.get("ttr", 60)), 0, sent)
    elif kind == "reserve-unknown":
        operation = history.begin("reserve", caller, sent=sent)
        history.begin_reserve([tube], operation)
    else:
        left = int(fields.get("left", 0))
        details = {"release": (pri, delay), "bury": pri, "stats-job": (pri, left)}.get(kind)
        operation = history.begin(kind, caller, int(words[0]), details, sent)
    if replied is not None:
        history.end(operation, result, replied)
    if kind == "put" and result == "INSERTED":
        history.bind(int(words[0]), operation.details.number)
    elif "put" in fields:
        history.bind(int(words[0]), int(fields["put"]))


def verdict(lines):
    try:
        history = read_history(lines)
        Checker(history).check()
    except Violation as violation:
        return violation.kind, str(violation)
    return "ok", ""


class CheckerTest(unittest.TestCase):
    def test_all_cases(self):
        for expected, name, *lines in CASES:
            with self.subTest(name):
                kind, text = verdict("\n".join(lines).splitlines())
                self.assertEqual(kind, expected, text)

    def test_a_job_comes_back_after_its_history_was_dropped(self):
        history = read_history(f"{PUT}\n{DELETED}".splitlines())
        Checker(history).check()
        self.assertEqual(history.gone, {1})
        for result in "NOT_FOUND", "FOUND":
            operation = history.begin("peek", Caller("b", "new"), 1)
            history.end(operation, result)
            if result == "NOT_FOUND":
                Checker(history).check()
        with self.assertRaisesRegex(Violation, "resurrected"):
            Checker(history).check()

    def test_a_body_that_changed(self):
        body = make_body(0, 30)
        self.assertEqual(read_body(body), 0)
        for wrong in (body[:-1], body + b"x", body[:-1] + b"\0", b"", b"7", b"0:30"):
            self.assertIsNone(read_body(wrong))
        with self.assertRaisesRegex(Violation, "changed"):
            History().found(Operation("peek", Caller("a", "old"), 1), 1, body[:-1])


if __name__ == "__main__":
    unittest.main()

"""Tests the checker: it accepts what servers may do, and finds each kind of broken promise."""
import socket
import struct
import unittest

from checker import Checker
from client import Connection
from history import REFUSALS, Caller, History, Operation, Put, Violation, make_body, read_body
from workspace import wait_until

# Two server processes, one after the other.
OLD, NEW = 100, 200


class Scene:
    """A history with times that a test chooses."""

    def __init__(self):
        self.history = History()

    def caller(self, pid=OLD, ended=None):
        caller = self.history.caller(pid)
        caller.ended = ended
        return caller

    def put(self, caller, sent, replied, job=None, result="INSERTED", tube="t", pri=1, delay=0, ttr=60):
        number = len(self.history.puts)
        operation = Operation("put", caller, sent, Put(number, tube, pri, delay, ttr, 30))
        self.history.puts.append(operation)
        if replied is not None:
            self.history.end(operation, result, replied)
            if result not in REFUSALS:
                self.history.inserted(operation, job)
        return number

    def do(self, kind, caller, job, sent, replied=None, result=None, details=None, put=None):
        operation = Operation(kind, caller, sent, details)
        self.history.add(job, operation)
        if replied is not None:
            self.history.end(operation, result, replied)
        if put is not None:
            self.history.found(operation, job, make_body(put, 30))

    def kick(self, caller, sent, replied, tube="t"):
        operation = Operation("kick", caller, sent)
        self.history.add_kick(tube, operation)
        self.history.end(operation, "KICKED", replied)

    def flush(self, caller, sent, replied=None, tube="t", result="FLUSHED"):
        operation = Operation("flush", caller, sent)
        self.history.add_flush(tube, operation)
        if replied is not None:
            self.history.end(operation, result, replied)

    def answer(self, pid, sent, replied):
        self.history.answered(Caller(0, pid), sent, replied)


class CheckerTest(unittest.TestCase):
    def setUp(self):
        self.scene = Scene()
        self.old = self.scene.caller(OLD)
        self.new = self.scene.caller(NEW)

    def accepts(self):
        Checker(self.scene.history).check_all()

    def finds(self, kind):
        with self.assertRaises(Violation) as caught:
            self.accepts()
        self.assertEqual(caught.exception.kind, kind, str(caught.exception))

    # One job, one server.

    def test_accepts_a_life(self):
        do = self.scene.do
        put = self.scene.put(self.old, 1, 2, job=1)
        do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        do("delete", self.old, 1, 5, 6, "DELETED")
        do("peek", self.old, 1, 7, 8, "NOT_FOUND")
        self.accepts()

    def test_finds_a_lost_job(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("peek", self.new, 1, 7, 8, "NOT_FOUND")
        self.finds("lost")

    def test_finds_a_job_that_is_lost_while_it_is_reserved(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("peek", self.new, 1, 7, 8, "NOT_FOUND")
        self.finds("lost")

    def test_accepts_a_reply_of_before_the_put_ended(self):
        self.scene.put(self.old, 1, 5, job=1)
        self.scene.do("peek", self.new, 1, 2, 4, "NOT_FOUND")
        self.accepts()

    def test_finds_a_deleted_job_that_comes_back(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3, 4, "DELETED")
        self.scene.do("peek", self.new, 1, 7, 8, "FOUND", put=put)
        self.finds("resurrected")

    def test_finds_a_deleted_job_that_is_reserved_again(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3, 4, "DELETED")
        self.scene.do("reserve", self.new, 1, 7, 8, "RESERVED", put=put)
        self.finds("resurrected")

    def test_finds_a_job_that_is_deleted_twice(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3, 4, "DELETED")
        self.scene.do("delete", self.new, 1, 5, 6, "DELETED")
        self.finds("resurrected")

    def test_finds_a_job_that_comes_back_after_its_history_was_dropped(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3, 4, "DELETED")
        self.accepts()
        self.assertEqual(self.scene.history.gone, {1})
        self.scene.do("peek", self.new, 1, 5, 6, "NOT_FOUND")
        self.accepts()
        self.scene.do("peek", self.new, 1, 7, 8, "FOUND", put=put)
        self.finds("resurrected")

    def test_accepts_two_deletes_of_which_one_finds_the_job(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3, 6, "NOT_FOUND")
        self.scene.do("delete", self.new, 1, 4, 5, "DELETED")
        self.accepts()

    # Unknown outcomes.

    def test_accepts_that_an_unknown_delete_happened_or_not(self):
        for result in "FOUND", "NOT_FOUND":
            with self.subTest(result):
                self.setUp()
                self.scene.put(self.old, 1, 2, job=1)
                self.scene.do("delete", self.old, 1, 3)
                self.scene.do("peek", self.new, 1, 7, 8, result)
                self.accepts()

    def test_finds_an_unknown_delete_that_is_undone(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3)
        self.scene.do("peek", self.new, 1, 7, 8, "NOT_FOUND")
        self.scene.do("peek", self.new, 1, 9, 10, "FOUND")
        self.finds("resurrected")

    def test_accepts_an_unknown_delete_that_is_late_on_the_same_server(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3)
        self.scene.do("peek", self.old, 1, 5, 6, "FOUND")
        self.scene.do("peek", self.old, 1, 7, 8, "NOT_FOUND")
        self.accepts()

    def test_finds_an_unknown_delete_that_takes_effect_under_the_next_server(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3)
        self.scene.answer(NEW, 3, 4)
        self.scene.do("peek", self.new, 1, 5, 6, "FOUND")
        self.scene.do("peek", self.new, 1, 7, 8, "NOT_FOUND")
        self.finds("lost")

    def test_finds_an_unknown_delete_of_a_server_that_another_one_follows(self):
        for result in "FOUND", "NOT_FOUND":
            with self.subTest(result):
                self.setUp()
                self.scene.put(self.old, 1, 2, job=1)
                self.scene.answer(NEW, 3, 4)
                self.scene.do("delete", self.old, 1, 5)
                self.scene.do("peek", self.new, 1, 7, 8, result)
                if result == "FOUND":
                    self.accepts()
                else:
                    self.finds("lost")

    def test_finds_an_unknown_put_that_appears_late(self):
        self.scene.answer(OLD, 0, 0.5)
        put = self.scene.put(self.old, 1, None)
        self.scene.answer(NEW, 3, 4)
        self.scene.do("peek", self.new, 1, 5, 6, "NOT_FOUND")
        self.scene.do("peek", self.new, 1, 7, 8, "FOUND", put=put)
        self.finds("wrong state")

    def test_accepts_that_an_unknown_put_happened_or_not(self):
        put = self.scene.put(self.old, 1, None)
        self.scene.put(self.old, 1, None)
        self.scene.do("peek", self.new, 1, 7, 8, "FOUND", put=put)
        self.accepts()

    def test_ignores_a_read_without_a_reply(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("stats-job", self.old, 1, 3)
        self.scene.do("peek", self.old, 1, 3)
        self.scene.do("peek", self.new, 1, 7, 8, "FOUND")
        self.accepts()

    def test_accepts_any_count_of_a_mixed_batch(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3, 4, "EITHER")
        self.scene.do("peek", self.new, 1, 7, 8, "NOT_FOUND")
        self.accepts()

    def test_finds_a_job_that_a_mixed_batch_must_have_deleted(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 3, 4, "EITHER")
        self.scene.do("peek", self.new, 1, 7, 8, "FOUND")
        self.finds("resurrected")

    def test_accepts_an_unknown_flush_that_happened_or_not(self):
        for result in "FOUND", "NOT_FOUND":
            with self.subTest(result):
                self.setUp()
                self.scene.put(self.old, 1, 2, job=1)
                self.scene.flush(self.old, 3)
                self.scene.do("peek", self.new, 1, 7, 8, result)
                self.accepts()

    def test_finds_a_job_that_survives_a_flush(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.flush(self.old, 3, 4)
        self.scene.do("peek", self.new, 1, 7, 8, "FOUND")
        self.finds("resurrected")

    def test_accepts_a_flush_after_one_that_was_refused(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.flush(self.old, 3, 4, result="OUT_OF_MEMORY")
        self.scene.do("peek", self.old, 1, 5, 6, "FOUND", put=0)
        self.scene.flush(self.old, 7, 8)
        self.scene.do("peek", self.old, 1, 9, 10, "NOT_FOUND")
        self.accepts()

    def test_finds_a_job_that_a_refused_flush_deletes(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.flush(self.old, 3, 4, result="OUT_OF_MEMORY")
        self.scene.do("peek", self.old, 1, 5, 6, "NOT_FOUND")
        self.finds("lost")

    def test_finds_a_job_that_a_flush_of_another_tube_deletes(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.flush(self.old, 3, 4, tube="u")
        self.scene.do("peek", self.new, 1, 7, 8, "NOT_FOUND")
        self.finds("lost")

    def test_accepts_a_put_during_a_flush(self):
        for result in "FOUND", "NOT_FOUND":
            with self.subTest(result):
                self.setUp()
                self.scene.put(self.old, 1, 5, job=1)
                self.scene.flush(self.old, 3, 4)
                self.scene.do("peek", self.new, 1, 7, 8, result)
                self.accepts()

    # States.

    def bury(self, replied=6):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("bury", self.old, 1, 5, replied, "BURIED" if replied else None, details=9)

    def state(self, caller, name, pri, sent=20, left=0):
        self.scene.do("stats-job", caller, 1, sent, sent + 1, name, details=(pri, left))

    def test_accepts_a_buried_job_that_stays_buried(self):
        self.bury()
        self.state(self.new, "buried", 9)
        self.accepts()

    def test_finds_a_buried_job_that_is_ready_after_a_failover(self):
        self.bury()
        self.state(self.new, "ready", 9)
        self.finds("wrong state")

    def test_finds_a_buried_job_with_its_old_priority(self):
        self.bury()
        self.state(self.new, "buried", 1)
        self.finds("wrong state")

    def test_accepts_that_an_unknown_bury_happened_or_not(self):
        for name, pri in ("buried", 9), ("ready", 1):
            with self.subTest(name):
                self.setUp()
                self.bury(replied=None)
                self.old.ended = 6
                self.state(self.new, name, pri)
                self.accepts()

    def test_accepts_a_kicked_job(self):
        self.bury()
        self.scene.do("kick-job", self.old, 1, 7, 8, "KICKED")
        self.state(self.new, "ready", 9)
        self.accepts()

    def test_finds_a_kick_that_is_forgotten(self):
        self.bury()
        self.scene.do("kick-job", self.old, 1, 7, 8, "KICKED")
        self.state(self.new, "buried", 9)
        self.finds("wrong state")

    def test_accepts_a_job_that_a_kick_of_many_reached(self):
        for name in "ready", "buried":
            with self.subTest(name):
                self.setUp()
                self.bury()
                self.scene.kick(self.old, 7, 8)
                self.state(self.new, name, 9)
                self.accepts()

    def test_finds_a_kick_of_another_tube(self):
        self.bury()
        self.scene.kick(self.old, 7, 8, tube="u")
        self.state(self.new, "ready", 9)
        self.finds("wrong state")

    def test_finds_a_job_that_was_kicked_before_it_was_buried(self):
        self.bury()
        self.scene.kick(self.old, 4.2, 4.8)
        self.state(self.new, "ready", 9)
        self.finds("wrong state")

    def test_finds_a_release_that_is_forgotten(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("release", self.old, 1, 5, 6, "RELEASED", details=(7, 0))
        self.state(self.new, "ready", 1)
        self.finds("wrong state")

    def test_accepts_a_release(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("release", self.old, 1, 5, 6, "RELEASED", details=(7, 0))
        self.state(self.new, "ready", 7)
        self.accepts()

    # Reserved jobs.

    def test_accepts_that_a_reserved_job_is_ready_after_a_failover(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("reserve", self.new, 1, 5, 6, "RESERVED", put=put)
        self.accepts()

    def test_accepts_that_a_buried_job_that_is_reserved_is_buried_after_a_failover(self):
        for name in "buried", "ready":
            with self.subTest(name):
                self.setUp()
                self.bury()
                self.scene.do("reserve-job", self.old, 1, 7, 8, "RESERVED")
                self.state(self.new, name, 9)
                self.accepts()

    def test_finds_a_buried_job_that_is_reserved_and_then_buried_without_a_failover(self):
        self.bury()
        self.scene.do("reserve-job", self.scene.caller(OLD, ended=10), 1, 7, 8, "RESERVED")
        self.state(self.old, "buried", 9)
        self.finds("wrong state")

    def test_finds_a_job_that_two_workers_hold(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("reserve", self.scene.caller(OLD), 1, 5, 6, "RESERVED", put=put)
        self.finds("wrong state")

    def test_accepts_a_second_worker_after_the_ttr(self):
        put = self.scene.put(self.old, 1, 2, job=1, ttr=10)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("reserve", self.scene.caller(OLD), 1, 12, 14, "RESERVED", put=put)
        self.accepts()

    def test_finds_a_ttr_that_ends_early(self):
        put = self.scene.put(self.old, 1, 2, job=1, ttr=10)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("touch", self.old, 1, 8, 9, "TOUCHED")
        self.scene.do("reserve", self.scene.caller(OLD), 1, 14, 15, "RESERVED", put=put)
        self.finds("wrong state")

    def test_accepts_a_second_worker_after_the_first_one_left(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        first = self.scene.caller(OLD, ended=5)
        self.scene.do("reserve", first, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("reserve", self.old, 1, 5, 6, "RESERVED", put=put)
        self.accepts()

    def test_finds_a_delete_of_a_job_that_another_worker_holds(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("reserve", self.old, 1, 3, 4, "RESERVED", put=put)
        self.scene.do("delete", self.scene.caller(OLD), 1, 5, 6, "DELETED")
        self.finds("wrong state")

    def test_accepts_a_job_that_an_unknown_reserve_holds(self):
        self.scene.put(self.old, 1, 2, job=1)
        operation = Operation("reserve", self.old, 3)
        self.scene.history.add_unknown_reserve(["t"], operation)
        self.scene.do("delete", self.scene.caller(OLD), 1, 5, 6, "NOT_FOUND")
        self.scene.do("peek", self.old, 1, 7, 8, "FOUND")
        self.accepts()

    def test_finds_a_ready_job_that_is_not_found(self):
        self.scene.put(self.old, 1, 2, job=1)
        self.scene.do("delete", self.old, 1, 5, 6, "NOT_FOUND")
        self.scene.do("peek", self.old, 1, 7, 8, "FOUND")
        self.finds("lost")

    # Delays.

    def test_accepts_a_delay_that_is_kept(self):
        self.scene.put(self.old, 1, 2, job=1, delay=100)
        self.state(self.new, "delayed", 1, sent=50, left=51)
        self.state(self.new, "ready", 1, sent=101)
        self.accepts()

    def test_finds_a_delay_that_ends_early(self):
        self.scene.put(self.old, 1, 2, job=1, delay=100)
        self.state(self.new, "ready", 1, sent=50)
        self.finds("wrong state")

    def test_finds_a_delay_that_begins_again(self):
        self.scene.put(self.old, 1, 2, job=1, delay=100)
        self.state(self.new, "delayed", 1, sent=50, left=99)
        self.finds("wrong state")

    def test_finds_a_delay_that_does_not_end(self):
        self.scene.put(self.old, 1, 2, job=1, delay=10)
        self.state(self.new, "delayed", 1, sent=50, left=0)
        self.finds("wrong state")

    # Ids and bodies.

    def test_finds_an_id_that_is_given_twice(self):
        self.scene.put(self.old, 1, 2, job=1)
        with self.assertRaises(Violation) as caught:
            self.scene.put(self.new, 3, 4, job=1)
        self.assertEqual(caught.exception.kind, "id given twice")

    def test_finds_an_unknown_put_under_the_id_of_another(self):
        put = self.scene.put(self.old, 1, None)
        self.scene.put(self.new, 3, 4, job=1)
        with self.assertRaises(Violation) as caught:
            self.scene.do("peek", self.new, 1, 5, 6, "FOUND", put=put)
        self.assertEqual(caught.exception.kind, "id given twice")

    def test_finds_a_put_that_made_two_jobs(self):
        put = self.scene.put(self.old, 1, 2, job=1)
        with self.assertRaises(Violation) as caught:
            self.scene.do("peek", self.new, 2, 5, 6, "FOUND", put=put)
        self.assertEqual(caught.exception.kind, "doubled")

    def test_finds_a_refused_put_that_made_a_job(self):
        put = self.scene.put(self.old, 1, 2, result="OUT_OF_MEMORY")
        with self.assertRaises(Violation) as caught:
            self.scene.do("peek", self.new, 2, 5, 6, "FOUND", put=put)
        self.assertEqual(caught.exception.kind, "refused and kept")

    def test_finds_a_job_that_no_client_put(self):
        self.scene.do("stats-job", self.new, 3, 5, 6, "ready", details=(0, 0))
        self.finds("invented")

    def test_finds_ids_that_go_back(self):
        self.scene.put(self.old, 1, 2, job=5)
        self.scene.put(self.new, 3, 4, job=4)
        self.finds("id went back")

    def test_accepts_ids_in_any_order_at_one_time(self):
        self.scene.put(self.old, 1, 4, job=5)
        self.scene.put(self.old, 2, 3, job=4)
        self.accepts()

    def test_finds_a_body_that_changed(self):
        body = make_body(0, 30)
        self.assertEqual(read_body(body), 0)
        for wrong in (body[:-1], body + b"x", body[:-1] + b"\0", b"", b"7", b"0:30"):
            self.assertIsNone(read_body(wrong))
        operation = Operation("peek", self.new, 1)
        with self.assertRaises(Violation) as caught:
            self.scene.history.found(operation, 1, body[:-1])
        self.assertEqual(caught.exception.kind, "changed")

    # Two servers.

    def test_accepts_servers_one_after_the_other(self):
        self.scene.answer(OLD, 1, 2)
        self.scene.answer(OLD, 3, 6)
        self.scene.answer(NEW, 5, 7)
        self.accepts()

    def test_finds_an_old_server_that_answers_after_the_new_one(self):
        self.scene.answer(OLD, 1, 2)
        self.scene.answer(NEW, 5, 6)
        self.scene.answer(OLD, 7, 8)
        self.finds("two servers")

    def test_finds_a_command_that_waited_in_a_server_that_was_stopped(self):
        self.scene.answer(OLD, 1, 2)
        self.scene.answer(NEW, 5, 6)
        # Sent while the old server was stopped, and answered when it went on.
        self.scene.answer(OLD, 6.5, 20)
        self.scene.answer(NEW, 21, 22)
        self.finds("two servers")

    def test_accepts_a_late_reply_to_an_early_command(self):
        self.scene.answer(OLD, 1, 2)
        # Its write had begun when the server was stopped.
        self.scene.answer(OLD, 3, 20)
        self.scene.answer(NEW, 5, 6)
        self.accepts()

    def test_finds_servers_that_take_turns(self):
        for sent, pid in enumerate([OLD, NEW, OLD, NEW]):
            self.scene.answer(pid, sent, sent + 0.5)
        self.finds("two servers")

    def test_measures_the_longest_gap(self):
        for sent, pid in (1, OLD), (2, OLD), (9, NEW), (10, NEW):
            self.scene.answer(pid, sent, sent)
        self.assertEqual(self.scene.history.longest_gap, (7, 9))


class ConnectionTest(unittest.TestCase):
    def test_notices_that_the_other_side_has_closed(self):
        for options in b"", struct.pack("ii", 1, 0):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                connection = Connection(listener.getsockname())
                accepted, _ = listener.accept()
                self.assertFalse(connection.is_closed())
                if options:
                    # A reset.
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, options)
                accepted.close()
                wait_until("the end is noticed", connection.is_closed, 5)
                connection.close()


if __name__ == "__main__":
    unittest.main()

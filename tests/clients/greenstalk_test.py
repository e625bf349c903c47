"""Drives the server with greenstalk, a client library that knows nothing of this project, and with a worker
that takes jobs in batches, next to it.

Usage: greenstalk_test.py SERVER
"""

import os
import socket
import sys
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

import greenstalk

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../harness"))
from beanstalk import PATIENCE_S, Connection
from server import Server

# Greenstalk has no timeout of its own.
socket.setdefaulttimeout(PATIENCE_S)


class WithServer(unittest.TestCase):
    """Each test has a server, which must end in good order."""

    def setUp(self):
        self.server = self.enterContext(Server(PROGRAM))
        self.addCleanup(lambda: self.assertEqual(self.server.stop(), 0))

    def client(self, **options):
        host, port = self.server.address.split(":")
        client = greenstalk.Client((host, int(port)), **options)
        self.addCleanup(client.close)
        return client


class Greenstalk(WithServer):
    def test_a_job_goes_from_producer_to_worker(self):
        producer = self.client(use="mail")
        worker = self.client(watch="mail")
        job_id = producer.put("hello", priority=5, delay=0, ttr=30)
        job = worker.reserve(timeout=PATIENCE_S // 2)
        self.assertEqual((job.id, job.body), (job_id, "hello"))
        self.assertEqual(worker.stats_job(job)["state"], "reserved")
        worker.touch(job)
        worker.delete(job)
        with self.assertRaises(greenstalk.NotFoundError):
            worker.peek(job_id)

    def test_bodies_are_bytes(self):
        client = self.client(encoding=None)
        body = bytes(range(256)) * 100
        client.put(body)
        self.assertEqual(client.reserve().body, body)

    def test_jobs_are_released_buried_and_kicked(self):
        client = self.client()
        client.put("a")
        job = client.reserve()
        client.release(job, priority=1, delay=0)
        job = client.reserve()
        client.bury(job)
        self.assertEqual(client.peek_buried().id, job.id)
        self.assertEqual(client.kick(10), 1)
        job = client.reserve_job(job.id)
        self.assertEqual(client.stats_job(job)["kicks"], 1)
        client.bury(job)
        client.kick_job(job)
        self.assertEqual(client.peek_ready().id, job.id)

    def test_delays_and_pauses_hold_jobs_back(self):
        client = self.client()
        delayed = client.put("later", delay=60)
        self.assertEqual(client.peek_delayed().id, delayed)
        client.put("now")
        client.pause_tube("default", 60)
        with self.assertRaises(greenstalk.TimedOutError):
            client.reserve(timeout=0)
        self.assertEqual(client.stats_tube("default")["pause"], 60)

    def test_a_deadline_is_announced(self):
        client = self.client()
        client.put("short", ttr=2)
        # A machine that is busy for the whole TTR makes the job ready again.
        with self.assertRaises(greenstalk.DeadlineSoonError):
            for _ in range(10):
                client.reserve(timeout=PATIENCE_S // 2)

    def test_tubes_are_watched_used_and_listed(self):
        client = self.client(use="one", watch=["one", "two"])
        self.assertEqual(client.using(), "one")
        # The client watches both, then ignores default: the last takes its place.
        self.assertEqual(client.watching(), ["two", "one"])
        self.assertEqual(client.ignore("one"), 1)
        with self.assertRaises(greenstalk.NotIgnoredError):
            client.ignore("two")
        self.assertEqual(sorted(client.tubes()), ["default", "one", "two"])

    def test_stats_parse(self):
        stats = self.client().stats()
        self.assertEqual(str(stats["version"]), "1.13")
        self.assertEqual(stats["current-connections"], 1)
        self.assertEqual(stats["pid"], self.server.process.pid)

    def test_a_job_that_is_too_big_loses_nothing(self):
        client = self.client(encoding=None)
        with self.assertRaises(greenstalk.JobTooBigError):
            client.put(b"x" * 65536)
        client.put(b"x" * 65535)
        self.assertEqual(len(client.reserve().body), 65535)


class Batches(Connection):
    """A client of the commands that C beanstalkd does not have."""

    def reserve_batch(self, count):
        """Returns pairs of an id and a body."""
        [count] = self.must("RESERVED_BATCH", f"reserve-batch {count}")[1:]
        replies = [self.reply() for _ in range(int(count))]
        assert all(words[0] == "RESERVED" for words, _ in replies), replies
        return [(int(words[1]), body) for words, body in replies]

    def delete_batch(self, ids):
        return self.must("DELETED_BATCH", "delete-batch " + " ".join(map(str, ids)))[1:]


class BatchesNextToGreenstalk(WithServer):
    def test_two_kinds_of_workers_share_a_tube(self):
        each = 500
        single = self.client(encoding=None, use="mail", watch="mail")
        batches = self.enterContext(Batches(self.server.address))
        batches.must("WATCHING", "watch mail")
        ids = [single.put(b"single %d" % n) for n in range(each)]
        put = "put-in-tube mail 0 0 60"
        for body in (b"batch %d" % n for n in range(each)):
            ids.append(int(batches.must("INSERTED", f"{put} {len(body)}", body)[1]))
        self.assertEqual(batches.ask("list-tube-used"), ["USING", "default"])
        done_by_single, done_by_batches = [], []
        # Both hold jobs before the first one deletes any.
        both_began = threading.Barrier(2, timeout=PATIENCE_S)

        def work_one_by_one():
            job = single.reserve(timeout=0)
            both_began.wait()
            while True:
                single.delete(job)
                done_by_single.append((job.id, job.body))
                try:
                    job = single.reserve(timeout=0)
                except greenstalk.TimedOutError:
                    return

        def work_in_batches():
            jobs = batches.reserve_batch(7)
            both_began.wait()
            while jobs:
                deleted = batches.delete_batch([job_id for job_id, _ in jobs])
                assert deleted == [str(len(jobs)), "0"], deleted
                done_by_batches.extend(jobs)
                jobs = batches.reserve_batch(7)

        with ThreadPoolExecutor() as pool:
            for worker in [pool.submit(work_one_by_one), pool.submit(work_in_batches)]:
                worker.result(PATIENCE_S)
        self.assertGreaterEqual(len(done_by_single), 1)
        self.assertGreaterEqual(len(done_by_batches), 7)
        done = done_by_single + done_by_batches
        self.assertEqual(sorted(job_id for job_id, _ in done), ids)
        bodies = {b"single %d" % n for n in range(each)} | {b"batch %d" % n for n in range(each)}
        self.assertEqual({body for _, body in done}, bodies)
        stats = single.stats_tube("mail")
        self.assertEqual(stats["total-jobs"], 2 * each)
        self.assertEqual(stats["cmd-delete"], 2 * each)
        for state in ("ready", "reserved", "delayed", "buried"):
            self.assertEqual(stats[f"current-jobs-{state}"], 0, state)
        # Only greenstalk has sent the commands that C beanstalkd counts.
        stats = single.stats()
        self.assertEqual(stats["cmd-put"], each)
        self.assertEqual(stats["cmd-delete"], len(done_by_single))
        self.assertEqual(stats["cmd-reserve"], 0)
        self.assertEqual(stats["total-jobs"], 2 * each)


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()

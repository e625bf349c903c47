"""Drives the server with greenstalk, a client library that knows nothing of this project.

Usage: greenstalk_test.py SERVER
"""

import os
import socket
import sys
import unittest

import greenstalk

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../harness"))
from beanstalk import PATIENCE_S
from server import Server

# Greenstalk has no timeout of its own.
socket.setdefaulttimeout(PATIENCE_S)


class Greenstalk(unittest.TestCase):
    """Each test has a server, which must end in good order."""

    def setUp(self):
        self.server = self.enterContext(Server(PROGRAM))
        self.addCleanup(lambda: self.assertEqual(self.server.stop(), 0))

    def client(self, **options):
        host, port = self.server.address.split(":")
        client = greenstalk.Client((host, int(port)), **options)
        self.addCleanup(client.close)
        return client

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


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()

"""Drives the server with greenstalk, a client library that knows nothing of this project, and with a client
of the commands that C beanstalkd does not have, next to it: what greenstalk sees of the same jobs must
agree with what these commands reply.

Usage: greenstalk_test.py SERVER
"""

import os
import re
import socket
import sys
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

import greenstalk

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../harness"))
from beanstalk import PATIENCE_S, Connection
from server import Server, wait_until

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

    def number(self, word, line, body=None):
        [number] = self.must(word, line, body)[1:]
        return int(number)

    def jobs(self, word, words):
        """Reads the jobs of a batch; returns pairs of an id and a body, and the numbers behind their count."""
        assert words[0] == f"{word}_BATCH", words
        replies = [self.reply() for _ in range(int(words[1]))]
        assert all(words[0] == word for words, _ in replies), replies
        return [(int(words[1]), body) for words, body in replies], [int(number) for number in words[2:]]

    def reserve_batch(self, count):
        return self.jobs("RESERVED", self.ask(f"reserve-batch {count}"))[0]

    def delete_batch(self, ids):
        return self.must("DELETED_BATCH", "delete-batch " + " ".join(map(str, ids)))[1:]

    def list_jobs(self, tube, state, page):
        """Returns all jobs of a tube, and how many pages they were."""
        jobs, pages, after = [], 0, None
        while after != 0:
            words, document = self.call(f"list-jobs {tube} {state} {page} {after or 0}")
            lines = document.decode().splitlines()
            assert words[0] == "OK" and lines[0] == "---" and lines[2] in ("jobs:", "jobs: []"), lines[:3]
            for line in lines[3:]:
                pairs = dict(re.findall(r"([a-z-]+): (\w+)", line))
                jobs.append({k: v if k == "state" else int(v) for k, v in pairs.items()})
            pages += 1
            after = int(lines[1].removeprefix("next: "))
        return jobs, pages

    def peek_batch(self, tube, state, page):
        """Returns pairs of an id and a body of all jobs of a tube."""
        jobs, after = [], None
        while after != 0:
            found, [after] = self.jobs("FOUND", self.ask(f"peek-batch {tube} {state} {page} {after or 0}"))
            jobs += found
        return jobs


class BatchesNextToGreenstalk(WithServer):
    def greenstalk(self, **tubes):
        return self.client(encoding=None, **tubes)

    def batches(self, tube=None):
        client = self.enterContext(Batches(self.server.address))
        if tube is not None:
            self.assertEqual(client.ask(f"watch {tube}"), ["WATCHING", "2"])
        return client

    def test_a_client_finds_out(self):
        self.assertEqual(self.batches().ask("touch-all"), ["TOUCHED_ALL", "0"])

    def test_two_kinds_of_workers_share_a_tube(self):
        each = 500
        single = self.greenstalk(use="mail", watch="mail")
        batches = self.batches("mail")
        ids = [single.put(b"single %d" % n) for n in range(each)]
        put = "put-in-tube mail 0 0 60"
        for body in (b"batch %d" % n for n in range(each)):
            ids.append(batches.number("INSERTED", f"{put} {len(body)}", body))
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

    def test_a_list_agrees_with_the_statistics_of_each_job(self):
        single = self.greenstalk(use="mail", watch="mail")
        batches = self.batches()
        bodies = {}
        for n in range(100):
            body = b"x" * n
            bodies[single.put(body, priority=n % 7, delay=1000 * (n % 2), ttr=100 + n)] = body
        # Of the 50 ready jobs 10 are buried, 10 kicked, 10 released and 10 held.
        taken = [single.reserve(timeout=0) for _ in range(40)]
        for job in taken[:20]:
            single.bury(job, priority=3)
        self.assertEqual(single.kick(10), 10)
        for job in taken[20:30]:
            single.release(job, priority=9, delay=0)
        expected = {"any": 100, "ready": 30, "reserved": 10, "delayed": 50, "buried": 10}
        for state, count in expected.items():
            jobs, pages = batches.list_jobs("mail", state, 7)
            self.assertEqual(len(jobs), count, state)
            self.assertEqual(pages, -(-count // 7), state)
            ids = [job["id"] for job in jobs]
            self.assertEqual(ids, sorted(set(ids)), state)
            found = batches.peek_batch("mail", state, 7)
            self.assertEqual(found, [(job_id, bodies[job_id]) for job_id in ids], state)
            if state != "any":
                self.assertEqual({job["state"] for job in jobs}, {state})
        for job in batches.list_jobs("mail", "any", 1000)[0]:
            self.assertEqual(job.pop("bytes"), len(bodies[job["id"]]))
            stats = single.stats_job(job["id"])
            self.assertEqual(stats.pop("tube"), "mail")
            self.assertEqual(stats.pop("file"), 0)
            # A second may have ended between the two commands, and many on a busy machine.
            self.assertGreaterEqual(stats.pop("age"), job.pop("age"))
            self.assertLessEqual(stats.pop("time-left"), job.pop("time-left"))
            self.assertEqual(stats, job)

    def test_a_flush_takes_jobs_from_their_workers(self):
        single = self.greenstalk(use="mail", watch="mail")
        batches = self.batches()
        for _ in range(30):
            single.put(b"job")
        single.put(b"later", delay=1000)
        held = [single.reserve(timeout=0) for _ in range(20)]
        for job in held[:10]:
            single.bury(job)
        self.assertEqual(batches.number("FLUSHED", "flush-buried mail"), 10)
        self.assertEqual(single.stats_tube("mail")["current-jobs-buried"], 0)
        single.delete(held[10])
        self.assertEqual(batches.number("FLUSHED", "flush-tube mail"), 20)
        with self.assertRaises(greenstalk.NotFoundError):
            single.delete(held[11])
        with self.assertRaises(greenstalk.NotFoundError):
            single.touch(held[12])
        stays = single.put(b"after the flush")
        self.assertEqual(single.reserve(timeout=0).id, stays)
        self.assertEqual(single.stats_tube("mail")["cmd-delete"], 31)
        self.assertEqual(batches.ask("flush-tube no-such-tube"), ["NOT_FOUND"])

    def test_a_batch_waits_for_the_first_job(self):
        single = self.greenstalk(use="mail")
        batches = self.batches("mail")
        batches.send(f"reserve-batch 10 {PATIENCE_S // 2}")
        wait_until("the batch waits", lambda: single.stats_tube("mail")["current-waiting"])
        job_id = single.put(b"first")
        self.assertEqual(batches.jobs("RESERVED", batches.reply()[0])[0], [(job_id, b"first")])
        self.assertEqual(single.stats_job(job_id)["state"], "reserved")
        self.assertEqual(batches.number("TOUCHED_ALL", "touch-all"), 1)
        self.assertEqual(batches.delete_batch([job_id, job_id, 999]), ["1", "2"])
        self.assertEqual(batches.reserve_batch(10), [])


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()

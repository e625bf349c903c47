"""Clients that send the commands C beanstalkd does not have, next to greenstalk on one server.

Usage: batches_test.py SERVER. Greenstalk knows nothing of these commands: what it sees of the same
jobs must agree with what they reply.
"""

import os
import re
import socket
import sys
import threading
import time
import unittest

import greenstalk
from server import PATIENCE_S, Server


class Batches:
    """A client over a plain socket, which sends lines and reads replies."""

    def __init__(self, address):
        self.socket = socket.create_connection(address)
        self.file = self.socket.makefile("rb")

    def close(self):
        self.file.close()
        self.socket.close()

    def send(self, line, body=None):
        request = line.encode() + b"\r\n" + (b"" if body is None else body + b"\r\n")
        self.socket.sendall(request)

    def reply(self):
        return self.file.readline().decode().removesuffix("\r\n").split(" ")

    def ask(self, line, body=None):
        self.send(line, body)
        return self.reply()

    def number(self, line, word, body=None):
        reply, *numbers = self.ask(line, body)
        if reply != word or len(numbers) != 1:
            raise AssertionError(f"{line}: {reply} {numbers} instead of {word}")
        return int(numbers[0])

    def put_in_tube(self, tube, body, pri=0, delay=0, ttr=60):
        return self.number(f"put-in-tube {tube} {pri} {delay} {ttr} {len(body)}", "INSERTED", body)

    def read_batch(self, word, replied):
        """Reads the jobs of a batch; returns pairs of an id and a body."""
        reply, count, *rest = replied
        if reply != f"{word}_BATCH":
            raise AssertionError(f"{reply} instead of {word}_BATCH")
        jobs = []
        for _ in range(int(count)):
            one, job_id, length = self.reply()
            if one != word:
                raise AssertionError(f"{one} in a batch of {word}")
            jobs.append((int(job_id), self.read_body(int(length))))
        return jobs, [int(number) for number in rest]

    def read_body(self, length):
        body = self.file.read(length + 2)
        if body[length:] != b"\r\n":
            raise AssertionError(f"a body of {length} bytes ends in {body[-2:]}")
        return body[:length]

    def reserve_batch(self, count, timeout=None):
        line = f"reserve-batch {count}" + ("" if timeout is None else f" {timeout}")
        return self.read_batch("RESERVED", self.ask(line))[0]

    def delete_batch(self, ids):
        word, deleted, missing = self.ask("delete-batch " + " ".join(map(str, ids)))
        if word != "DELETED_BATCH":
            raise AssertionError(word)
        return int(deleted), int(missing)

    def list_jobs(self, tube, state, page):
        """Returns all jobs of a tube, and how many pages they were."""
        jobs, pages, after = [], 0, 0
        while True:
            document = self.read_body(self.number(f"list-jobs {tube} {state} {page} {after}", "OK"))
            lines = document.decode().splitlines()
            if lines[0] != "---" or lines[2] not in ("jobs:", "jobs: []"):
                raise AssertionError(lines[:3])
            for line in lines[3:]:
                pairs = dict(re.findall(r"([a-z-]+): (\w+)", line))
                jobs.append({k: v if k == "state" else int(v) for k, v in pairs.items()})
            pages += 1
            after = int(lines[1].removeprefix("next: "))
            if after == 0:
                return jobs, pages

    def peek_batch(self, tube, state, page):
        """Returns pairs of an id and a body of all jobs of a tube."""
        jobs, after = [], 0
        while True:
            replied = self.ask(f"peek-batch {tube} {state} {page} {after}")
            found, (after,) = self.read_batch("FOUND", replied)
            jobs += found
            if after == 0:
                return jobs


class BatchesNextToGreenstalk(unittest.TestCase):
    def setUp(self):
        self.server = Server(PROGRAM)
        self.addCleanup(lambda: self.assertEqual(self.server.stop(), 0))

    def greenstalk(self, **tubes):
        client = greenstalk.Client(self.server.address, encoding=None, **tubes)
        self.addCleanup(client.close)
        return client

    def batches(self, tube=None):
        client = Batches(self.server.address)
        self.addCleanup(client.close)
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
        ids += [batches.put_in_tube("mail", b"batch %d" % n) for n in range(each)]
        self.assertEqual(batches.ask("list-tube-used"), ["USING", "default"])
        done_by_single, done_by_batches, failures = [], [], []
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
                if deleted != (len(jobs), 0):
                    raise AssertionError(deleted)
                done_by_batches.extend(jobs)
                jobs = batches.reserve_batch(7)

        def run(work):
            try:
                work()
            except BaseException as failure:
                failures.append(failure)

        workers = [threading.Thread(target=run, args=[w]) for w in (work_one_by_one, work_in_batches)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE_S)
            self.assertFalse(worker.is_alive())
        self.assertEqual(failures, [])
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
        self.assertEqual(batches.number("flush-buried mail", "FLUSHED"), 10)
        self.assertEqual(single.stats_tube("mail")["current-jobs-buried"], 0)
        single.delete(held[10])
        self.assertEqual(batches.number("flush-tube mail", "FLUSHED"), 20)
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
        end = time.monotonic() + PATIENCE_S
        while single.stats_tube("mail")["current-waiting"] == 0:
            self.assertLess(time.monotonic(), end)
        job_id = single.put(b"first")
        self.assertEqual(batches.read_batch("RESERVED", batches.reply())[0], [(job_id, b"first")])
        self.assertEqual(single.stats_job(job_id)["state"], "reserved")
        self.assertEqual(batches.number("touch-all", "TOUCHED_ALL"), 1)
        self.assertEqual(batches.delete_batch([job_id, job_id, 999]), (1, 2))
        self.assertEqual(batches.reserve_batch(10), [])


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()

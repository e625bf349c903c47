"""Jobs whose fate is written down: what a change of servers has to leave as it is.

    jobs.py MANIFEST ADDRESS fill     puts jobs of all kinds and writes down what became of each
    jobs.py MANIFEST ADDRESS expect   fails unless exactly those jobs are there, just so
    jobs.py MANIFEST ADDRESS work     deletes, releases, buries, kicks and puts some
    jobs.py - ADDRESS try             puts a job, reserves it and deletes it
    jobs.py - ADDRESS leave           puts a job and leaves it there
    jobs.py - ADDRESS take            reserves that job and deletes it

ADDRESS is unix:PATH or HOST:PORT. `fill` and `work` keep a job reserved until the server ends,
once they have said `filled` or `worked`. The manifest is JSON: the jobs by id, with null for one
that was deleted. Knows the protocol and nothing of packages.
"""

import base64
import json
import socket
import sys
import time

# Far enough away that none is due while a test runs.
LONG_S = 100_000

# How long a reply may take, and the server to listen: it ends a wait that has no end.
PATIENCE_S = 60

# Of a job that is put only to see whether that works.
BODY = b"of the test"


class Client:
    """One connection."""

    def __init__(self, address):
        if address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.where = address.removeprefix("unix:")
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.socket()
            self.where = (host, int(port))
        self.socket.settimeout(PATIENCE_S)
        self.connect()
        self.lines = self.socket.makefile("rb")

    def connect(self):
        """The server may still be on its way."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.socket.connect(self.where)
            except (ConnectionRefusedError, FileNotFoundError):
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.02)

    def ask(self, line, body=None):
        """The words of the reply."""
        message = line.encode() + b"\r\n"
        if body is not None:
            message += body + b"\r\n"
        self.socket.sendall(message)
        return self.lines.readline().decode().split()

    def must(self, expected, line, body=None):
        """The reply, which has to begin with that word."""
        reply = self.ask(line, body)
        assert reply[:1] == [expected], f"{line}: {reply}"
        return reply

    def document(self, count):
        """What follows a reply that ends in a count of bytes."""
        data = self.lines.read(int(count) + 2)
        return data[:-2]

    def put(self, tube, pri, delay, ttr, body):
        self.must("USING", f"use {tube}")
        return int(self.must("INSERTED", f"put {pri} {delay} {ttr} {len(body)}", body)[1])

    def stats(self, line):
        text = self.document(self.must("OK", line)[-1]).decode()
        pairs = (line.split(": ", 1) for line in text.splitlines() if ": " in line)
        return {key: value.strip('"') for key, value in pairs}

    def wait_for_end(self):
        """Reads until the server closes the connection, with a time limit."""
        self.socket.settimeout(2 * PATIENCE_S)
        try:
            return self.lines.read()
        except ConnectionResetError:
            return None


class Manifest:
    """What is known of each job."""

    def __init__(self, path, jobs):
        self.path = path
        self.jobs = jobs

    def note(self, number, tube, state, pri, delay, ttr, body):
        body = base64.b64encode(body).decode()
        self.jobs[str(number)] = {
            "tube": tube, "state": state, "pri": pri, "delay": delay, "ttr": ttr, "body": body
        }

    def save(self):
        with open(self.path, "w", encoding="ascii") as file:
            json.dump(self.jobs, file, indent=1)

    @staticmethod
    def load(path):
        with open(path, encoding="ascii") as file:
            return Manifest(path, json.load(file))


def put_all_kinds(client, manifest, bodies):
    """Ready, delayed and buried ones with each of the bodies, and some that are deleted."""
    for index, body in enumerate(bodies):
        tube = f"moving-{index % 3}"
        pri = [0, 7, 1024, 4294967295][index % 4]
        ready = client.put(tube, pri, 0, 60 + index, body)
        manifest.note(ready, tube, "ready", pri, 0, 60 + index, body)
        delayed = client.put(tube, pri, LONG_S + index, 60, body)
        manifest.note(delayed, tube, "delayed", pri, LONG_S + index, 60, body)
        buried = client.put(tube, pri, 0, 60, body)
        client.must("RESERVED", f"reserve-job {buried}")
        client.document(len(body))
        client.must("BURIED", f"bury {buried} 9")
        manifest.note(buried, tube, "buried", 9, 0, 60, body)
        deleted = client.put(tube, pri, 0, 60, body)
        client.must("DELETED", f"delete {deleted}")
        manifest.jobs[str(deleted)] = None
    held = client.put("held", 3, 0, 10_000, b"in the hands of a worker")
    client.must("RESERVED", f"reserve-job {held}")
    client.document(len(b"in the hands of a worker"))
    # No connection holds it after the restart.
    manifest.note(held, "held", "ready", 3, 0, 10_000, b"in the hands of a worker")


def fill(client, manifest):
    any_bytes = bytes(range(256))
    bodies = [b"", b"x", b"\r\n", b"line\r\nDELETED\r\n", any_bytes, any_bytes * 255 + b"z" * 255]
    put_all_kinds(client, manifest, bodies)
    # Released with a delay, kicked.
    body = b"released"
    released = client.put("moving-0", 5, 0, 60, body)
    client.must("RESERVED", f"reserve-job {released}")
    client.document(len(body))
    client.must("RELEASED", f"release {released} 11 {LONG_S}")
    manifest.note(released, "moving-0", "delayed", 11, LONG_S, 60, body)
    kicked = client.put("moving-0", 5, LONG_S, 60, b"kicked")
    client.must("KICKED", f"kick-job {kicked}")
    manifest.note(kicked, "moving-0", "ready", 5, LONG_S, 60, b"kicked")


def work(client, manifest):
    """A quarter is deleted, one of each other kind moves, and new ones come."""
    there = [int(number) for number, job in manifest.jobs.items() if job]
    for number in there[::4]:
        client.must("DELETED", f"delete {number}")
        manifest.jobs[str(number)] = None
    for state, do in (("buried", "kick"), ("ready", "bury"), ("ready", "release")):
        number = next(
            int(number) for number, job in manifest.jobs.items() if job and job["state"] == state
        )
        job = manifest.jobs[str(number)]
        if do == "kick":
            client.must("KICKED", f"kick-job {number}")
            job["state"] = "ready"
            continue
        client.document(client.must("RESERVED", f"reserve-job {number}")[2])
        if do == "bury":
            client.must("BURIED", f"bury {number} 12")
            job.update(state="buried", pri=12)
        else:
            client.must("RELEASED", f"release {number} 13 {LONG_S}")
            job.update(state="delayed", pri=13, delay=LONG_S)
    put_all_kinds(client, manifest, [b"put by the second server", bytes(65535)])


def expect(client, manifest):
    """All that was noted, and nothing else."""
    counts = {"ready": 0, "delayed": 0, "buried": 0, "reserved": 0}
    for number, job in manifest.jobs.items():
        reply = client.ask(f"peek {number}")
        if job is None:
            assert reply == ["NOT_FOUND"], f"deleted job {number}: {reply}"
            continue
        assert reply[:2] == ["FOUND", number], f"job {number}: {reply}"
        body = client.document(reply[2])
        assert body == base64.b64decode(job["body"]), f"job {number} has another body"
        found = client.stats(f"stats-job {number}")
        for key in ("tube", "state", "pri", "delay", "ttr"):
            assert found[key] == str(job[key]), f"job {number}: {key} is {found[key]}: {job}"
        if job["state"] == "delayed":
            left = int(found["time-left"])
            assert LONG_S - 1_000 < left <= LONG_S + 100, f"job {number}: {left} s left"
        counts[job["state"]] += 1
    stats = client.stats("stats")
    for state, count in counts.items():
        found = int(stats[f"current-jobs-{state}"])
        assert found == count, f"{found} jobs are {state}, {count} should be"
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    deleted = sum(job is None for job in manifest.jobs.values())
    print(f"{stats['version']}: {told}, {deleted} deleted: all as they were")


def take(client, tube):
    """Reserves and deletes the one job of that tube; its number."""
    client.must("WATCHING", f"watch {tube}")
    number, length = client.must("RESERVED", f"reserve-with-timeout {PATIENCE_S // 2}")[1:]
    body = client.document(length)
    assert body == BODY, body
    client.must("DELETED", f"delete {number}")
    return int(number)


def main():
    path, address, what = sys.argv[1:]
    client = Client(address)
    if what == "try":
        number = client.put("passing", 0, 0, 60, BODY)
        assert take(client, "passing") == number
    elif what == "leave":
        client.put("kept", 0, 0, 60, BODY)
    elif what == "take":
        take(client, "kept")
    elif what == "expect":
        expect(client, Manifest.load(path))
    else:
        manifest = Manifest(path, {}) if what == "fill" else Manifest.load(path)
        {"fill": fill, "work": work}[what](client, manifest)
        manifest.save()
        print({"fill": "filled", "work": "worked"}[what], flush=True)
        client.wait_for_end()


main()

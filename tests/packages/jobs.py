"""Jobs whose fate is written down: what a change of servers has to leave as it is.

    jobs.py MANIFEST ADDRESS fill     puts jobs of all kinds and writes down what became of each
    jobs.py MANIFEST ADDRESS expect   fails unless exactly those jobs are there, just so
    jobs.py MANIFEST ADDRESS work     deletes, releases, buries, kicks and puts some
    jobs.py - ADDRESS try             puts a job, reserves it and deletes it
    jobs.py - ADDRESS leave           puts a job and leaves it there
    jobs.py - ADDRESS take            reserves that job and deletes it

ADDRESS is unix:PATH or HOST:PORT. `fill` and `work` keep a job reserved until the server ends,
once they have said `filled` or `worked`. The manifest is JSON: the jobs by id, with null for one
that was deleted. JOBS in the environment is how many are there at least after `fill`. Knows the protocol and
nothing of packages.
"""

import base64
import json
import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../harness"))
from beanstalk import Connection

# Far enough away that none is due while a test runs.
LONG_S = 100_000
# The number of jobs that are looked up at once.
WINDOW = 100
# Of a job that is put only to see whether that works.
BODY = b"of the test"


def put(client, manifest, commands=(), **job):
    """Puts a job, sends commands with its number, and notes what they made of it: `becomes`."""
    becomes = job.pop("becomes", {})
    number = client.put(**job)
    for word, command in commands:
        client.must(word, command.format(number))
    job = {"state": "ready", **job, **becomes}
    manifest[str(number)] = {**job, "body": base64.b64encode(job["body"]).decode()}
    return number


def put_all_kinds(client, manifest, bodies):
    """Ready, delayed and buried ones with each of the bodies, and some that are deleted."""
    for index, body in enumerate(bodies):
        usual = {"body": body, "tube": f"moving-{index % 3}", "pri": [0, 7, 1024, 4294967295][index % 4],
                 "delay": 0, "ttr": 60}
        put(client, manifest, **{**usual, "ttr": 60 + index})
        put(client, manifest, **{**usual, "delay": LONG_S + index % 100}, becomes={"state": "delayed"})
        put(client, manifest, [("RESERVED", "reserve-job {}"), ("BURIED", "bury {} 9")], **usual,
            becomes={"state": "buried", "pri": 9})
        deleted = put(client, manifest, [("DELETED", "delete {}")], **usual)
        manifest[str(deleted)] = None
    # No connection holds them after the restart.
    for _ in range(1 + len(bodies) // 10):
        put(client, manifest, [("RESERVED", "reserve-job {}")], body=b"in the hands of a worker", tube="held",
            pri=3, delay=0, ttr=10_000)


def fill(client, manifest):
    any_bytes = bytes(range(256))
    bodies = [b"", b"x", b"\r\n", b"line\r\nDELETED\r\n", any_bytes, any_bytes * 255 + b"z" * 255]
    # Three jobs stay of each body.
    bodies += [b"job %d" % index for index in range(int(os.environ.get("JOBS", 0)) // 3)]
    put_all_kinds(client, manifest, bodies)
    usual = {"tube": "moving-0", "pri": 5, "ttr": 60}
    put(client, manifest, [("RESERVED", "reserve-job {}"), ("RELEASED", f"release {{}} 11 {LONG_S}")], **usual,
        body=b"released", delay=0, becomes={"state": "delayed", "pri": 11, "delay": LONG_S})
    put(client, manifest, [("KICKED", "kick-job {}")], **usual, body=b"kicked", delay=LONG_S,
        becomes={"state": "ready"})


def work(client, manifest):
    """A quarter is deleted, one of each other kind moves, and new ones come."""
    there = [int(number) for number, job in manifest.items() if job]
    for number in there[::4]:
        client.must("DELETED", f"delete {number}")
        manifest[str(number)] = None
    reserved = "RESERVED", "reserve-job {}"
    for state, commands, becomes in [
        ("buried", [("KICKED", "kick-job {}")], {"state": "ready"}),
        ("ready", [reserved, ("BURIED", "bury {} 12")], {"state": "buried", "pri": 12}),
        ("ready", [reserved, ("RELEASED", f"release {{}} 13 {LONG_S}")],
         {"state": "delayed", "pri": 13, "delay": LONG_S}),
    ]:
        number, job = next(each for each in manifest.items() if each[1] and each[1]["state"] == state)
        for word, command in commands:
            client.must(word, command.format(number))
        job.update(becomes)
    put_all_kinds(client, manifest, [b"put by the second server", bytes(65535)])


def looked_up(client, manifest):
    """Yields the number of each job, what was noted of it, what a peek finds, and its facts."""
    left = list(manifest.items())
    while left:
        jobs, left = left[:WINDOW], left[WINDOW:]
        client.send(*(f"{command} {number}" for number, _ in jobs for command in ("peek", "stats-job")))
        for number, job in jobs:
            yield number, job, client.peeked(), client.next_facts()


def expect(client, manifest):
    """All that was noted, and nothing else."""
    counts = {"ready": 0, "delayed": 0, "buried": 0, "reserved": 0}
    for number, job, peeked, found in looked_up(client, manifest):
        if job is None:
            assert peeked is None, f"deleted job {number}: {peeked}"
            continue
        assert peeked == (int(number), base64.b64decode(job["body"])), f"job {number} has another body: {peeked}"
        for key in ("tube", "state", "pri", "delay", "ttr"):
            assert found[key] == str(job[key]), f"job {number}: {key} is {found[key]}: {job}"
        if job["state"] == "delayed":
            left = int(found["time-left"])
            assert LONG_S - 1_000 < left <= LONG_S + 100, f"job {number}: {left} s left"
        counts[job["state"]] += 1
    stats = client.facts("stats")
    for state, count in counts.items():
        found = int(stats[f"current-jobs-{state}"])
        assert found == count, f"{found} jobs are {state}, {count} should be"
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    deleted = sum(job is None for job in manifest.values())
    print(f"{stats['version']}: {told}, {deleted} deleted: all as they were")


def take(client, tube):
    """Reserves and deletes the one job of that tube; its number."""
    client.must("WATCHING", f"watch {tube}")
    number, body = client.peek("reserve-with-timeout 30")
    assert body == BODY, body
    client.must("DELETED", f"delete {number}")
    return number


def load(path):
    with open(path, encoding="ascii") as file:
        return json.load(file)


def main():
    path, address, what = sys.argv[1:]
    client = Connection.when_listening(address)
    if what == "try":
        number = client.put(BODY, "passing")
        assert take(client, "passing") == number
    elif what == "leave":
        client.put(BODY, "kept")
    elif what == "take":
        take(client, "kept")
    elif what == "expect":
        expect(client, load(path))
    else:
        manifest = {} if what == "fill" else load(path)
        {"fill": fill, "work": work}[what](client, manifest)
        with open(path, "w", encoding="ascii") as file:
            json.dump(manifest, file, indent=1)
        print({"fill": "filled", "work": "worked"}[what], flush=True)
        # The worker of the job that is held. Its end comes within two minutes, or the test has failed.
        assert client.is_closed(120), "the server does not end"


if __name__ == "__main__":
    main()

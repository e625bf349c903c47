#!/usr/bin/env python3
"""Counts the functions and files of this crate that a command crosses, from the poll to its reply.

Use: walk.py [-v] [SERVER]    a build without optimization: else functions are part of their callers

The server runs in valgrind, which counts the calls of each function between two moments: before the
command is sent, and after its reply has come. With -v it prints the functions in the order of their files.
"""
import collections
import os
import re
import subprocess
import sys
import tempfile
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
sys.path.append(os.path.join(ROOT, "tests/harness"))
from beanstalk import Connection

PUT = ("put 0 0 9 5", b"hello")
# What is sent before a walk, what is walked through, and the first word of its reply.
WALKS = [
    ("put", (), PUT, "INSERTED"),
    ("reserve", (), "reserve", "RESERVED"),
    ("delete", (), "delete 1", "DELETED"),
    # A put of another client wakes a worker that waits.
    ("wake", ("watch woken", "ignore default", "reserve"), ("put-in-tube woken 0 0 9 1", b"x"), "RESERVED"),
]


def own_functions(dump):
    """Returns the files and functions of this crate that a dump of callgrind names."""
    names, found = {}, collections.defaultdict(set)
    file = None
    for line in open(dump, encoding="utf-8"):
        match = re.match(r"(fl|fi|fe|fn|cfi|cfl|cfn|ob|cob)=\((\d+)\)(?: (.*))?$", line.rstrip("\n"))
        if not match:
            continue
        kind, number, name = match.groups()
        space = "file" if kind in ("fl", "fi", "fe", "cfi", "cfl") else kind[-2:]
        if name is not None:
            names[space, number] = name
        name = names.get((space, number), "")
        if kind == "fl":
            file = name
        elif kind == "fn" and file:
            path = os.path.relpath(os.path.join(ROOT, file), ROOT)
            if path.startswith("src" + os.sep):
                found[path].add(re.sub(r"::h[0-9a-f]{16}$", "", name.split("'")[0]))
    return found


def main():
    args = [arg for arg in sys.argv[1:] if arg != "-v"]
    server = args[0] if args else os.path.join(ROOT, "target", "walk", "debug", "beanstalkd")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "socket")
        dumps = os.path.join(folder, "dump")
        command = ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={dumps}"]
        process = subprocess.Popen(command + [server, "-l", f"unix:{path}"])
        control = ["callgrind_control", "--zero", str(process.pid)]
        try:
            client, worker = (Connection.when_listening(f"unix:{path}") for _ in range(2))
            for _ in range(2):
                client.must("INSERTED", *PUT)
            for number, (name, before, walked, word) in enumerate(WALKS):
                worker.send(*before)
                for _ in before[:-1]:
                    worker.reply()
                time.sleep(1)
                subprocess.run(control, check=True, stdout=subprocess.DEVNULL)
                client.send(walked)
                words, _ = (worker if before else client).reply()
                assert words[0] == word, words
                dump = ["callgrind_control", f"--dump={name}", str(process.pid)]
                subprocess.run(dump, check=True, stdout=subprocess.DEVNULL)
                found = own_functions(f"{dumps}.{number + 1}")
                count = sum(len(functions) for functions in found.values())
                print(f"{name}: {count} functions in {len(found)} files")
                if "-v" in sys.argv:
                    for file in sorted(found):
                        print(f"  {file}: {', '.join(sorted(found[file]))}")
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Counts the functions and files of this crate that a command crosses, from the poll to its reply.

Use: walk.py [-v] [SERVER]    a build without optimization: else functions are part of their callers

The server runs in valgrind, which counts the calls of each function between two moments: before the
command is sent, and after its reply has come. With -v it prints the functions in the order of their files.
"""
import collections
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
# What is sent before a walk, what is walked through, and the end of its reply.
WALKS = [
    ("put", b"", b"put 0 0 9 5\r\nhello\r\n", b"INSERTED 3\r\n"),
    ("reserve", b"", b"reserve\r\n", b"hello\r\n"),
    ("delete", b"", b"delete 1\r\n", b"DELETED\r\n"),
    # A put of another client wakes a worker that waits.
    ("wake", b"watch woken\r\nignore default\r\nreserve\r\n", b"put-in-tube woken 0 0 9 1\r\nx\r\n", b"x\r\n"),
]
PATIENCE_SECS = 60


def connect(path):
    """Returns a connection, once the server listens."""
    end = time.monotonic() + PATIENCE_SECS
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE_SECS)
        try:
            client.connect(path)
            return client
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def read_to(client, end):
    """Reads up to this end of a reply."""
    reply = b""
    while not reply.endswith(end):
        part = client.recv(65536)
        if not part:
            sys.exit(f"the server has closed the connection after {reply!r}")
        reply += part


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
            clients = [connect(path), connect(path)]
            for _ in range(2):
                clients[0].sendall(b"put 0 0 9 5\r\nhello\r\n")
                read_to(clients[0], b"\r\n")
            for number, (name, before, walked, end) in enumerate(WALKS):
                clients[1].sendall(before)
                time.sleep(1)
                subprocess.run(control, check=True, stdout=subprocess.DEVNULL)
                clients[0].sendall(walked)
                read_to(clients[1 if before else 0], end)
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
            process.wait(PATIENCE_SECS)


if __name__ == "__main__":
    main()

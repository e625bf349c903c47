"""What it costs to have servers started and idle:

    measure.py PROGRAM...

For each a line of: program, its bytes and those of the shared libraries that it loads, its memory
while it waits for its first client in KiB (VmRSS), and the least and the median of 20 times from the start to the first
answer in ms. Times count from before fork and exec, and the programs take turns.
"""

import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time

STARTS = 20
PATIENCE_S = 10


def until(what, holds):
    """Polls without a pause, which would be measured."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"it never came to be that {what}"


@contextlib.contextmanager
def started(program):
    """Its process and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pid = os.posix_spawn(program, [program, "-l", "127.0.0.1", "-p", str(port)], os.environ)
    try:
        yield pid, port
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def is_answered(port):
    with socket.socket() as client:
        if client.connect_ex(("127.0.0.1", port)):
            return False
        client.sendall(b"use a\r\n")
        return client.recv(100) == b"USING a\r\n"


def start_ms(program):
    """From its start to its first answer."""
    begun_at = time.monotonic()
    with started(program) as (_, port):
        until("the server answers", lambda: is_answered(port))
        return (time.monotonic() - begun_at) * 1000


def idle_kib(program):
    """Its memory when it waits for its first client."""
    with started(program) as (pid, _):
        until("the server waits for clients", lambda: re.search("epoll|ep_poll", read(f"/proc/{pid}/wchan")))
        return int(re.search(r"VmRSS:\s+(\d+) kB", read(f"/proc/{pid}/status"))[1])


def read(path):
    with open(path, encoding="ascii") as file:
        return file.read()


def main():
    programs = sys.argv[1:]
    times = [[start_ms(program) for program in programs] for _ in range(STARTS)]
    for program, starts in zip(programs, zip(*times)):
        libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        paths = set(re.findall(r"(/\S+) \(0x", libraries))
        print(
            f"{program}: bytes {os.path.getsize(program)}"
            f" libraries {len(paths)} library-bytes {sum(map(os.path.getsize, paths))}"
            f" idle-kib {statistics.median_low(idle_kib(program) for _ in range(STARTS))}"
            f" start-ms {min(starts):.2f} median-ms {statistics.median_high(starts):.2f}"
        )


main()

"""What it costs to have servers started and idle:

    measure.py PROGRAM...

For each a line of: program, its bytes and those of the shared libraries that it loads, its memory
while it waits for its first client in KiB (VmRSS), and the least and the median of 20 times from the start to the first
answer in ms. Times count from before fork and exec, and the programs take turns.
"""

import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time

STARTS = 20
PATIENCE_SECONDS = 10


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_answer(port, give_up_at):
    """Asks until there is an answer."""
    while time.monotonic() < give_up_at:
        with socket.socket() as client:
            try:
                client.connect(("127.0.0.1", port))
            except ConnectionRefusedError:
                continue
            client.sendall(b"use a\r\n")
            assert client.recv(100) == b"USING a\r\n"
            return
    raise TimeoutError("the server does not answer")


def started(program):
    """Its process and its port."""
    port = free_port()
    arguments = [program, "-l", "127.0.0.1", "-p", str(port)]
    return os.posix_spawn(program, arguments, os.environ), port


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def start_ms(program):
    """From its start to its first answer."""
    begun_at = time.monotonic()
    pid, port = started(program)
    try:
        first_answer(port, begun_at + PATIENCE_SECONDS)
        return (time.monotonic() - begun_at) * 1000
    finally:
        end(pid)


def idle_kib(program):
    """Its memory when it waits for its first client."""
    pid, _ = started(program)
    try:
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while not re.search(r"epoll|ep_poll", read(f"/proc/{pid}/wchan")):
            if time.monotonic() > give_up_at:
                raise TimeoutError("the server does not wait for clients")
        return int(re.search(r"VmRSS:\s+(\d+) kB", read(f"/proc/{pid}/status")).group(1))
    finally:
        end(pid)


def read(path):
    with open(path, encoding="ascii") as file:
        return file.read()


def bytes_of(program):
    """Its own, and those of its shared libraries."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    paths = set(re.findall(r"(/\S+) \(0x", told))
    return os.path.getsize(program), sum(os.path.getsize(path) for path in paths), len(paths)


def main():
    programs = sys.argv[1:]
    times = {program: [] for program in programs}
    for _ in range(STARTS):
        for program in programs:
            times[program].append(start_ms(program))
    for program in programs:
        own, shared, count = bytes_of(program)
        sorted_ms = sorted(times[program])
        print(
            f"{program}: bytes {own} libraries {count} library-bytes {shared}"
            f" idle-kib {statistics.median_low(idle_kib(program) for _ in range(STARTS))}"
            f" start-ms {sorted_ms[0]:.2f} median-ms {sorted_ms[STARTS // 2]:.2f}"
        )


main()

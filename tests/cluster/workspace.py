"""The processes of one test: a directory, loopback addresses, and children that end with the test.

Each child process has a loopback address of its own, 127.x.y.n. Outgoing connections come from
127.0.0.1, so that none of them can take the port of a server that is down for a moment, or connect
to itself.
"""
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

# What all tests in Python share.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "harness"))
from beanstalk import PATIENCE_S
from server import wait_until


class Process:
    """A child process, and the file that its output goes to."""

    def __init__(self, name, arguments, log, environment=None):
        self.name = name
        self.log = log
        # The signals that this test sent; they explain an exit status.
        self.signals = []
        with open(log, "ab") as output:
            # A session of its own: Ctrl-C reaches the test only, which then ends its children.
            self.child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output,
                                          stderr=output, start_new_session=True,
                                          env={**os.environ, **(environment or {})})
        self.pid = self.child.pid

    def poll(self):
        """Returns the exit status, or `None` while the process runs."""
        return self.child.poll()

    def signal(self, number):
        self.signals.append(number)
        self.child.send_signal(number)

    def kill(self):
        """Ends the process with SIGKILL, also when it is stopped, and waits for its end."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def wait(self):
        try:
            return self.child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} (pid {self.pid}) has not ended: {self.tail()}") from None

    def text(self):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return log.read()

    def tail(self, lines=25):
        """Returns the last lines of the output, without the progress of reading a binlog."""
        kept = [line for line in self.text().splitlines() if ": read, " not in line]
        return "\n".join(kept[-lines:])


class Worker(threading.Thread):
    """Repeats `work` in a thread of its own until it is stopped. What fails in it is added to `failures`."""

    def __init__(self, failures):
        super().__init__(name=type(self).__name__, daemon=True)
        self.failures = failures
        self.is_over = threading.Event()

    def run(self):
        try:
            while not self.is_over.is_set():
                self.work()
        except Exception as failure:
            self.failures.append(failure)
        finally:
            self.close()

    def close(self):
        """Ends what the work has begun."""


def stop(workers):
    for worker in workers:
        worker.is_over.set()
    for worker in workers:
        worker.join()


class Workspace:
    """A temporary directory and the processes of a test. Leaving the context ends and removes all.

    KEEP=1 in the environment keeps the directory, for the logs in it.
    """

    def __enter__(self):
        self.directory = tempfile.mkdtemp(prefix="beanstalkd-cluster-")
        # Two tests at a time have the same numbers once in 16,000 times; the kernel then refuses
        # a port that is in use.
        self.network = f"127.{random.randrange(64, 128)}.{random.randrange(256)}"
        self.last_address = 0
        self.processes = []
        self.lock = threading.Lock()
        return self

    def __exit__(self, *_):
        # A second signal does not end the clean-up.
        handlers = {number: signal.signal(number, signal.SIG_IGN)
                    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        with self.lock:
            processes, self.processes = self.processes, None
        for process in processes:
            if process.poll() is None:
                process.kill()
        if os.environ.get("KEEP"):
            print(f"kept {self.directory}", file=sys.stderr)
        else:
            shutil.rmtree(self.directory, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def path(self, name):
        return os.path.join(self.directory, name)

    def address(self):
        """Returns a loopback address that no other process of this test has."""
        self.last_address += 1
        assert self.last_address < 255, "too many processes in one test"
        return f"{self.network}.{self.last_address}"

    def port(self, address):
        """Returns a port of `address` that the kernel chose."""
        with socket.create_server((address, 0)) as listener:
            return listener.getsockname()[1]

    def start(self, name, arguments, environment=None, log=None):
        """Starts a child process; it ends with the workspace at the latest."""
        with self.lock:
            if self.processes is None:
                raise AssertionError(f"{name} is started after the end of the test")
            # Those that have ended are forgotten: an hour of restarts does not grow the list.
            self.processes = [process for process in self.processes if process.poll() is None]
            process = Process(name, arguments, log or self.path(f"{name}.log"), environment)
            self.processes.append(process)
        return process

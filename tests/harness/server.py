"""Programs that tests in Python start and end: the server, and others that log when they are ready.

    server.py SERVER COMMAND...    starts a server, runs the command with the port of the server as its last
                                   argument, and stops the server, which must end in good order

Ports come from the kernel, each wait ends, and leaving the context of a program kills it."""

import re
import signal
import subprocess
import sys
import threading
import time

from beanstalk import PATIENCE_S, Connection


def interrupt(*_):
    raise SystemExit("FAILED: the test was interrupted, or took too long")


# So that the programs end too when `timeout`, or the end of a terminal, ends the test.
for number in signal.SIGTERM, signal.SIGHUP:
    signal.signal(number, interrupt)


def wait_until(what, holds, patience_s=PATIENCE_S, pause_s=0.02):
    """Polls a condition that has no event until it holds. Returns its value."""
    end = time.monotonic() + patience_s
    while not (value := holds()):
        if time.monotonic() > end:
            raise AssertionError(f"after {patience_s} s it does not hold that {what}")
        time.sleep(pause_s)
    return value


class Program:
    """A program that logs to standard error, ready once each pattern is found there. `found` has the first
    group of each. A thread reads the log, so that the program never waits for a reader."""

    def __init__(self, *arguments, patterns):
        self.log = []
        self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True, errors="replace")
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reader.start()
        try:
            self.found = [wait_until(f"{arguments[0]} logs {pattern}", lambda: self.find(pattern))
                          for pattern in patterns]
        except BaseException:
            self.__exit__()
            raise

    def find(self, pattern):
        matches = (re.search(pattern, line) for line in list(self.log))
        found = next((match[1] for match in matches if match), None)
        assert found or self.process.poll() is None, f"{self.process.args[0]} ended:\n{''.join(self.log)}"
        return found

    def stop(self):
        """Asks the program to end; returns its status."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stderr.close()


class Server(Program):
    """A server on loopback: `address` is for clients, `metrics` for HTTP."""

    def __init__(self, program, *flags):
        super().__init__(program, "-V", "-l", "127.0.0.1", "-p", "0", "--metrics", "127.0.0.1:0", *flags,
                         patterns=[r"listening on (\S+)", r"serving metrics on (\S+)"])
        self.address, self.metrics = self.found

    def connect(self):
        return Connection(self.address)


def main():
    with Server(sys.argv[1]) as server:
        status = subprocess.run([*sys.argv[2:], server.address.rpartition(":")[2]], check=False,
                                timeout=PATIENCE_S).returncode
        ended = server.stop()
        sys.exit(status or (f"FAILED: the server ended with {ended}" if ended else 0))


if __name__ == "__main__":
    main()

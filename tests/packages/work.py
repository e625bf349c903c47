"""One job from its put to its delete, through a server that may only just be starting:

    work.py HOST PORT           puts a job, reserves and deletes it
    work.py HOST PORT leave     puts a job in the tube `kept` and leaves it there
    work.py HOST PORT take      takes that job and deletes it

Fails when an answer is not what the protocol says, or nobody answers for ten seconds.
"""

import socket
import sys
import time

PATIENCE_SECONDS = 10


def connect(host, port):
    """A connection, as soon as somebody listens."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), PATIENCE_SECONDS)
        except OSError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)


def main():
    host, port, *rest = sys.argv[1:]
    what = rest[0] if rest else "all"
    stream = connect(host, int(port)).makefile("rwb")

    def ask(request):
        stream.write(request)
        stream.flush()
        return stream.readline()

    tube = b"passing" if what == "all" else b"kept"
    assert ask(b"use %s\r\n" % tube) == b"USING %s\r\n" % tube
    assert ask(b"watch %s\r\n" % tube) == b"WATCHING 2\r\n"
    if what != "take":
        answer = ask(b"put 0 0 60 5\r\nhello\r\n")
        assert answer.startswith(b"INSERTED "), answer
    if what != "leave":
        answer = ask(b"reserve-with-timeout 5\r\n")
        assert answer.startswith(b"RESERVED ") and answer.endswith(b" 5\r\n"), answer
        assert stream.readline() == b"hello\r\n"
        assert ask(b"delete %s\r\n" % answer.split()[1]) == b"DELETED\r\n"


main()

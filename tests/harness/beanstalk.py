"""A connection to a queue, for all tests in Python: sends commands, reads replies, ends each wait.

Knows the protocol and nothing of any test. `Closed` is raised when the server closes the connection, or
when it sends nothing for `patience_s`."""
import select
import socket
import time

# It ends a wait for what does not come, and measures nothing.
PATIENCE_S = 120


class Closed(ConnectionError):
    """The connection ended, or a reply did not arrive in time."""


class Connection:
    """One connection. A reply is a list of words and, where it has one, a body of bytes.

    The address is a pair of host and port, or a text: HOST:PORT or unix:PATH."""

    def __init__(self, address, patience_s=PATIENCE_S):
        try:
            self.socket = connected(address, patience_s)
        except OSError as error:
            raise Closed(f"cannot connect: {error}") from error
        self.replies = self.socket.makefile("rb")

    @classmethod
    def when_listening(cls, address, patience_s=PATIENCE_S):
        """Connects to a server that may not listen yet."""
        end = time.monotonic() + patience_s
        while True:
            try:
                return cls(address, patience_s)
            except Closed:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def close(self):
        self.replies.close()
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def is_closed(self, patience_s=0):
        """Returns whether the server closes the connection in this time. No reply may be outstanding."""
        if not select.select([self.socket], [], [], patience_s)[0]:
            return False
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def send(self, *commands):
        """Sends commands at once, without waiting. A command is a line, or a line and a body."""
        self.send_bytes(b"".join(encode(command) for command in commands))

    def send_bytes(self, data):
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Closed(f"cannot send: {error}") from error

    def half_close(self):
        """Sends no more commands."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise Closed(f"cannot send: {error}") from error

    def reply(self):
        """Returns the words of the next reply, and its body or `None`."""
        words = self.line().decode("ascii", "backslashreplace").split(" ")
        has_body = words[0] in ("RESERVED", "FOUND", "OK")
        return words, self.body(int(words[-1])) if has_body else None

    def call(self, line, body=None):
        """Returns the words of the reply to a command, and the body of the reply or `None`."""
        self.send(line if body is None else (line, body))
        return self.reply()

    def ask(self, line, body=None):
        """Returns the words of the reply to a command; a body of the reply is read and dropped."""
        return self.call(line, body)[0]

    def must(self, word, line, body=None):
        """Returns the words of the reply, which must begin with `word`."""
        self.send(line if body is None else (line, body))
        return self.must_reply(word, line)

    def must_reply(self, word, line):
        """Returns the words of the next reply, to a line that was sent. They must begin with `word`."""
        words, _ = self.reply()
        assert words[0] == word, f"{line}: {' '.join(words)} instead of {word}"
        return words

    def put(self, body, tube=None, pri=1024, delay=0, ttr=120):
        """Returns the id of a new job."""
        uses = [] if tube is None else [f"use {tube}"]
        line = f"put {pri} {delay} {ttr} {len(body)}"
        self.send(*uses, (line, body))
        for use in uses:
            self.must_reply("USING", use)
        return int(self.must_reply("INSERTED", line)[1])

    def peek(self, line):
        """Returns the id and the body that a reserve or a peek finds, or `None`."""
        self.send(line)
        return self.peeked()

    def peeked(self):
        """Returns what the next reply has found, as `peek` does."""
        words, body = self.reply()
        return (int(words[1]), body) if words[0] in ("RESERVED", "FOUND") else None

    def facts(self, line):
        """Returns the document of a `stats` command, or `None` without such a job or tube."""
        self.send(line)
        return self.next_facts()

    def next_facts(self):
        """Returns the document of the next reply, as `facts` does."""
        words, body = self.reply()
        return parse_facts(body) if words[0] == "OK" else None

    def line(self):
        """Returns one line of a reply, without its end."""
        try:
            line = self.replies.readline()
        except OSError as error:
            raise Closed(f"no reply: {error}") from error
        if not line.endswith(b"\r\n"):
            raise Closed("the server closed the connection")
        return line[:-2]

    def body(self, length):
        """Returns a body of a reply, without its end."""
        try:
            body = self.replies.read(length + 2)
        except OSError as error:
            raise Closed(f"half a body: {error}") from error
        if len(body) != length + 2:
            raise Closed("the server closed the connection within a body")
        assert body.endswith(b"\r\n"), f"a body of {length} bytes ends in {body[-2:]}"
        return body[:-2]


def connected(address, patience_s):
    """Returns a socket that is connected, and whose operations end after `patience_s`."""
    if isinstance(address, str) and address.startswith("unix:"):
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(patience_s)
        stream.connect(address.removeprefix("unix:"))
        return stream
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        address = host.strip("[]"), int(port)
    stream = socket.create_connection(address, timeout=patience_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def encode(command):
    """Returns the bytes of a command: a line, or a line and a body."""
    if isinstance(command, str):
        return command.encode() + b"\r\n"
    line, body = command
    return line.encode() + b"\r\n" + body + b"\r\n"


def parse_facts(document):
    """Returns the keys and values of the document of a `stats` command."""
    pairs = (line.split(": ", 1) for line in document.decode().splitlines() if ": " in line)
    return {key: value.strip('"') for key, value in pairs}

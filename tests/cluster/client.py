"""A connection to a queue: sends commands, reads replies."""
import select
import socket

from workspace import PATIENCE_S


class Closed(Exception):
    """The connection ended, or a reply did not arrive in time."""


class Connection:
    """One connection. Each reply is a list of words and, where it has one, a body."""

    def __init__(self, address, patience=PATIENCE_S):
        try:
            self.socket = socket.create_connection(address, timeout=patience)
        except OSError as error:
            raise Closed(f"cannot connect: {error}") from error
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replies = self.socket.makefile("rb")

    def close(self):
        self.replies.close()
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def is_closed(self):
        """Returns whether the other side has closed the connection. No reply may be outstanding."""
        if not select.select([self.socket], [], [], 0)[0]:
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

    def reply(self):
        """Returns the words of the next reply, and its body or `None`."""
        line = self.line()
        words = line.decode("ascii", "backslashreplace").split(" ")
        has_body = words[0] in ("RESERVED", "FOUND", "OK")
        return words, self.body(int(words[-1])) if has_body else None

    def ask(self, line, body=None):
        """Returns the words of the reply to a command whose reply has no body."""
        self.send((line, body) if body is not None else line)
        return self.reply()[0]

    def must(self, word, line, body=None):
        """Returns the words of the reply, which must begin with `word`."""
        words = self.ask(line, body)
        assert words[0] == word, f"{line}: {' '.join(words)} instead of {word}"
        return words

    def put(self, body, tube=None, pri=1024, delay=0, ttr=120):
        """Returns the id of a new job."""
        if tube is not None:
            self.must("USING", f"use {tube}")
        return int(self.must("INSERTED", f"put {pri} {delay} {ttr} {len(body)}", body)[1])

    def peek(self, line):
        """Returns the id and the body that a reserve or a peek finds, or `None`."""
        self.send(line)
        words, body = self.reply()
        return (int(words[1]), body) if words[0] in ("RESERVED", "FOUND") else None

    def facts(self, line):
        """Returns the document of a `stats` command, or `None` without such a job or tube."""
        self.send(line)
        words, body = self.reply()
        if words[0] != "OK":
            return None
        return parse_facts(body)

    def line(self):
        try:
            line = self.replies.readline()
        except OSError as error:
            raise Closed(f"no reply: {error}") from error
        if not line.endswith(b"\r\n"):
            raise Closed("the server closed the connection")
        return line[:-2]

    def body(self, length):
        try:
            body = self.replies.read(length + 2)
        except OSError as error:
            raise Closed(f"half a body: {error}") from error
        if len(body) != length + 2:
            raise Closed("the server closed the connection within a body")
        assert body.endswith(b"\r\n"), f"a body of {length} bytes ends in {body[-2:]}"
        return body[:-2]


def encode(command):
    """Returns the bytes of a command: a line, or a line and a body."""
    if isinstance(command, str):
        return command.encode() + b"\r\n"
    line, body = command
    return line.encode() + b"\r\n" + body + b"\r\n"


def parse_facts(document):
    pairs = (line.split(": ", 1) for line in document.decode().splitlines() if ": " in line)
    return {key: value.strip('"') for key, value in pairs}

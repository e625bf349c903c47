"""A server with a status page, and a client of its queue."""
import json
import re
import socket
import subprocess
import urllib.request


class Server:
    """A server on loopback ports that the kernel chooses. Leaving the context ends it."""

    def __init__(self, program):
        self.program = program

    def __enter__(self):
        flags = ["-V", "-l", "127.0.0.1", "-p", "0", "--metrics", "127.0.0.1:0"]
        self.process = subprocess.Popen([self.program, *flags], stdin=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True)
        self.ports = {}
        for line in self.process.stderr:
            if found := re.search(r"(listening|serving metrics) on 127\.0\.0\.1:(\d+)", line):
                self.ports[found[1]] = int(found[2])
            if len(self.ports) == 2:
                break
        else:
            raise AssertionError("the server did not start")
        self.page = f"http://127.0.0.1:{self.ports['serving metrics']}/"
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.process.stderr.close()

    def client(self):
        return Client(self.ports["listening"])

    def get(self, path="", accept="*/*"):
        request = urllib.request.Request(self.page + path, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode()

    def facts(self, path=""):
        return json.loads(self.get(path, "application/json"))


class Client:
    """A connection to the queue."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.replies = self.socket.makefile("rb")

    def send(self, command, body=None):
        """Sends a command without waiting for its reply."""
        lines = [command] if body is None else [f"{command} {len(body)}", body]
        self.socket.sendall("".join(line + "\r\n" for line in lines).encode())

    def line(self):
        return self.replies.readline().decode().rstrip("\r\n")

    def ask(self, command, body=None):
        """Returns the words of the reply; reads the body behind it, if there is one."""
        self.send(command, body)
        words = self.line().split()
        if words[0] in ("RESERVED", "FOUND", "OK"):
            self.replies.read(int(words[-1]) + 2)
        return words

    def put(self, tube, count=1, pri=1024, delay=0, ttr=120, body="x"):
        self.ask(f"use {tube}")
        return [int(self.ask(f"put {pri} {delay} {ttr}", body)[1]) for _ in range(count)]

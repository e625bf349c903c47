"""TCP proxies that delay, stall or break the connections between a server and a node of etcd.

`Proxies` is the part inside the test. It starts this file as a helper process, which copies the
bytes, and sends it one JSON object a line. A link is one listening address and its target. Its two
directions are `to` (towards the target) and `back`.
"""
import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import threading

TO, BACK = "to", "back"
# One direction of one connection holds at most 8 MiB, as much as a kernel buffers.
BUFFER_BYTES = 8 << 20


class Proxies:
    """The helper process and its links. Used from several threads."""

    def __init__(self, workspace):
        self.workspace = workspace
        self.lock = threading.Lock()
        self.helper = subprocess.Popen([sys.executable, "-B", __file__], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # The helper ends at the end of its input.
        self.helper.stdin.close()
        self.helper.wait()
        self.helper.stdout.close()

    def command(self, **command):
        with self.lock:
            self.helper.stdin.write(json.dumps(command) + "\n")
            self.helper.stdin.flush()
            return json.loads(self.helper.stdout.readline())

    def add(self, name, target):
        """Returns the address and the port of a new link to `target`."""
        address = self.workspace.address()
        return address, self.command(add=name, address=address, target=list(target))["port"]

    def stall(self, names, directions=(TO, BACK)):
        """Holds bytes, ends of connections and new connections back. They arrive after `heal`."""
        for name in names:
            self.command(link=name, stalled=list(directions))

    def delay(self, names, seconds, directions=(TO, BACK)):
        """Delivers everything later, in order."""
        for name in names:
            self.command(link=name, delays={direction: seconds for direction in directions})

    def cut(self, names):
        """Resets all connections, drops the bytes in them, and resets each new connection."""
        for name in names:
            self.command(link=name, is_cut=True)

    def reset(self, names):
        """Resets all connections and drops the bytes in them; new ones work as before."""
        for name in names:
            self.command(link=name, reset=True)

    def heal(self, names):
        """Delivers what was held back, and everything at once from now on."""
        for name in names:
            self.command(link=name, stalled=[], delays={TO: 0, BACK: 0}, is_cut=False)


class Link:
    """A listening address and what happens to its connections."""

    def __init__(self, target):
        self.target = target
        self.is_cut = False
        self.delays = {TO: 0, BACK: 0}
        self.gates = {TO: asyncio.Event(), BACK: asyncio.Event()}
        self.connections = set()
        self.set_stalled([])

    def set_stalled(self, directions):
        for direction, gate in self.gates.items():
            if direction in directions:
                gate.clear()
            else:
                gate.set()

    def reset(self):
        for task in list(self.connections):
            task.cancel()

    async def serve(self, reader, writer):
        task = asyncio.current_task()
        self.connections.add(task)
        writers = [writer]
        try:
            if self.is_cut:
                return
            # A stalled link does not let the request for a connection through either.
            await self.gates[TO].wait()
            target_reader, target_writer = await asyncio.open_connection(*self.target)
            writers.append(target_writer)
            async with asyncio.TaskGroup() as group:
                for direction, source, target in ((TO, reader, target_writer),
                                                  (BACK, target_reader, writer)):
                    pipe = Pipe(self, direction, source, target)
                    group.create_task(pipe.read())
                    group.create_task(pipe.write())
            for each in writers:
                each.close()
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            self.connections.discard(task)
            for each in writers:
                abort(each)


class Pipe:
    """One direction of one connection."""

    def __init__(self, link, direction, source, target):
        self.link = link
        self.direction = direction
        self.source = source
        self.target = target
        self.chunks = asyncio.Queue()
        self.held_bytes = 0
        self.has_space = asyncio.Event()

    async def read(self):
        data = b"x"
        while data:
            try:
                data = await self.source.read(1 << 16)
            except OSError:
                # The other side learns of a reset as of an end, and not before the gate is open.
                data = b""
            self.chunks.put_nowait((asyncio.get_running_loop().time(), data))
            self.held_bytes += len(data)
            while self.held_bytes > BUFFER_BYTES:
                self.has_space.clear()
                await self.has_space.wait()

    async def write(self):
        while True:
            came_at, data = await self.chunks.get()
            delay = came_at + self.link.delays[self.direction] - asyncio.get_running_loop().time()
            if delay > 0:
                await asyncio.sleep(delay)
            await self.link.gates[self.direction].wait()
            if not data:
                if self.target.can_write_eof():
                    self.target.write_eof()
                return
            self.target.write(data)
            await self.target.drain()
            self.held_bytes -= len(data)
            self.has_space.set()


def abort(writer):
    """Closes a connection with a reset, if it is still open."""
    if not writer.is_closing():
        kernel_socket = writer.get_extra_info("socket")
        kernel_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


class Helper:
    """The links of the helper process, and the commands that change them."""

    def __init__(self):
        self.links = {}

    async def run(self, command):
        if "add" in command:
            link = self.links[command["add"]] = Link(command["target"])
            server = await asyncio.start_server(link.serve, command["address"], 0)
            return {"port": server.sockets[0].getsockname()[1]}
        link = self.links[command["link"]]
        link.delays.update(command.get("delays", {}))
        if "stalled" in command:
            link.set_stalled(command["stalled"])
        link.is_cut = command.get("is_cut", link.is_cut)
        if link.is_cut or command.get("reset"):
            link.reset()
        return {}

    async def main(self):
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            print(json.dumps(await self.run(json.loads(line))), flush=True)
        # The kernel closes all connections.
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(Helper().main())

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
# One direction of one connection holds at most this many chunks of up to 64 KiB.
HELD_CHUNKS = 512


class Proxies:
    """The helper process and its links. Used from several threads."""

    def __init__(self, workspace):
        # The helper never ends before the test, so that all links can share one address.
        self.host = workspace.address()
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

    def send(self, names, **changes):
        """Changes links, and returns the reply of the helper for the last one."""
        with self.lock:
            for name in names:
                self.helper.stdin.write(json.dumps({"link": name, **changes}) + "\n")
                self.helper.stdin.flush()
                reply = json.loads(self.helper.stdout.readline())
        return reply

    def add(self, name, target):
        """Returns the address of a new link to `target`."""
        return self.host, self.send([name], host=self.host, target=target)["port"]

    def stall(self, names, directions=(TO, BACK)):
        """Holds bytes, ends of connections and new connections back. They arrive after `heal`."""
        self.send(names, stalled=directions)

    def delay(self, names, seconds, directions=(TO, BACK)):
        """Delivers everything later, in order."""
        self.send(names, delays={direction: seconds for direction in directions})

    def cut(self, names):
        """Resets all connections, drops the bytes in them, and resets each new connection."""
        self.send(names, is_cut=True, is_reset=True)

    def reset(self, names):
        """Resets all connections and drops the bytes in them; new ones work as before."""
        self.send(names, is_reset=True)

    def heal(self, names):
        """Delivers what was held back, and everything at once from now on."""
        self.send(names, stalled=[], delays={TO: 0, BACK: 0}, is_cut=False)


class Link:
    """A listening address and what happens to its connections."""

    def __init__(self, target):
        self.target = target
        self.is_cut = False
        self.delays = {TO: 0, BACK: 0}
        self.gates = {TO: asyncio.Event(), BACK: asyncio.Event()}
        self.connections = set()

    def change(self, stalled=None, delays=None, is_cut=None, is_reset=False):
        self.delays.update(delays or {})
        if is_cut is not None:
            self.is_cut = is_cut
        if stalled is not None:
            for direction, gate in self.gates.items():
                gate.clear() if direction in stalled else gate.set()
        if is_reset:
            for task in list(self.connections):
                task.cancel()

    async def serve(self, reader, writer):
        """Copies the bytes of one connection, in both directions, until both have ended."""
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
                for direction, source, target in (TO, reader, target_writer), (BACK, target_reader, writer):
                    held = asyncio.Queue(HELD_CHUNKS)
                    group.create_task(hold(source, held))
                    group.create_task(self.deliver(direction, held, target))
            for each in writers:
                each.close()
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            self.connections.discard(task)
            for each in writers:
                abort(each)

    async def deliver(self, direction, held, target):
        """Writes what one direction of a connection holds, each chunk at its time."""
        while True:
            came_at, data = await held.get()
            delay = came_at + self.delays[direction] - asyncio.get_running_loop().time()
            if delay > 0:
                await asyncio.sleep(delay)
            await self.gates[direction].wait()
            if not data:
                if target.can_write_eof():
                    target.write_eof()
                return
            target.write(data)
            await target.drain()


async def hold(source, held):
    """Reads one direction of a connection until its end, and notes when each chunk came."""
    data = b"x"
    while data:
        try:
            data = await source.read(1 << 16)
        except OSError:
            # The other side learns of a reset as of an end, and not before the gate is open.
            data = b""
        await held.put((asyncio.get_running_loop().time(), data))


def abort(writer):
    """Closes a connection with a reset, if it is still open."""
    if not writer.is_closing():
        kernel_socket = writer.get_extra_info("socket")
        kernel_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def main():
    """The helper process: makes links and changes them, one command a line."""
    links = {}
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command, reply = json.loads(line), {}
        name = command.pop("link")
        if "target" in command:
            links[name] = Link(command["target"])
            links[name].change(stalled=[])
            server = await asyncio.start_server(links[name].serve, command["host"], 0)
            reply = {"port": server.sockets[0].getsockname()[1]}
        else:
            links[name].change(**command)
        print(json.dumps(reply), flush=True)
    # The kernel closes all connections.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())

"""Boots machines whose only program is the server, and talks to it from outside.

Usage: boots.py KERNEL INITRAMFS MEMORY_MIB ACCELERATOR. What is proved: that it serves, with the address that the
kernel's command line says; that it says OUT_OF_MEMORY where the machine ends; that the power button
switches the machine off and Ctrl-Alt-Del starts it anew, both after the server has stopped in good
order; that jobs on a disk are there again; that what is wrong is told, and nothing panics.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

# Only something that never comes takes so long.
PATIENCE_SECS = 60

KERNEL, INITRAMFS, MEMORY_MIB, ACCELERATOR = sys.argv[1:]
ADDRESS = "ip=10.0.2.15::10.0.2.2:255.255.255.0:jobs:eth0:off"


class Machine:
    """A machine, from power on to power off. Its console output is in `log`."""

    def __init__(self, directory, words, flags, disk=None):
        qmp = os.path.join(directory, "qmp")
        command = [
            "qemu-system-x86_64", "-M", "q35", "-accel", ACCELERATOR, "-cpu", "max",
            "-m", MEMORY_MIB, "-nodefaults", "-no-user-config", "-display", "none",
            "-kernel", KERNEL, "-initrd", INITRAMFS, "-serial", "stdio",
            "-qmp", f"unix:{qmp},server=on,wait=off",
            # The host chooses a free port.
            "-netdev", "user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:0-:11300",
            "-device", "virtio-net-pci,netdev=net,romfile=",
            "-append", f"console=ttyS0 quiet {' '.join(words)} -- {' '.join(flags)}",
        ]  # fmt: skip
        if disk:
            command += ["-drive", f"file={disk},format=raw,if=virtio"]
        self.deadline = time.monotonic() + PATIENCE_SECS
        self.started = time.monotonic()
        self.log = ""
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.qmp = self.until("there is a monitor", lambda: self.try_qmp(qmp))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.process.kill()
        self.process.wait()
        if kind:
            sys.stderr.write(self.log)

    def until(self, what, attempt):
        """Tries again and again, and reads the console meanwhile."""
        while True:
            result = attempt()
            if result:
                return result
            assert time.monotonic() < self.deadline, f"it never came to be that {what}"
            self.read(0.05)

    def read(self, seconds):
        """Whether the console is still open."""
        console = self.process.stdout
        if not select.select([console], [], [], seconds)[0]:
            return True
        text = os.read(console.fileno(), 65536)
        self.log += text.decode(errors="replace").replace("\r", "")
        return bool(text)

    def wait_for_log(self, text, count=1):
        self.until(f"the log has {text!r}", lambda: self.log.count(text) >= count)

    def wait_for_end(self):
        """Waits until the machine has switched itself off."""
        while self.read(0.05):
            assert time.monotonic() < self.deadline, "the machine is not switched off"
        assert self.process.wait(PATIENCE_SECS) == 0
        assert "reboot: Power down" in self.log, "the kernel was not asked"
        assert "Kernel panic" not in self.log

    # ---- The monitor ----

    def try_qmp(self, path):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            return None
        connection.settimeout(PATIENCE_SECS)
        connection.sendall(b'{"execute":"qmp_capabilities"}\n')
        qmp = connection.makefile("rw")
        self.wait_for_return(qmp)
        return qmp

    def monitor(self, command):
        """What the monitor answers to a line that a human would type."""
        arguments = {"command-line": command}
        request = {"execute": "human-monitor-command", "arguments": arguments}
        print(json.dumps(request), file=self.qmp, flush=True)
        return self.wait_for_return(self.qmp)

    @staticmethod
    def wait_for_return(qmp):
        for line in qmp:
            answer = json.loads(line)
            if "return" in answer:
                return answer["return"]
        raise AssertionError("the monitor is gone")

    # ---- The server ----

    def connect(self):
        """A client, once the server answers; before it listens the port already accepts, and then
        keeps the client waiting for longer than it has to."""
        self.wait_for_log("listening on")
        forward = re.search(r"HOST_FORWARD\S*\s+\S+\s+127\.0\.0\.1\s+(\d+)", self.monitor("info usernet"))
        port = int(forward[1])

        def attempt():
            client = Client(port)
            try:
                client.stream.settimeout(0.25)
                if client.ask(b"use default") == b"USING default":
                    client.stream.settimeout(PATIENCE_SECS)
                    return client
            except OSError:
                pass
            client.stream.close()
            return None

        return self.until("the server answers", attempt)


class Client:
    """A connection to the server."""

    def __init__(self, port):
        self.stream = socket.create_connection(("127.0.0.1", port), PATIENCE_SECS)
        self.file = self.stream.makefile("rb")

    def ask(self, line, body=None):
        data = b"" if body is None else body + b"\r\n"
        self.stream.sendall(line + b"\r\n" + data)
        return self.line()

    def put(self, body):
        return self.ask(b"put 0 0 60 %d" % len(body), body)

    def line(self):
        line = self.file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the line is not complete")
        return line[:-2]

    def body(self, length):
        data = self.file.read(length + 2)
        assert data[-2:] == b"\r\n", data[-20:]
        return data[:-2]


def serves(directory):
    """Jobs come and go, memory has an end, and the power button switches the machine off."""
    # Half of what the kernel leaves, as memory that was promised is kept.
    words = ["modules=/modules", ADDRESS, "sysctl.vm.overcommit_memory=2"]
    with Machine(directory, words, ["-V"]) as machine:
        client = machine.connect()
        took = time.monotonic() - machine.started
        body = bytes(range(256)) * 234 + b"the end"
        assert client.put(body) == b"INSERTED 1"
        assert client.ask(b"reserve") == b"RESERVED 1 %d" % len(body)
        assert client.body(len(body)) == body
        assert client.ask(b"delete 1") == b"DELETED"
        ok, length = client.ask(b"stats").split()
        stats = client.body(int(length)).decode()
        assert ok == b"OK" and "\npid: 1\n" in stats and '\nhostname: "jobs"\n' in stats, stats
        held = fill(client)
        machine.monitor("system_powerdown")
        machine.wait_for_end()
    assert "stopped: Terminate" in machine.log
    own, free = re.search(r"up to (\d+) KiB of memory, (\d+) KiB are free", machine.log).groups()
    print(f"serves: {took:.2f} s from power on to the first reply ({ACCELERATOR})")
    print(f"serves: {held} jobs of 60,000 bytes until OUT_OF_MEMORY in a machine of {MEMORY_MIB} MiB")
    print(f"serves: then the server had {own} KiB, {free} KiB were free; off by the power button")


def fill(client):
    """Puts jobs until memory is full, then frees it. Returns the number of jobs."""
    body = b"x" * 60_000
    ids = []
    while (reply := client.put(body)).startswith(b"INSERTED "):
        ids.append(reply.split()[1])
    assert reply == b"OUT_OF_MEMORY", reply
    for job in ids[:10]:
        assert client.ask(b"delete " + job) == b"DELETED"
    reply = client.put(body)
    assert reply.startswith(b"INSERTED "), reply
    return len(ids)


def remembers(directory):
    """Jobs on a disk outlive Ctrl-Alt-Del and the power button, and the disk is left clean."""
    disk = os.path.join(directory, "disk")
    with open(disk, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", disk], check=True)
    words = ["modules=/modules", ADDRESS, "mount=/dev/vda:/var/lib/beanstalkd:ext4"]
    flags = ["-V", "-b", "/var/lib/beanstalkd"]
    with Machine(directory, words, flags, disk) as machine:
        assert machine.connect().put(b"first") == b"INSERTED 1"
        machine.monitor("sendkey ctrl-alt-delete")
        machine.wait_for_log("stopped: Interrupt")
        machine.wait_for_log("recovered 1 jobs")
        assert machine.connect().put(b"second") == b"INSERTED 2"
        machine.monitor("system_powerdown")
        machine.wait_for_end()
    subprocess.run(["e2fsck", "-n", disk], check=True, capture_output=True)
    with Machine(directory, words, flags, disk) as machine:
        client = machine.connect()
        for job, body in [(b"1", b"first"), (b"2", b"second")]:
            assert client.ask(b"reserve") == b"RESERVED %s %d" % (job, len(body))
            assert client.body(len(body)) == body
        machine.monitor("system_powerdown")
        machine.wait_for_end()
    print("remembers: 2 jobs outlived Ctrl-Alt-Del and the power button, the disk is clean")


def complains(directory):
    """An option that cannot be obeyed is logged, and the machine powers off."""
    modules = "modules=/modules"
    for words, flags, told in [
        ([modules], ["--nosuch"], "unknown flag: --nosuch"),
        ([modules, "ip=dhcp"], [], "ip=dhcp: DHCP and BOOTP are not supported"),
        # "Network is unreachable" with glibc, "Network unreachable" with musl.
        ([modules, "ip=10.0.2.15::192.0.2.1"], [], "ip=10.0.2.15::192.0.2.1: Network "),
        ([modules, "mount=/dev/vda:/jobs:ext2fs"], [], "mount=/dev/vda:/jobs:ext2fs: No such device"),
        ([modules], ["-u", "65534"], "-u 65534: the first process of a machine stays root"),
        (["modules=/nosuch"], [], "modules=/nosuch: No such file or directory"),
    ]:
        with Machine(directory, words, flags, INITRAMFS) as machine:
            machine.wait_for_end()
        assert f"beanstalkd: {told}" in machine.log, machine.log
        line = machine.log[machine.log.index("beanstalkd: ") :].splitlines()[0]
        print(f"complains: {line}")


# A signal that ends this script ends the machine too.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
for boot in serves, remembers, complains:
    with tempfile.TemporaryDirectory() as directory:
        boot(directory)

"""Boots machines whose only program is the server, and talks to it from outside.

Usage: boots.py KERNEL INITRAMFS MEMORY_MIB ACCELERATOR. The server must have the address of the kernel's
command line, and reply OUT_OF_MEMORY when the machine has no more. The power button must switch the machine
off, and Ctrl-Alt-Del restart it, both after the server has stopped in good order. Jobs on a disk must be
there again. A wrong option must be logged, and nothing may panic.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../harness"))
from beanstalk import Connection
from server import Program, wait_until

# Emulation on a busy machine needs a minute for what takes it seconds on an idle one.
PATIENCE_S = 240

KERNEL, INITRAMFS, MEMORY_MIB, ACCELERATOR = sys.argv[1:]
ADDRESS = "ip=10.0.2.15::10.0.2.2:255.255.255.0:jobs:eth0:off"


class Machine(Program):
    """A machine, from power on to power off. Its console output is its log."""

    def __init__(self, directory, words, flags, disk=None):
        monitor = os.path.join(directory, "monitor")
        command = [
            "qemu-system-x86_64", "-M", "q35", "-accel", ACCELERATOR, "-cpu", "max",
            "-m", MEMORY_MIB, "-nodefaults", "-no-user-config", "-display", "none",
            "-kernel", KERNEL, "-initrd", INITRAMFS, "-serial", "stdio",
            "-monitor", f"unix:{monitor},server=on,wait=off",
            # The host chooses a free port.
            "-netdev", "user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:0-:11300",
            "-device", "virtio-net-pci,netdev=net,romfile=",
            # On a busy machine the kernel takes an emulated timer that is late for a broken one, and panics.
            "-append", f"console=ttyS0 quiet no_timer_check {' '.join(words)} -- {' '.join(flags)}",
        ]  # fmt: skip
        if disk:
            command += ["-drive", f"file={disk},format=raw,if=virtio"]
        self.started = time.monotonic()
        # The console is standard output.
        super().__init__("sh", "-c", 'exec "$@" >&2', "sh", *command, patterns=[])
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.settimeout(PATIENCE_S)
        wait_until("there is a monitor", lambda: not self.stream.connect_ex(monitor), PATIENCE_S)
        self.answer()

    def __exit__(self, kind=None, *_):
        super().__exit__()
        self.stream.close()
        if kind:
            sys.stderr.write(self.text())

    def text(self):
        return "".join(self.log)

    def wait_for_log(self, text):
        wait_until(f"the log has {text!r}", lambda: text in self.text(), PATIENCE_S)

    def wait_for_end(self):
        """Waits until the machine has switched itself off. Returns its log."""
        assert self.process.wait(PATIENCE_S) == 0
        self.reader.join()
        assert "reboot: Power down" in self.text(), "the kernel was not asked"
        assert "Kernel panic" not in self.text()
        return self.text()

    def monitor(self, command):
        """What the monitor answers to a line that a human would type."""
        self.stream.sendall(command.encode() + b"\n")
        return self.answer()

    def answer(self):
        """Reads to the next prompt."""
        text = b""
        while not text.endswith(b"\n(qemu) ") and text != b"(qemu) ":
            part = self.stream.recv(65536)
            assert part, "the monitor is gone"
            text += part
        return text.decode()

    def connect(self):
        """A client, once the server answers; before it listens the port already accepts, and then
        keeps the client waiting for longer than it has to."""
        self.wait_for_log("listening on")
        forward = re.search(r"HOST_FORWARD\S*\s+\S+\s+127\.0\.0\.1\s+(\d+)", self.monitor("info usernet"))
        port = int(forward[1])

        def attempt():
            try:
                client = Connection(("127.0.0.1", port), 0.25)
                client.must("USING", "use default")
            except OSError:
                return None
            client.socket.settimeout(PATIENCE_S)
            return client

        return wait_until("the server answers", attempt, PATIENCE_S)


def serves(directory):
    """Jobs come and go, memory has an end, and the power button switches the machine off."""
    # Half of what the kernel leaves, as memory that was promised is kept.
    words = ["modules=/modules", ADDRESS, "sysctl.vm.overcommit_memory=2"]
    with Machine(directory, words, ["-V"]) as machine:
        client = machine.connect()
        took = time.monotonic() - machine.started
        body = bytes(range(256)) * 234 + b"the end"
        assert client.put(body) == 1
        assert client.peek("reserve") == (1, body)
        client.must("DELETED", "delete 1")
        stats = client.facts("stats")
        assert (stats["pid"], stats["hostname"]) == ("1", "jobs"), stats
        held = fill(client)
        machine.monitor("system_powerdown")
        log = machine.wait_for_end()
    assert "stopped: Terminate" in log
    print(f"serves: {took:.2f} s from power on to the first reply ({ACCELERATOR})")
    print(f"serves: {held} jobs of 60,000 bytes until OUT_OF_MEMORY in a machine of {MEMORY_MIB} MiB")
    print("serves: off by the power button")


def fill(client):
    """Puts jobs until memory is full, then frees it. Returns the number of jobs."""
    body = b"x" * 60_000
    command = f"put 0 0 60 {len(body)}"
    ids = []
    while (words := client.ask(command, body))[0] == "INSERTED":
        ids.append(words[1])
    assert words == ["OUT_OF_MEMORY"], words
    for job in ids[:10]:
        client.must("DELETED", f"delete {job}")
    client.must("INSERTED", command, body)
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
        assert machine.connect().put(b"first") == 1
        machine.monitor("sendkey ctrl-alt-delete")
        machine.wait_for_log("stopped: Interrupt")
        machine.wait_for_log("recovered 1 jobs")
        assert machine.connect().put(b"second") == 2
        machine.monitor("system_powerdown")
        machine.wait_for_end()
    subprocess.run(["e2fsck", "-n", disk], check=True, capture_output=True)
    with Machine(directory, words, flags, disk) as machine:
        client = machine.connect()
        for job in (1, b"first"), (2, b"second"):
            assert client.peek("reserve") == job
        machine.monitor("system_powerdown")
        machine.wait_for_end()
    print("remembers: 2 jobs outlived Ctrl-Alt-Del and the power button, the disk is clean")


def complains(directory):
    """An option that cannot be obeyed is logged, and the machine powers off."""
    modules = "modules=/modules"
    for words, flags, message in [
        ([modules], ["--nosuch"], "unknown flag: --nosuch"),
        ([modules, "ip=dhcp"], [], "ip=dhcp: dhcp: not an IPv4 address"),
        # "Network is unreachable" with glibc, "Network unreachable" with musl.
        ([modules, "ip=10.0.2.15::192.0.2.1"], [], "ip=10.0.2.15::192.0.2.1: Network "),
        ([modules, "mount=/dev/vda:/jobs:ext2fs"], [], "mount=/dev/vda:/jobs:ext2fs: No such device"),
        ([modules], ["-u", "65534"], "-u 65534: the first process of a machine stays root"),
        (["modules=/nosuch"], [], "modules=/nosuch: No such file or directory"),
    ]:
        with Machine(directory, words, flags, INITRAMFS) as machine:
            log = machine.wait_for_end()
        assert f"beanstalkd: {message}" in log, log
        print("refused:", re.search(f"beanstalkd: {re.escape(message)}.*", log)[0])


for boot in serves, remembers, complains:
    with tempfile.TemporaryDirectory() as directory:
        boot(directory)

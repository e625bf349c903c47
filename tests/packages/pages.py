"""Runs every block of shell in README.md and the pages of dist, as a reader would type it.

    pages.py DIRECTORY [WITH...]     where the programs are, and the reasons below that do not hold here

A fence is `sh`, or `console` with `$ ` before commands and their output below. In the output `...` stands for
anything. Below `$ nc`, lines after `> ` are typed into it. Blocks of a section share one shell, and at its end
no process that they started may be left. A block that cannot run here has the reason above it, of root,
network, machine and minutes, and the target of the Makefile that tests the same:

    <!-- elsewhere: root, minutes; check-install -->

It runs if all of its reasons are given as WITH, in the project itself and not next to it. Code of shell in another form is an error. The script must
have a network and processes of its own, see pages.sh.
"""

import os
import re
import select
import subprocess
import sys
import tempfile
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../harness"))
from server import wait_until

PAGES = ["README.md", "dist/README.md", "dist/cluster/README.md"]
REASONS = {"root", "network", "machine", "minutes"}
# Of a command, and of a server that a reader would find started when the next line is typed.
PATIENCE_S = 900 if len(sys.argv) > 2 else 30
# Blocks of another form than shell, which other tests run or parse.
OTHER_FENCES = {"python", "php", "ini", "text"}
# These run in scripts of their own: the variables are set there.
OWN_SCRIPTS = {"To this server:": "check-moving", "And back:": "check-moving",
               "### A cluster on one machine": "check-manifests"}


class Block:
    def __init__(self, place, kind, lines, mark):
        self.place, self.kind, self.lines, self.mark = place, kind, lines, mark


def sections(path):
    """The blocks of each section, with what is above them."""
    found, lines = [], open(path, encoding="utf-8").read().splitlines()
    title, above, index = "", "", 0
    while index < len(lines):
        line = lines[index]
        if line.startswith("## "):
            title = line[3:]
            found.append((f"{path}: {title}", []))
        fence = re.fullmatch(r"( *)```(\w*)", line)
        if fence:
            end = next(at for at in range(index + 1, len(lines)) if lines[at].strip() == "```")
            body = [text[len(fence[1]):] for text in lines[index + 1:end]]
            assert fence[2] in {"sh", "console"} | OTHER_FENCES, f"{path}:{index + 1}: a fence of {fence[2]}"
            if fence[2] not in OTHER_FENCES:
                found[-1][1].append(Block(f"{path}:{index + 1}", fence[2], body, above))
            index = end
        assert fence or not line.startswith("    "), f"{path}:{index + 1}: code without a fence: {line}"
        above = line.strip() if line.strip() else above
        index += 1
    return [(title, blocks) for title, blocks in found if blocks]


def reasons(block, makefile):
    """Why a block cannot run everywhere; none if it can."""
    if block.mark in OWN_SCRIPTS:
        return {"own script"}
    mark = re.fullmatch(r"<!-- elsewhere: ([a-z, ]+); ([a-z-]+) -->", block.mark)
    if not mark:
        assert not block.mark.startswith("<!--"), f"{block.place}: not a mark: {block.mark}"
        return set()
    named = set(mark[1].split(", "))
    assert named <= REASONS, f"{block.place}: {named - REASONS} is no reason"
    is_target = mark[2] == "untested" or re.search(rf"^{mark[2]}:", makefile, re.M)
    assert is_target, f"{block.place}: the Makefile has no {mark[2]}"
    return named


class Shell:
    """One bash, which gets commands one by one and whose output is read as it comes."""

    def __init__(self, directory, paths):
        environment = {"PATH": f"{paths}:{os.environ['PATH']}", "HOME": directory, "LC_ALL": "C"}
        for name, usual in ("CARGO_HOME", "~/.cargo"), ("RUSTUP_HOME", "~/.rustup"):
            environment[name] = os.environ.get(name, os.path.expanduser(usual))
        self.process = subprocess.Popen(["bash"], cwd=directory, env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        # There is no sudo where the user is root.
        self.run('shopt -s expand_aliases; sudo() { [ "$1" != -u ] || shift 2; "$@"; }')

    def run(self, command):
        """Its output, without the line by which its end is known, and its status."""
        end = f"END-OF-{time.monotonic_ns()}"
        self.process.stdin.write(f"{command}\nprintf '\\n%s %s\\n' {end} $?\n".encode())
        self.process.stdin.flush()
        output, deadline = b"", time.monotonic() + PATIENCE_S
        while not (found := re.fullmatch(rf"(.*)\n{end} (\d+)\n", output.decode(errors="replace"), re.S)):
            is_ready = select.select([self.process.stdout], [], [], deadline - time.monotonic())[0]
            assert is_ready, f"no end of {command!r}, but {output!r}"
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, f"{command!r} ended the shell after {output!r}"
            output += chunk
        text, status = found.groups()
        # What bash prints of processes that were killed is no output of a command.
        text = re.sub(r"(?m)^bash: line \d+: +\d+ (Killed|Terminated) .*\n", "", text.replace("\r\n", "\n"))
        return text, int(status)

    def started(self):
        return self.run("jobs -pr")[0].split()


def is_as_shown(shown, output):
    """Returns true if the output has these lines; `...` stands for anything, and a line of it for any lines."""
    pattern = "".join(re.escape(line).replace(r"\.\.\.", ".*") + "\n" for line in shown)
    return re.fullmatch(pattern, output if output.endswith("\n") or not output else output + "\n", re.S)


def wait_for_servers(command):
    """Waits until the servers that a command starts in the background listen on its ports."""
    ports = re.findall(r"-p (\d+)|--metrics 127\.0\.0\.1:(\d+)", command)
    ports = [int(port) for pair in ports for port in pair if port]
    sockets = re.findall(r"-l unix:(\S+)", command)
    wait_until(f"what was started listens: {command}",
               lambda: all(map(listens, ports)) and all(map(os.path.exists, sockets)), PATIENCE_S)


def listens(port):
    """By the kernel's table, so that no connection of this script is counted."""
    tables = "".join(open(f"/proc/net/{name}", encoding="ascii").read() for name in ("tcp", "tcp6"))
    return re.search(rf"[0-9A-F]:{port:04X} [0-9A-F]+:0000 0A ", tables) is not None


def converse(command, lines, directory):
    """What a program prints into which the lines after `> ` are typed, and the other lines, which it must print."""
    typed = "".join(f"{line[2:]}\n" for line in lines if line.startswith("> "))
    # nc ends with both directions of its connection.
    done = subprocess.run(command, shell=True, cwd=directory, input=typed.encode(), stdout=subprocess.PIPE,
                          timeout=PATIENCE_S, check=False)
    shown = [line for line in lines if not line.startswith("> ")]
    return shown, done.stdout.decode(errors="replace").replace("\r\n", "\n"), done.returncode


def commands(block):
    """Each command with the lines below it."""
    found = []
    for line in block.lines:
        is_command = block.kind == "sh" or line.startswith("$ ")
        text = line.removeprefix("$ ") if block.kind == "console" else line
        if found and found[-1][0].endswith("\\"):
            found[-1][0] += f"\n{text}"
        elif is_command:
            found.append([text, []])
        else:
            found[-1][1].append(line)
    return found


def run(block, shell, directory):
    for command, shown in commands(block):
        if command.startswith("nc -C "):
            shown, output, status = converse(command, shown, directory)
        else:
            output, status = shell.run(command)
        assert status == 0 or shown, f"{block.place}: {command}: status {status}: {output}"
        is_right = block.kind == "sh" or is_as_shown(shown, output)
        assert is_right, f"{block.place}: {command}\nprints {output!r}\ninstead of {shown}"
        if command.endswith("&"):
            wait_for_servers(command)


def main():
    programs, *have = sys.argv[1:]
    makefile = open("Makefile", encoding="utf-8").read()
    count, elsewhere = 0, []
    for title, blocks in [section for page in PAGES for section in sections(page)]:
        with tempfile.TemporaryDirectory() as directory:
            for name in os.listdir("."):
                os.symlink(os.path.realpath(name), f"{directory}/{name}")
            shell = Shell(directory, os.path.realpath(programs))
            for block in blocks:
                needed = reasons(block, makefile)
                if not needed <= set(have):
                    elsewhere.append(block.place)
                    continue
                if needed:
                    shell.run(f"cd '{os.getcwd()}'")
                run(block, shell, directory)
                if needed:
                    shell.run("cd")
                count += 1
            wait_until(f"{title}: no process is left", lambda: not shell.started(), 10)
    assert count >= 8, f"only {count} blocks were run"
    print(f"{count} blocks of shell print what the pages have; in other tests: {', '.join(elsewhere) or 'none'}")


main()

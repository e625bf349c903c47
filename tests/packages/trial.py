"""Does what dist/README.md promises of a cluster on one machine, which trial.sh has started, and asks
a real Prometheus every expression of the dashboard and the alerts for clusters.

    trial.py SERVER"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

from prometheus import CLUSTER_RULES, Client, check_names, check_rules, expressions, fail, get
from prometheus import prometheus, wait_for

URL = "etcd://127.0.0.1:12379/jobs"
PROXY = "127.0.0.1:11300"
# The port of each server, and its address for metrics.
SERVERS = {11311: "127.0.0.1:11321", 11312: "127.0.0.1:11322"}


def main():
    server = sys.argv[1]
    with tempfile.TemporaryDirectory() as directory:
        active = wait_for("a server is active and the other one stands by", find_active)
        wait_for("HAProxy has found it", lambda: ask("list-tubes"))
        number = ask("put 5 0 60 5\r\nhello")[1]
        threading.Thread(target=keep_busy, daemon=True).start()
        with prometheus(directory, list(SERVERS.values()), rules=CLUSTER_RULES,
                        etcd=["127.0.0.1:12379"]) as scraper:
            check_metrics(scraper.api)
            seconds = fail_over(active, number)
            standby = next(port for port in SERVERS if port != active)
            scraper.api.expect("sum(beanstalkd_leading)", 1)
            scraper.api.expect(f'beanstalkd_leading{{instance="{SERVERS[standby]}"}}', 1)
        check_binlog(server)
    print(f"the trial of dist/README.md: the other server had the job {seconds:.1f} s after the kill")


def status(address, path):
    """The status of a response, or none without a server."""
    try:
        return int(get(address, path).split(" ")[1])
    except (OSError, IndexError):
        return None


def find_active():
    """The port of the active server, once the other one stands by."""
    ready = {port: status(address, "/readyz") for port, address in SERVERS.items()}
    if sorted(ready.values(), key=str) != [200, 503]:
        return None
    if any(status(address, "/healthz") != 200 for address in SERVERS.values()):
        fail("a server is not healthy")
    return next(port for port, code in ready.items() if code == 200)


def ask(command):
    """The reply to a command through HAProxy, on a connection of its own; none without a server."""
    try:
        client = Client(PROXY)
        words = client.say(command.replace("\r\n", "\n") + "\n")
        client.close()
        return words
    except OSError:
        return None


def keep_busy():
    """Puts and deletes, so that there is always something to measure."""
    while True:
        words = ask("put 9 0 60 1\nx")
        if words and words[0] == "INSERTED":
            ask(f"delete {words[1]}")
        time.sleep(0.05)


def check_metrics(api):
    """Each expression comes to something, and no alert is about a cluster in good order."""
    api.expect("sum(up)", 3)
    api.expect("sum(beanstalkd_leading)", 1)
    for title, expression in expressions(is_of_cluster=True):
        wait_for(f"{title}: {expression} comes to something", lambda: api.query(expression))
        check_names(api, title, expression)
    alerts = check_rules(api)
    # One is pending for a moment when rules are evaluated before both servers have been scraped.
    wrong = 'ALERTS{alertname=~"Beanstalkd(No|Two|Many).*|EtcdNoLeader"}'
    wait_for("no alert is about a cluster in good order", lambda: not api.query(wrong))
    print(f"{len(expressions(True))} expressions of the dashboard and {alerts} alerts for clusters name "
          "what there is")


def fail_over(active, number):
    """Kills the active server, as `kill -9 %2` does. Returns the seconds until the job is there."""
    os.kill(process_with(f"-p {active}"), signal.SIGKILL)
    begun_at = time.monotonic()
    wait_for("the other server has the job", lambda: ask(f"peek {number}") == ["FOUND", number, "5"])
    return time.monotonic() - begun_at


def process_with(words):
    """The id of the process with these words in its command line; only those of the trial are seen."""
    for number in filter(str.isdigit, os.listdir("/proc")):
        with open(f"/proc/{number}/cmdline", encoding="utf-8") as file:
            line = file.read().replace("\0", " ")
        if "/beanstalkd " in line and f" {words} " in line:
            return int(number)
    return fail(f"no process has {words}")


def check_binlog(server):
    """The binlog can be read next to the active server, and the copy of it is a whole one."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([server, "-b", URL, "--check"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([server, "-b", URL, "--export", directory], check=True)
        for place in URL, directory:
            dump = subprocess.run([server, "-b", place, "--dump"], check=True, text=True,
                stdout=subprocess.PIPE).stdout
            if '"body":"hello"' not in dump:
                fail(f"--dump of {place} has no job")
    print("--check, --dump and --export work next to the active server")


main()

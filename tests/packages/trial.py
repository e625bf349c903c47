"""Does what dist/README.md promises of a cluster on one machine, which trial.sh has started, and asks
a real Prometheus every expression of the dashboard and the alerts for clusters."""

import os
import signal
import subprocess
import tempfile
import threading
import time

from prometheus import CLUSTER_RULES, PATIENCE_S, Prometheus, get, wait_until
from beanstalk import Closed, Connection

# The port of each server, and its address for metrics.
SERVERS = {11311: "127.0.0.1:11321", 11312: "127.0.0.1:11322"}


def main():
    with tempfile.TemporaryDirectory() as directory:
        active = wait_for("a server is active and the other one stands by", find_active)
        wait_for("HAProxy has found it", lambda: ask("list-tubes"))
        number = ask("put 5 0 60 5", b"hello")[1]
        threading.Thread(target=keep_busy, daemon=True).start()
        with Prometheus(directory, list(SERVERS.values()), rules=CLUSTER_RULES,
                        etcd=["127.0.0.1:12379"]) as scraper:
            check_metrics(scraper)
            seconds = fail_over(active, number)
            standby = next(port for port in SERVERS if port != active)
            scraper.expect("sum(beanstalkd_leading)", 1)
            scraper.expect(f'beanstalkd_leading{{instance="{SERVERS[standby]}"}}', 1)
    print(f"the trial of dist/README.md: the other server had the job {seconds:.1f} s after the kill")


def wait_for(what, holds):
    return wait_until(what, holds, PATIENCE_S)


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
    assert all(status(address, "/healthz") == 200 for address in SERVERS.values()), "a server is not healthy"
    return next(port for port, code in ready.items() if code == 200)


def ask(line, body=None):
    """The reply to a command through HAProxy, on a connection of its own; none without a server."""
    try:
        with Connection("127.0.0.1:11300", PATIENCE_S) as client:
            return client.ask(line, body)
    except Closed:
        return None


def keep_busy():
    """Puts and deletes, so that there is always something to measure."""
    while True:
        words = ask("put 9 0 60 1", b"x")
        if words and words[0] == "INSERTED":
            ask(f"delete {words[1]}")
        time.sleep(0.05)


def check_metrics(scraper):
    """Each expression comes to something, and no alert is about a cluster in good order."""
    scraper.expect("sum(up)", 3)
    scraper.expect("sum(beanstalkd_leading)", 1)
    scraper.check_all(is_of_cluster=True)
    # One is pending for a moment when rules are evaluated before both servers have been scraped.
    wrong = 'ALERTS{alertname=~"Beanstalkd(No|Two|Many).*|EtcdNoLeader"}'
    wait_for("no alert is about a cluster in good order", lambda: not scraper.query(wrong))


def fail_over(active, number):
    """Kills the active server, as `kill -9 %2` does. Returns the seconds until the job is there."""
    # Only processes of the trial are seen.
    found = subprocess.run(["pgrep", "-f", f"/beanstalkd .* -p {active} "], check=True, text=True,
                           stdout=subprocess.PIPE).stdout
    os.kill(int(found), signal.SIGKILL)
    begun_at = time.monotonic()
    wait_for("the other server has the job", lambda: ask(f"peek {number}") == ["FOUND", number, "5"])
    return time.monotonic() - begun_at


main()

"""Checks the cluster on one machine that trial.sh has started as dist/README.md says, and asks a real Prometheus every
expression of the dashboard and the alerts for clusters. tests/cluster has what happens when servers end."""

import contextlib
import tempfile
import threading
import time

from prometheus import CLUSTER_RULES, PATIENCE_S, Prometheus, wait_until
from beanstalk import Closed, Connection

# The addresses of the servers for metrics.
SERVERS = ["127.0.0.1:11321", "127.0.0.1:11322"]


def main():
    wait_until("HAProxy has found the active server", serves, PATIENCE_S)
    threading.Thread(target=keep_busy, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory, \
            Prometheus(directory, SERVERS, rules=CLUSTER_RULES, etcd=["127.0.0.1:12379"]) as scraper:
        scraper.expect("sum(up)", 3)
        scraper.expect("sum(beanstalkd_leading)", 1)
        scraper.check_all(is_of_cluster=True)
        # One is pending for a moment when rules are evaluated before both servers have been scraped.
        wrong = 'ALERTS{alertname=~"Beanstalkd(No|Two|Many).*|EtcdNoLeader"}'
        wait_until("no alert is about a cluster in good order", lambda: not scraper.query(wrong), PATIENCE_S)


def serves():
    """Whether a job is put and deleted through HAProxy."""
    with contextlib.suppress(Closed), Connection("127.0.0.1:11300", PATIENCE_S) as client:
        return client.must("DELETED", f"delete {client.put(b'x')}")


def keep_busy():
    """So that there is always something to measure."""
    while True:
        serves()
        time.sleep(0.05)


main()

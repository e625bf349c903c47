"""Has a real Prometheus scrape the given server, with the longest page, during a load, and asks it every expression
of the dashboard and the alerts. tests/metrics.rs has responses, --metrics-tubes, drain mode, and slow clients.

    metrics.py SERVER"""

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from prometheus import DASHBOARD, PATIENCE_S, Prometheus, substituted
from beanstalk import Closed, Connection
from server import Server

TUBES = 2000
# default, mail, print, odd$name, rare and busy are there too.
ALL_TUBES = TUBES + 6
FLAGS = ["-f", "50", "--max-memory", str(1 << 28), "--metrics-tubes", "5000", "--body-cache", "0"]


def main():
    with tempfile.TemporaryDirectory() as binlog, tempfile.TemporaryDirectory() as data, \
            Server(sys.argv[1], "-b", binlog, *FLAGS) as server:
        clients = [*load(server), make_tubes(server)]
        check_page(server)
        with Prometheus(data, [server.metrics]) as scraper:
            scraper.expect("sum(up)", 1)
            scraper.expect("count(beanstalkd_tube_watching)", ALL_TUBES)
            # The name of this tube needs quotes of Prometheus.
            scraper.expect('beanstalkd_tube_jobs{tube="odd$name",state="ready"}', 1)
            scraper.check_all(is_of_cluster=False)
            check_variables(scraper)
        for client in clients:
            client.close()


def load(server):
    """Makes jobs in every state, a paused tube and a waiting worker. Returns their connections."""
    producer, worker, waiter = (server.connect() for _ in range(3))
    for tube, pri, delay, count in [("mail", 5, 0, 5), ("mail", 5, 3600, 1), ("print", 5000, 0, 1),
                                    ("odd$name", 0, 0, 1)]:
        for _ in range(count):
            producer.put(b"hello", tube, pri, delay, 60)
    producer.must("PAUSED", "pause-tube print 3600")
    worker.must("WATCHING", "watch mail")
    worker.must("BURIED", f"bury {worker.must('RESERVED', 'reserve')[1]} 0")
    worker.must("RESERVED", "reserve")
    waiter.must("WATCHING", "watch rare")
    waiter.must("WATCHING", "ignore default")
    waiter.send("reserve")
    # A client that works all the time, so that no rate is zero.
    threading.Thread(target=keep_busy, args=(server.address,), daemon=True).start()
    return producer, worker, waiter


def keep_busy(address):
    """Puts, takes, buries, kicks and deletes, some fifty times a second, until the server drains."""
    with contextlib.suppress(Closed), Connection(address) as client:
        client.ask("watch busy")
        client.ask("use busy")
        # While the server drains, it refuses puts.
        while (words := client.ask("put 0 0 60 5", b"hello"))[0] == "INSERTED":
            client.ask("reserve")
            client.ask(f"bury {words[1]} 0")
            client.ask("kick 1")
            client.ask("reserve")
            client.ask(f"delete {words[1]}")
            time.sleep(0.02)


def make_tubes(server):
    """Connects a client that watches two thousand tubes, a hundred at a time."""
    client = server.connect()
    for start in range(0, TUBES, 100):
        client.send(*(f"watch tube-{number}" for number in range(start, start + 100)))
        for _ in range(100):
            client.reply()
    return client


def check_page(server):
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=PATIENCE_S) as response:
        page = response.read().decode()
    found = subprocess.run(["promtool", "check", "metrics"], input=page, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert (found.returncode, found.stdout) == (0, ""), f"promtool check metrics: {found.stdout}"
    samples = sum(not line.startswith("#") for line in page.splitlines())
    print(f"promtool finds nothing wrong with a page of {samples} samples, {len(page)} bytes")


def check_variables(scraper):
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            labels = re.fullmatch(r"label_values\((.+), (\w+)\)", substituted(variable["query"]["query"]))
            values = labels and scraper.ask(f"label/{labels[2]}/values", **{"match[]": labels[1]})
            assert values, f"the variable {variable['name']} has no values"


main()

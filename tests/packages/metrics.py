"""Has a real Prometheus scrape the given server during a load, asks it every expression of the dashboard
and the alerts. tests/metrics.rs has responses, drain mode, and slow and silent HTTP clients.

    metrics.py SERVER"""

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time

from prometheus import DASHBOARD, PATIENCE_S, Prometheus, expressions, get, substituted, wait_until
from beanstalk import Closed, Connection
from server import Server

TUBES = 10_000
# default, mail, print, odd$name, rare and busy are there too.
ALL_TUBES = TUBES + 6
# The default of --metrics-tubes.
LIMIT = 1000
FLAGS = ["-f", "50", "--max-memory", str(1 << 28)]


def main():
    with contextlib.ExitStack() as stack:
        few, many, data = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(3))
        usual = stack.enter_context(Server(sys.argv[1], "-b", few, *FLAGS))
        telling_all = stack.enter_context(
            Server(sys.argv[1], "-b", many, *FLAGS, "--metrics-tubes", "20000", "--body-cache", "0"))
        clients = [client for server in (usual, telling_all) for client in load(server)]
        check_page(usual)
        with Prometheus(data, [usual.metrics, telling_all.metrics]) as scraper:
            check_scrapes(scraper, usual, clients[0])
            tubes = [make_tubes(server) for server in (usual, telling_all)]
            check_page(usual)
            check_page(telling_all)
            check_many_tubes(scraper, usual, telling_all)
            check_expressions(scraper)
            for client in tubes:
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
    """Connects a client that watches ten thousand tubes, a hundred at a time."""
    client = server.connect()
    for start in range(0, TUBES, 100):
        client.send(*(f"watch tube-{number}" for number in range(start, start + 100)))
        for _ in range(100):
            client.reply()
    return client


def check_page(server):
    head, page = get(server.metrics, "/metrics", version="1.0").split("\r\n\r\n", 1)
    assert head.startswith("HTTP/1.1 200 "), head
    found = subprocess.run(["promtool", "check", "metrics"], input=page, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert (found.returncode, found.stdout) == (0, ""), f"promtool check metrics: {found.stdout}"
    samples = sum(not line.startswith("#") for line in page.splitlines())
    print(f"promtool finds nothing wrong with a page of {samples} samples, {len(page)} bytes")


def check_scrapes(scraper, server, client):
    """The name of this tube needs quotes of Prometheus."""
    scraper.expect("sum(up)", 2)
    client.put(b"hello", "odd$name")
    scraper.expect(f'beanstalkd_tube_jobs{{instance="{server.metrics}",tube="odd$name",state="ready"}}', 2)
    print("Prometheus scrapes two servers: up is 1, and a tube has the jobs that it should have")


def check_many_tubes(scraper, usual, telling_all):
    """Pages with more tubes than the limit, and with all tubes, in chunks."""
    for server, told in (usual, LIMIT), (telling_all, ALL_TUBES):
        instance = f'instance="{server.metrics}"'
        scraper.expect(f"count(beanstalkd_tube_watching{{{instance}}})", told + (told < ALL_TUBES))
        # A scrape on a busy machine may have no result, and then the next one has.
        longest = f"max_over_time(scrape_duration_seconds{{{instance}}}[1m])"
        [seconds] = wait_until(f"{longest} has a value", lambda: scraper.query(longest), PATIENCE_S)
        print(f"{ALL_TUBES} tubes, {told} on the page by name: up, scraped in {seconds * 1e3:.0f} ms")
    scraper.expect("sum(up)", 2)


def check_expressions(scraper):
    """Each is parsed, names only metrics that there are, and comes to something. trial.py does the
    same with those of a cluster."""
    found = expressions(is_of_cluster=False)
    for title, expression in found:
        scraper.check_names(title, expression)
        assert scraper.query(expression), f"{title}: {expression} comes to nothing"
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            labels = re.fullmatch(r"label_values\((.+), (\w+)\)", substituted(variable["query"]["query"]))
            values = labels and scraper.ask(f"label/{labels[2]}/values", **{"match[]": labels[1]})
            assert values, f"the variable {variable['name']} has no values"
    alerts = scraper.check_rules()
    print(f"{len(found)} expressions of the dashboard and {alerts} alerts name what there is, and come "
          "to something")


main()

"""Tries what the given server tells over HTTP with promtool, a real Prometheus, and visitors who do
not behave; and every expression of the dashboard and the alerts with what Prometheus has of it."""

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from prometheus import (Client, DASHBOARD, check_names, check_rules, expressions, fail, get,
    is_closed, prometheus, server, substituted, wait_for)

TUBES = 10_000
# The default of --metrics-tubes.
LIMIT = 1000


def main():
    with tempfile.TemporaryDirectory() as directory:
        few, many, data = (f"{directory}/{name}" for name in ("few", "many", "data"))
        for path in few, many, data:
            subprocess.run(["mkdir", path], check=True)
        with server(sys.argv[1], few) as usual, \
             server(sys.argv[1], many, "--metrics-tubes", "20000", "--body-cache", "0") as telling_all:
            clients = [load(usual), load(telling_all)]
            check_page(usual)
            check_http(usual)
            with prometheus(data, [usual.metrics, telling_all.metrics]) as scraper:
                check_scrapes(scraper.api, usual, clients[0])
                tubes = [make_tubes(process) for process in (usual, telling_all)]
                check_page(usual)
                check_page(telling_all)
                check_many_tubes(scraper.api, usual, telling_all)
                check_expressions(scraper.api)
                check_draining(scraper.api, usual)
                for client in tubes:
                    client.close()
            check_slow_visitors(usual)


def load(process):
    """Makes jobs in every state, a paused tube and a waiting worker. Returns their connections."""
    producer, worker, waiter = (Client(process.address) for _ in range(3))
    for command in ["use mail\n"] + 5 * ["put 5 0 60 5\nhello\n"] + [
            "put 5 3600 60 5\nhello\n", "use print\n", "put 5000 0 60 5\nhello\n",
            "pause-tube print 3600\n", "use odd$name\n",
            "put 0 0 60 5\nhello\n"]:
        producer.say(command)
    if worker.say("watch mail\nreserve\nbury 1 0\nreserve\n", 4)[0] != "RESERVED":
        fail("the worker gets no job")
    waiter.say("watch rare\nignore default\n", 2)
    waiter.send("reserve\n")
    # A client that works all the time, so that no rate is zero.
    keeper = threading.Thread(target=keep_busy, args=(process.address,), daemon=True)
    keeper.start()
    return producer, worker, waiter


def keep_busy(address):
    """Puts, takes and deletes, some fifty times a second, until the server is gone."""
    client = Client(address)
    try:
        client.say("use busy\nwatch busy\n", 2)
        while True:
            job = client.say("put 0 0 60 5\nhello\n")[1]
            client.say(f"reserve\ndelete {job}\n", 2)
            time.sleep(0.02)
    except (OSError, IndexError):
        client.close()


def make_tubes(process):
    """Connects a client that watches ten thousand tubes, a hundred at a time."""
    client = Client(process.address)
    for start in range(0, TUBES, 100):
        lines = [f"watch tube-{number}\n" for number in range(start, start + 100)]
        client.say("".join(lines), 100)
    return client


def check_page(process):
    """Checks that promtool reports neither errors nor warnings of style."""
    head, page = get(process.metrics, "/metrics", version="1.0").split("\r\n\r\n", 1)
    if not head.startswith("HTTP/1.1 200 "):
        fail(head)
    found = subprocess.run(["promtool", "check", "metrics"], input=page, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if found.returncode != 0 or found.stdout:
        fail(f"promtool check metrics: {found.stdout}")
    samples = sum(not line.startswith("#") for line in page.splitlines())
    print(f"promtool finds nothing wrong with a page of {samples} samples, {len(page)} bytes")


def check_http(process):
    """Checks the responses to other paths and methods, and to half a request."""
    def status(path, **how):
        head, body = get(process.metrics, path, **how).split("\r\n\r\n", 1)
        return int(head.split(" ")[1]), head, body

    for path in "/", "/metrics", "/healthz", "/readyz":
        if status(path)[0] != 200 or status(path, method="HEAD")[::2] != (200, ""):
            fail(f"{path} is not answered, or HEAD has a body")
        code, head, _ = status(path, method="POST", head="Content-Length: 0\r\n")
        if code != 405 or "\r\nAllow: GET, HEAD\r\n" not in head:
            fail(f"POST of {path}: {head}")
    if status("/none")[0] != 404:
        fail("there is something at /none")
    host, port = process.metrics.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"GET /metrics HTT")
        start = time.monotonic()
        if is_closed(half, 1) or not is_closed(half, 15):
            fail("half a request is not dropped, or too soon")
        print(f"half a request is dropped after {time.monotonic() - start:.1f} s")
    print("GET and HEAD are answered, POST gets 405")


def check_scrapes(api, process, clients):
    """Checks that Prometheus has the numbers of `stats`."""
    api.expect("sum(up)", 2)
    instance = f'instance="{process.metrics}"'
    for state, count in [("reserved", 1), ("delayed", 1), ("buried", 1)]:
        selector = f'{instance},tube="mail",state="{state}"'
        api.expect(f"beanstalkd_tube_jobs{{{selector}}}", count)
    api.expect(f'beanstalkd_tube_jobs{{{instance},tube="mail",state="ready"}}', 3)
    api.expect(f'beanstalkd_tube_waiting{{{instance},tube="rare"}}', 1)
    api.expect(f'beanstalkd_tube_pause_seconds{{{instance},tube="print"}}', 3600)
    clients[0].say("use odd$name\nput 9 0 60 5\nhello\n", 2)
    api.expect(f'beanstalkd_tube_jobs{{{instance},tube="odd$name",state="ready"}}', 2)
    print("Prometheus scrapes two servers: up is 1, and beanstalkd_jobs what it should be")


def check_many_tubes(api, usual, telling_all):
    """Checks pages with more tubes than the limit, and with all tubes, in chunks."""
    # default, mail, print, odd$name, rare and busy are there too.
    for process, told in (usual, LIMIT), (telling_all, TUBES + 6):
        instance = f'instance="{process.metrics}"'
        others = TUBES + 6 - told
        api.expect(f"beanstalkd_tubes{{{instance}}}", TUBES + 6)
        api.expect(f"beanstalkd_tubes_told_together{{{instance}}}", others)
        api.expect(f"count(beanstalkd_tube_watching{{{instance}}})", told + (others > 0))
        # Each connection but the waiting one watches default; mail, rare and busy are watched too.
        watching = f"sum(beanstalkd_tube_watching{{{instance}}})"
        wait_for(f"{watching} is at least {TUBES + 6}",
                 lambda: (api.value(watching) or 0) >= TUBES + 6)
        # A scrape on a busy machine may have no result, and then the next one has.
        longest = f"max_over_time(scrape_duration_seconds{{{instance}}}[1m])"
        wait_for(f"{longest} has a value", lambda: api.value(longest) is not None)
        seconds = api.value(longest) or 0
        print(f"{TUBES + 6} tubes, {told} on the page by name: up, scraped in {seconds * 1e3:.0f} ms")
    api.expect("sum(up)", 2)


def check_expressions(api):
    """Each is parsed, names only metrics that there are, and comes to something. trial.py does the
    same with those of a cluster."""
    with open(DASHBOARD, encoding="utf-8") as file:
        dashboard = json.load(file)
    found = expressions(is_of_cluster=False)
    for title, expression in found:
        check_names(api, title, expression)
        if not api.query(expression):
            fail(f"{title}: {expression} comes to nothing")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            check_variable(api, variable)
    alerts = check_rules(api)
    print(f"{len(found)} expressions of the dashboard and {alerts} alerts name what there is, and come "
          "to something")


def check_variable(api, variable):
    """The values of a label that a variable asks for are there."""
    query = substituted(variable["query"]["query"])
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    if not found or not api.ask(f"label/{found[2]}/values", **{"match[]": found[1]}):
        fail(f"the variable {variable['name']} has no values")


def check_draining(api, process):
    """Readiness goes, health and metrics stay; and everything comes back."""
    instance = f'instance="{process.metrics}"'
    for number, code, draining in (signal.SIGUSR1, 503, 1), (signal.SIGUSR2, 200, 0):
        process.child.send_signal(number)
        wait_for(f"/readyz says {code}",
            lambda: get(process.metrics, "/readyz").startswith(f"HTTP/1.1 {code} "))
        if not get(process.metrics, "/healthz").startswith("HTTP/1.1 200 "):
            fail("who drains is not healthy")
        api.expect(f"beanstalkd_draining{{{instance}}}", draining)
    print("in drain mode /readyz returns 503, /healthz 200, and Prometheus reports it")


def check_slow_visitors(process):
    """Forty who say nothing or take the answer byte by byte, and come again when they are turned
    out, cannot keep a scraper out for the 10 seconds that Prometheus waits."""
    is_over = threading.Event()
    turned_out = []

    def be_slow(asks):
        host, port = process.metrics.rsplit(":", 1)
        while not is_over.is_set():
            with socket.socket() as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                stream.settimeout(PAUSE_S)
                try:
                    stream.connect((host, int(port)))
                    if asks:
                        stream.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                    while not is_over.is_set():
                        try:
                            if stream.recv(1) == b"":
                                break
                        except TimeoutError:
                            continue
                        is_over.wait(PAUSE_S)
                except OSError:
                    pass
                turned_out.append(asks)

    visitors = [threading.Thread(target=be_slow, args=(number % 2 == 0,), daemon=True)
        for number in range(40)]
    for visitor in visitors:
        visitor.start()
    times = []
    for _ in range(4):
        start = time.monotonic()
        if not get(process.metrics, "/metrics").startswith("HTTP/1.1 200 "):
            fail("a scrape next to slow connections is not answered")
        times.append(time.monotonic() - start)
    is_over.set()
    for visitor in visitors:
        visitor.join()
    if max(times) >= 10:
        fail(f"slow visitors keep a scraper out for {max(times):.1f} s")
    print(f"next to 40 slow connections, {len(turned_out)} of them evicted, scrapes took "
          + ", ".join(f"{seconds:.1f}" for seconds in times) + " s")


# How often a slow visitor does something.
PAUSE_S = 0.5

main()

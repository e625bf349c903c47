"""A real Prometheus that scrapes servers, what it is asked, and the expressions of the dashboard: what
metrics.py, trial.py and dist/pictures share. All is on loopback, on ports that the kernel chose."""

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(os.path.join(ROOT, "tests/harness"))
from server import Program, wait_until

RULES = os.path.join(ROOT, "dist/prometheus/beanstalkd.rules.yml")
CLUSTER_RULES = os.path.join(ROOT, "dist/prometheus/cluster.rules.yml")
# Metrics that only a server with its binlog in etcd has.
CLUSTER_METRIC = re.compile(r"\bbeanstalkd_(leading|lease|etcd)_?")
# Only something that never comes takes so long.
PATIENCE_S = 20

with open(os.path.join(ROOT, "dist/grafana/beanstalkd.json"), encoding="utf-8") as file:
    DASHBOARD = json.load(file)


class Prometheus(Program):
    """A Prometheus with these rules, which scrapes the targets as a job called beanstalkd, and members of
    etcd as a job called etcd."""

    def __init__(self, directory, targets, interval="2s", rules=RULES, etcd=()):
        config = os.path.join(directory, "prometheus.yml")
        jobs = {"beanstalkd": targets, "etcd": list(etcd)}
        with open(config, "w", encoding="ascii") as file:
            json.dump({
                "global": {"scrape_interval": interval, "scrape_timeout": interval,
                           "evaluation_interval": interval},
                "rule_files": [rules],
                "scrape_configs": [{"job_name": job, "static_configs": [{"targets": targets}]}
                                   for job, targets in jobs.items()],
            }, file)
        super().__init__(
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory}/data",
            "--web.listen-address=127.0.0.1:0", "--storage.tsdb.retention.time=1d",
            patterns=[r'msg="Listening on" address=(\S+)', r"(Server is ready)"])

    def ask(self, path, **parameters):
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            url = f"http://{self.found[0]}/api/v1/{path}?{query}"
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None

    def query(self, expression):
        return [float(series["value"][1]) for series in self.ask("query", query=expression)["result"]]

    def value(self, expression):
        found = self.query(expression)
        return found[0] if len(found) == 1 else None

    def expect(self, expression, value):
        wait_until(f"{expression} is {value}", lambda: self.value(expression) == value, PATIENCE_S)

    def check_names(self, what, expression):
        """Each metric that is named must be there."""
        for name in set(re.findall(r"\b(?:beanstalkd|process|etcd)_[a-z_]+\b|\bup\b", expression)):
            assert self.query(f"count({name})"), f"{what} names {name}, which there is not"

    def check_all(self, is_of_cluster):
        """Each expression of the dashboard must name only metrics that there are, and come to something. Each
        alert must name such metrics, and be evaluated."""
        found = expressions(is_of_cluster)
        for title, expression in found:
            wait_until(f"{title}: {expression} comes to something", lambda: self.query(expression), PATIENCE_S)
            self.check_names(title, expression)

        def rules():
            return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

        wait_until("each alert is evaluated", lambda: all(rule["health"] == "ok" for rule in rules()), PATIENCE_S)
        for rule in rules():
            self.check_names(rule["name"], rule["query"])
        print(f"{len(found)} expressions of the dashboard and {len(rules())} alerts name what there is")


def panels():
    """All panels that show something, of rows that are folded too."""
    for panel in DASHBOARD["panels"]:
        yield from panel.get("panels", [])
        if panel["type"] != "row":
            yield panel


def expressions(is_of_cluster):
    """The titles and expressions of the dashboard that are for a cluster, or those that are not."""
    found = [(panel["title"], substituted(target["expr"]))
             for panel in panels() for target in panel["targets"]]
    return [each for each in found if bool(CLUSTER_METRIC.search(each[1])) == is_of_cluster]


def substituted(expression, interval="15s", span="5m"):
    """An expression of the dashboard with its variables as they are with all chosen."""
    for name, value in {"$__rate_interval": interval, "$__interval": interval, "$__range": span,
                        "$job": ".+", "$instance": ".+", "$tube": ".+"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, f"{expression} has an unknown variable"
    return expression

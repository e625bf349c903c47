"""Generates beanstalkd.json, the dashboard for Grafana, from the table of its panels.

    python3 dashboard.py >beanstalkd.json

An expression names only what is special: `@` is the selection of jobs and instances, and `[~]` the interval
of a rate. Panels have no positions: each takes the highest free place, and there the leftmost.
`make check-metrics` asks a real Prometheus every expression."""

import itertools
import json

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTED = 'job=~"$job", instance=~"$instance"'
GRID_WIDTH = 24
# The panel with this id is gone. Links name panels by their ids, so no other one gets it.
RETIRED_IDS = {47}


def rate(metric, by=""):
    """The sum of the rates of a counter, for each value of a label if one is named."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}[~]))"


def quantiles(histogram, of=(0.5, 0.99, 0.999)):
    """A line for each of the quantiles of a histogram."""
    by_bound = rate(histogram + "_bucket{@}", "le")
    return {f"p{100 * quantile:g}": f"histogram_quantile({quantile}, {by_bound})"
            for quantile in of}


def top_tubes(do, vector, of=None):
    """A line for each of the ten tubes with the highest values, or shares of another vector."""
    share = f" / {do} by (tube) ({of})" if of else ""
    return {"{{tube}}": f"topk(10, {do} by (tube) ({vector}){share})"}


# ---- Kinds of panels ----


def panel(kind, title, description, unit, queries, defaults, options, size, overrides=()):
    """A panel without its id and position. Queries are expressions by their legends."""
    targets = [
        {"refId": letter, "datasource": SOURCE, "editorMode": "code",
         "expr": expression.replace("@", SELECTED).replace("[~]", "[$__rate_interval]"),
         "legendFormat": legend, "format": "time_series", "instant": False, "range": True}
        for letter, (legend, expression) in zip("ABC", queries.items())]
    return {"type": kind, "title": title, "description": description, "datasource": SOURCE,
            "gridPos": dict(zip("wh", size)), "targets": targets, "options": options,
            "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": list(overrides)}}


def thresholds(first, *steps):
    """Colors of values: the first one, and others from a value on."""
    steps = [{"color": color, "value": value} for value, color in ((None, first), *steps)]
    return {"mode": "absolute", "steps": steps}


def stat(title, unit, query, description, *steps, first="green", size=(4, 4), graph=True, **more):
    """One number, with a graph behind it."""
    defaults = {"color": {"mode": "thresholds"}, "thresholds": thresholds(first, *steps), "mappings": []}
    options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
               "orientation": "auto", "textMode": "value", "colorMode": "value",
               "graphMode": "area" if graph else "none", "justifyMode": "auto", "wideLayout": True}
    return panel("stat", title, description, unit, {"": query}, {**defaults, **more}, options, size)


def yes_or_no(title, query, description, color, **more):
    """0 or 1, in words."""
    words = {str(value): {"text": text, "index": value} for value, text in enumerate(("no", "yes"))}
    mappings = [{"type": "value", "options": words}]
    return stat(title, "short", query, description, (1, color), mappings=mappings, graph=False, **more)


def lines(title, unit, queries, description, limit=None, stacked=False, size=(8, 8), overrides=()):
    """Lines over time; at the limit there is a red one."""
    steps = [] if limit is None else [(limit, "red")]
    custom = {"drawStyle": "line", "lineInterpolation": "linear", "lineWidth": 1,
              "fillOpacity": 30 if stacked else 10, "showPoints": "never", "spanNulls": False,
              "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
              "thresholdsStyle": {"mode": "line" if steps else "off"}}
    defaults = {"color": {"mode": "palette-classic"}, "custom": custom,
                "thresholds": thresholds("green", *steps), "min": 0}
    options = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
               "tooltip": {"mode": "multi", "sort": "desc"}}
    return panel("timeseries", title, description, unit, queries, defaults, options, size, overrides)


def heatmap(title, query, description):
    """The buckets of a histogram of seconds over time: the darker, the more."""
    custom = {"scaleDistribution": {"type": "linear"},
              "hideFrom": {"legend": False, "tooltip": False, "viz": False}}
    options = {"calculate": False, "cellGap": 1, "cellValues": {"unit": "ops"},
               "color": {"mode": "scheme", "scheme": "Blues", "fill": "dark-blue",
                         "scale": "exponential", "exponent": 0.5, "steps": 64, "reverse": False},
               "exemplars": {"color": "rgba(255,0,255,0.7)"}, "filterValues": {"le": 1e-09},
               "legend": {"show": True}, "rowsFrame": {"layout": "auto"}, "showValue": "never",
               "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
               "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "s"}}
    made = panel("heatmap", title, description, "s", {"{{le}}": query}, {"custom": custom}, options, (8, 8))
    made["targets"][0]["format"] = "heatmap"
    return made


def once(made):
    """A panel that asks for the current value only."""
    made["targets"][0].update(instant=True, range=False)
    return made


LIMIT_OF_JOBS = {"matcher": {"id": "byName", "options": "limit of jobs"}, "properties": [
    {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
    {"id": "custom.fillOpacity", "value": 0},
    {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}}]}
PRECISION = "The precision is that of the histogram buckets."
MOVING = ("put|put-in-tube|reserve|reserve-with-timeout|reserve-job|reserve-batch|delete|delete-batch|"
          "release|bury|kick|kick-job")

# ---- The table: rows and their panels ----

ROWS = {
    "Overview": [
        stat("Ready", "short", 'sum(beanstalkd_jobs{state="ready", @})', "Jobs that wait for a worker."),
        stat("Oldest ready job", "s", "max(beanstalkd_tube_oldest_ready_job_age_seconds{@})",
             "Time since the oldest ready job of all tubes was put, including its delay.",
             (300, "yellow"), (900, "red")),
        stat("Buried", "short", 'sum(beanstalkd_jobs{state="buried", @})',
             "Jobs that a worker has buried, for an operator to inspect.", (1, "yellow")),
        stat("Timeouts per second", "ops", rate("beanstalkd_job_timeouts_total{@}"),
             "Jobs whose time to run ended before the worker finished them.",
             (0.1, "yellow"), (10, "red")),
        yes_or_no("Draining", "max(beanstalkd_draining{@})",
                  "Yes while puts are refused so that the queue drains.", "yellow"),
        stat("Up", "percentunit", "avg(up{@})", "Share of the servers that answer Prometheus.",
             (1, "green"), first="red", graph=False),
        lines("Jobs by state", "short", {"{{state}}": "sum by (state) (beanstalkd_jobs{@})"},
              "Jobs of all tubes.", stacked=True),
        lines("Commands", "ops",
              {"{{command}}": rate(f'beanstalkd_commands_total{{command=~"{MOVING}", @}}', "command")},
              "Commands per second that move jobs."),
        lines("Connections", "short", {"{{state}}": "sum by (state) (beanstalkd_connections{@})"},
              "Clients by state: waiting for a job, idle between two commands, receiving a command, or "
              "slow to read replies.", stacked=True),
    ],
    "Tubes": [
        lines("Ready jobs", "short",
              top_tubes("sum", 'beanstalkd_tube_jobs{state="ready", @, tube=~"$tube"}'),
              "The ten tubes with the most ready jobs."),
        lines("Oldest ready job", "s",
              top_tubes("max", 'beanstalkd_tube_oldest_ready_job_age_seconds{@, tube=~"$tube"}'),
              "The ten tubes with the oldest ready jobs.", limit=900),
        lines("Waiting workers", "short", top_tubes("sum", 'beanstalkd_tube_waiting{@, tube=~"$tube"}'),
              "Connections that watch a tube and wait for a job. A connection that watches several tubes "
              "counts in each."),
        lines("Puts", "ops",
              top_tubes("sum", 'rate(beanstalkd_tube_jobs_created_total{@, tube=~"$tube"}[~])'),
              "Jobs per second that are put into a tube; the ten tubes with the most."),
        lines("Deletes", "ops",
              top_tubes("sum", 'rate(beanstalkd_tube_deletes_total{@, tube=~"$tube"}[~])'),
              "Jobs per second that are deleted from a tube; the ten tubes with the most."),
        lines("Pause left", "s", top_tubes("max", 'beanstalkd_tube_pause_left_seconds{@, tube=~"$tube"}'),
              "Time left of the current pause of a tube; the ten longest."),
    ],
    "Latency": [
        lines("Event loop iterations", "s", quantiles("beanstalkd_loop_iteration_seconds"),
              f"Duration of an event loop iteration, in which no other client is served. {PRECISION}",
              limit=0.1),
        heatmap("Iterations by duration", rate("beanstalkd_loop_iteration_seconds_bucket{@}", "le"),
                "Number of event loop iterations by duration."),
        lines("Binlog syncs", "s", quantiles("beanstalkd_binlog_sync_seconds"),
              "Duration of binlog syncs; with -f 0 replies wait for them.", limit=0.5),
    ],
    "Binlog": [
        lines("Space", "bytes", {"on the disk": "sum(beanstalkd_binlog_disk_bytes{@})",
                                 "live": "sum(beanstalkd_binlog_live_bytes{@})",
                                 "dead": "sum(beanstalkd_binlog_dead_bytes{@})"},
              "Size of the binlog on disk, and the part of it that live jobs need."),
        lines("Records", "ops", {"written": rate("beanstalkd_binlog_records_written_total{@}"),
                                 "moved": rate("beanstalkd_binlog_records_migrated_total{@}")},
              "Records per second that are written, and that are moved to newer files so that old files "
              "can be removed."),
        lines("Files", "short", {"files": "sum(beanstalkd_binlog_files{@})"}, "Binlog files.", size=(4, 8)),
        yes_or_no("Full", "max(beanstalkd_binlog_full{@})",
                  "Yes while there is no space for another binlog file and puts are refused.", "red",
                  size=(4, 8)),
    ],
    "Process": [
        lines("Processor time", "percentunit", {"{{mode}}": rate("beanstalkd_cpu_seconds_total{@}", "mode")},
              "Share of one core. The event loop uses at most one core, 100%; threads that wait for the "
              "disk or etcd add a little.", stacked=True),
        lines("Memory", "bytes", {"process": "sum(process_resident_memory_bytes{@})",
                                  "jobs": "sum(beanstalkd_job_memory_bytes{@})",
                                  "limit of jobs": "sum(beanstalkd_job_memory_limit_bytes{@})"},
              "Memory of the process, memory of jobs, and the limit for jobs above which puts are refused.",
              overrides=[LIMIT_OF_JOBS]),
        stat("Job memory, share of limit", "percentunit",
             "max(beanstalkd_job_memory_bytes{@} / beanstalkd_job_memory_limit_bytes{@})",
             "Memory of jobs as a share of --max-memory; empty if there is no limit.",
             (0.8, "yellow"), (0.9, "red"), decimals=1),
        stat("Uptime", "s", "min(time() - process_start_time_seconds{@})",
             "Time since the most recent start of one of the servers.", (300, "green"), first="yellow",
             graph=False),
        once(stat("Restarts", "short", "sum(changes(process_start_time_seconds{@}[$__range]))",
                  "Number of restarts in the selected time range.", (1, "yellow"), graph=False)),
        stat("New connections", "ops", rate("beanstalkd_connections_opened_total{@}"),
             "Connections opened per second. A client that connects for each command spends more on the "
             "connection than on the command."),
    ],
    "Cluster (binlog in etcd)": [
        stat("Active servers", "short", "sum(beanstalkd_leading{@})",
             "Servers that serve clients: one for each prefix in etcd.", (1, "green"), first="red"),
        stat("Standby servers", "short", "count(beanstalkd_leading{@}) - sum(beanstalkd_leading{@})",
             "Servers that can take over.", (1, "green"), first="yellow"),
        lines("Active", "short", {"{{instance}}": "beanstalkd_leading{@}"},
              "1 while a server is active, 0 while it stands by."),
        lines("Lease left", "s", {"{{instance}}": "beanstalkd_lease_seconds{@} and on (job, instance) "
                                                  "beanstalkd_leading == 1"},
              "Time until the active server stops, if etcd does not renew its lease."),
        stat("Stall", "s", "max(beanstalkd_etcd_waiting_seconds{@})",
             "Time for which writes have waited and etcd has stored none.", size=(8, 4)),
        lines("Writes to etcd", "s", quantiles("beanstalkd_etcd_transaction_seconds"),
              f"Duration of a write to etcd, for which the replies to clients wait. {PRECISION}",
              limit=0.5),
        lines("Writes per second", "ops",
              {"{{instance}}": rate("beanstalkd_etcd_transaction_seconds_count{@}", "instance")},
              "Writes to etcd. Commands that arrive together share one."),
        lines("Bytes", "bytes", {"written per second": rate("beanstalkd_etcd_written_bytes_total{@}"),
                                 "unacknowledged": "sum(beanstalkd_etcd_unacknowledged_bytes{@})"},
              "Bytes written to etcd per second, and bytes that etcd has not acknowledged."),
    ],
    "Body cache (--body-cache)": [
        lines("Bodies", "bytes", {"in memory": "sum(beanstalkd_body_cache_bytes{@})",
                                  "limit": "sum(beanstalkd_body_cache_limit_bytes{@})",
                                  "cold": "sum(beanstalkd_cold_body_bytes{@})"},
              "Bytes of bodies in memory with their limit, and of bodies that are only in the binlog."),
        lines("Cold jobs by tube", "short", top_tubes("sum", 'beanstalkd_tube_cold_jobs{@, tube=~"$tube"}'),
              "Jobs whose bodies are only in the binlog, by tube; the ten tubes with the most."),
        lines("Reads", "ops", {"bodies": rate("beanstalkd_body_reads_total{@}"),
                               "waiting replies": rate("beanstalkd_body_wait_seconds_count{@}")},
              "Bodies per second that are read back for clients, and replies per second that wait for the "
              "disk."),
        lines("Waits for the disk", "s", quantiles("beanstalkd_body_wait_seconds"),
              "Time that replies waited for the disk, if a body was not in the page cache.", limit=0.5),
        stat("Cold jobs", "short", "sum(beanstalkd_cold_jobs{@})",
             "Jobs whose bodies are only in the binlog.", size=(8, 8)),
        stat("Unreadable", "short", "sum(increase(beanstalkd_body_read_failures_total{@}[$__range]))",
             "Failed attempts to read a body, in the shown time. The log names the job, the file and the "
             "offset.", (0.001, "red"), size=(8, 8), graph=False, decimals=0),
    ],
    "Problems": [
        lines("Buried jobs", "short", top_tubes("sum", 'beanstalkd_tube_jobs{state="buried", @, tube=~"$tube"}'),
              "Jobs that wait for an operator; the ten tubes with the most.", limit=1),
        lines("Ends of reservations", "ops",
              {"{{how}}": rate('beanstalkd_tube_reservations_ended_total{@, tube=~"$tube"}', "how")},
              "Reservations per second that end with a delete, a release, a bury, a timeout, or a lost "
              "connection."),
        lines("Failed share by tube", "percentunit",
              top_tubes("sum", 'rate(beanstalkd_tube_reservations_ended_total{how=~"bury|timeout|disconnect", '
                               '@, tube=~"$tube"}[~])',
                        'rate(beanstalkd_tube_reservations_ended_total{@, tube=~"$tube"}[~])'),
              "Share of the reservations that end with a bury, a timeout or a lost connection.", limit=0.1),
        lines("Wait", "s", quantiles("beanstalkd_tube_job_wait_seconds", (0.5, 0.95)),
              f"Time from the put, and the end of the delay, to the first reservation. {PRECISION}", limit=60),
        lines("Run", "s", quantiles("beanstalkd_tube_job_run_seconds", (0.5, 0.95)),
              f"Time from the reservation to the delete by the worker. {PRECISION}"),
        lines("Kicks", "ops", top_tubes("sum", 'rate(beanstalkd_tube_kicks_total{@, tube=~"$tube"}[~])'),
              "Kicked jobs per second; the ten tubes with the most."),
    ],
}
# Panels of a folded row ask nothing until a reader unfolds it.
FOLDED = {"Cluster (binlog in etcd)", "Body cache (--body-cache)"}

VARIABLES = {
    "job": ("Job", "Jobs of Prometheus that scrape beanstalkd.", "beanstalkd_build_info"),
    "instance": ("Instance", "Servers.", 'beanstalkd_build_info{job=~"$job"}'),
    "tube": ("Tube", "Tubes shown in the row Tubes.", f"beanstalkd_tube_using{{{SELECTED}}}"),
}

# ---- The document ----


def variables():
    """The data source, and the labels of which a reader selects values."""
    usual = {"regex": "", "hide": 0, "skipUrlSync": False, "options": []}
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
           "description": "The Prometheus that scrapes the servers.", "refresh": 1, "includeAll": False,
           "multi": False, **usual}
    for name, (label, description, series) in VARIABLES.items():
        query = {"query": f"label_values({series}, {name})", "refId": f"Variable{name}"}
        yield {"name": name, "label": label, "type": "query", "description": description,
               "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1, "includeAll": True,
               "allValue": ".+", "multi": True, **usual,
               "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}


def placed():
    """Rows and panels with ids and positions. The panels of a folded row are inside of it."""
    ids = (number for number in itertools.count(1) if number not in RETIRED_IDS)
    top = 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": top, "w": GRID_WIDTH, "h": 1}
        row = {"id": next(ids), "type": "row", "title": title, "collapsed": title in FOLDED,
               "gridPos": place, "panels": []}
        taken, top = set(), top + 1
        first = top
        for made in panels:
            place = made["gridPos"]
            place["x"], place["y"] = first_free(taken, first, place["w"], place["h"])
            taken.update(cells(**place))
            top = max(top, place["y"] + place["h"])
            made["id"] = next(ids)
        if row["collapsed"]:
            row["panels"] = panels
            yield row
        else:
            yield from (row, *panels)


def cells(x, y, w, h):
    return itertools.product(range(x, x + w), range(y, y + h))


def first_free(taken, top, w, h):
    return next((x, y) for y in itertools.count(top) for x in range(GRID_WIDTH - w + 1)
                if taken.isdisjoint(cells(x, y, w, h)))


def dashboard():
    return {
        "title": "beanstalkd", "uid": "beanstalkd", "tags": ["beanstalkd"], "version": 1,
        "description": "Jobs, tubes, latencies, binlog and process of the server, from --metrics.",
        "schemaVersion": 38, "editable": True, "graphTooltip": 1, "fiscalYearStartMonth": 0,
        "liveNow": False, "timezone": "browser", "weekStart": "", "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"}, "timepicker": {}, "links": [],
        "annotations": {"list": []},
        "templating": {"list": list(variables())},
        "panels": list(placed()),
    }


def text(value):
    """JSON with one field of the document, one variable or one panel a line."""
    for name in ("templating", "list", "panels"):
        if isinstance(value, dict) and value.get(name):
            fields = (f"{json.dumps(key)}: {text(each)}" for key, each in value.items())
            return "{" + ",\n".join(fields) + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict) and "type" in value[0]:
        return "[\n" + ",\n".join(map(text, value)) + "\n]"
    return json.dumps(value)


if __name__ == "__main__":
    print(text(dashboard()))

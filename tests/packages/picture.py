"""Draws dist/grafana/beanstalkd.svg: the dashboard as it is laid out, with what a real Prometheus has
scraped from a real server in five minutes of made-up load. It is not Grafana that draws.

Use: picture.py SERVER FILE"""

import colorsys
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from html import escape

from prometheus import Client, DASHBOARD, fail, prometheus, server, substituted

# ---- The load ----

LENGTH_S = 300
# How many jobs a second come in, how many workers a tube has, and what a job takes each of them.
TUBES = {"mail": (120, 4, 0.01), "thumbnails": (60, 3, 0.02), "reports": (8, 2, 0.1),
    "billing": (25, 2, 0.02)}
# What happens when, in seconds since the start.
AWAY = range(50, 110)           # The workers of thumbnails are away: a backlog grows.
HELP = range(110, 180)          # Others help them to work it off.
PAUSE_AT, PAUSE_S = 130, 50     # Reports are paused.
BURYING = range(150, 170)       # Billing has jobs that it cannot do.
DRAINING = range(220, 260)      # No puts: everything runs empty.


def second(start):
    """Of the load."""
    return int(time.monotonic() - start)


def produce(address, tube, rate, start):
    """Puts jobs with bodies of 1 kB at a given rate until the end."""
    client, body = Client(address), "x" * 1024
    client.say(f"use {tube}\n")
    done = 0
    while (now := time.monotonic() - start) < LENGTH_S:
        # What was refused is not made up for.
        missing = min(int(now * rate) - done, rate)
        done = int(now * rate)
        for _ in range(missing):
            client.say(f"put {done % 4096} 0 5 {len(body)}\n{body}\n")
        time.sleep(0.05)


def work(address, tube, seconds, start, is_helper):
    """Takes jobs and deletes them, but for when it is away, or cannot."""
    client = Client(address)
    client.say(f"watch {tube}\nignore default\n", 2)
    while (now := second(start)) < LENGTH_S:
        is_away = now not in HELP if is_helper else tube == "thumbnails" and now in AWAY
        if is_away:
            time.sleep(0.2)
            continue
        words = client.say("reserve-with-timeout 1\n")
        if words[0] != "RESERVED":
            continue
        time.sleep(seconds)
        is_bad = tube == "billing" and now in BURYING and int(words[1]) % 10 == 0
        client.say(f"bury {words[1]} 0\n" if is_bad else f"delete {words[1]}\n")


def fall_silent(address, start):
    """Takes a job now and then and lets its time run out."""
    client = Client(address)
    client.say("watch reports\nignore default\n", 2)
    while second(start) < LENGTH_S:
        client.say("reserve-with-timeout 1\n")
        time.sleep(4)
        client.say("reserve-with-timeout 0\n")


def live(process):
    """Five minutes."""
    start, address = time.monotonic(), process.address
    clients = [threading.Thread(target=fall_silent, args=(address, start), daemon=True)]
    for tube, (rate, workers, seconds) in TUBES.items():
        clients.append(threading.Thread(target=produce, args=(address, tube, rate, start),
            daemon=True))
        helpers = 12 if tube == "thumbnails" else 0
        for number in range(workers + helpers):
            clients.append(threading.Thread(target=work, daemon=True,
                args=(address, tube, seconds, start, number >= workers)))
    for client in clients:
        client.start()
    events = [(PAUSE_AT, lambda: Client(address).say(f"pause-tube reports {PAUSE_S}\n")),
        (DRAINING.start, lambda: process.child.send_signal(signal.SIGUSR1)),
        (DRAINING.stop, lambda: process.child.send_signal(signal.SIGUSR2))]
    for at, happen in events:
        time.sleep(max(0.0, at - (time.monotonic() - start)))
        happen()
    for client in clients:
        client.join(LENGTH_S)


# ---- The picture ----

CELL_WIDTH, CELL_HEIGHT, MARGIN = 50, 26, 4
HEAD_HEIGHT = 40
STEP_S = 4
PLOT = {"left": 52, "top": 28, "right": 10, "bottom": 42}
COLOURS = ["#0550ae", "#d1500a", "#1a7f37", "#8250df", "#bf8700", "#cf222e", "#6e7781", "#0e8a8a"]
NAMED = {"green": "#1a7f37", "yellow": "#bf8700", "red": "#cf222e"}


def number(value, unit):
    """As Grafana writes it, or nearly."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        for size, name in (1, "s"), (1e-3, "ms"), (1e-6, "µs"):
            if value >= size:
                break
        if value >= 60:
            return f"{value / 60:.3g} min"
        return f"{value / size:.3g} {name}" if value else "0 s"
    if unit == "bytes":
        power = min(3, int(math.log(max(value, 1), 1024)))
        return f"{value / 1024 ** power:.3g} {['B', 'KiB', 'MiB', 'GiB'][power]}"
    text = f"{value / 1000:.3g} K" if value >= 1000 else f"{value:.3g}"
    return text + ("/s" if unit == "ops" else "")


class Svg:
    """Elements."""

    def __init__(self):
        self.parts = []

    def text(self, x, y, words, size=11, anchor="start", fill="#24292f", weight=None):
        weight = ' font-weight="bold"' if weight else ""
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" '
            f'text-anchor="{anchor}"{weight}>{escape(str(words))}</text>')

    def path(self, data, **attributes):
        attributes = "".join(f' {name.replace("_", "-")}="{value}"'
            for name, value in attributes.items())
        self.parts.append(f'<path d="{data}"{attributes}/>')


def ask(api, target, span, start, end):
    """The series of a query: a legend, and points of time and number."""
    expression = substituted(target["expr"], "12s", f"{span}s")
    series = api.ask("query_range", query=expression, start=start, end=end, step=STEP_S)["result"]
    found = []
    for one in series:
        legend = target["legendFormat"]
        for label, value in one["metric"].items():
            legend = legend.replace("{{" + label + "}}", value)
        values = [(float(at), float(value)) for at, value in one["values"]]
        values = [(at, value) for at, value in values if math.isfinite(value)]
        if values:
            found.append((legend, values))
    return found


class Panel:
    """One panel, and where it is."""

    def __init__(self, panel, series, start, end):
        self.panel, self.series, self.start, self.end = panel, series, start, end
        self.defaults = panel["fieldConfig"]["defaults"]
        self.unit = self.defaults.get("unit", "short")
        place = panel["gridPos"]
        self.x = place["x"] * CELL_WIDTH + MARGIN
        self.y = place["y"] * CELL_HEIGHT + HEAD_HEIGHT + MARGIN
        self.width = place["w"] * CELL_WIDTH - 2 * MARGIN
        self.height = place["h"] * CELL_HEIGHT - 2 * MARGIN
        self.plot = (self.x + PLOT["left"], self.y + PLOT["top"],
            self.x + self.width - PLOT["right"], self.y + self.height - PLOT["bottom"])

    def draw(self, svg):
        """Frame, title, and what is in it."""
        svg.path(f"M{self.x} {self.y}h{self.width}v{self.height}h-{self.width}z",
            fill="#ffffff", stroke="#d0d7de")
        svg.text(self.x + 8, self.y + 17, self.panel["title"], 12, weight="bold")
        {"stat": self.stat, "timeseries": self.lines, "heatmap": self.heatmap}[
            self.panel["type"]](svg)

    def stat(self, svg):
        if not self.series:
            fail(f"{self.panel['title']} shows nothing")
        value = self.series[0][1][-1][1]
        words = number(value, self.unit)
        for mapping in self.defaults["mappings"]:
            words = mapping["options"].get(f"{value:g}", {}).get("text", words)
        steps = self.defaults["thresholds"]["steps"]
        colour = [step["color"] for step in steps if (step["value"] or 0) <= value or
            step["value"] is None][-1]
        svg.text(self.x + self.width / 2, self.y + self.height / 2 + 18, words, 28, "middle",
            NAMED[colour], True)

    def x_of(self, at):
        left, _, right, _ = self.plot
        return left + (at - self.start) / (self.end - self.start) * (right - left)

    def axes(self, svg, highest):
        left, top, right, bottom = self.plot
        for share in 0, 0.5, 1:
            y = bottom - share * (bottom - top)
            svg.path(f"M{left} {y:.0f}H{right}", stroke="#eaeef2")
            svg.text(left - 5, y + 4, number(share * highest, self.unit), 10, "end", "#57606a")
        self.times(svg)

    def times(self, svg):
        left, _, right, bottom = self.plot
        last = LENGTH_S // 60
        for minute in range(0, last + 1, 1 if right - left > 200 else last):
            svg.text(self.x_of(self.start + 60 * minute), bottom + 14, f"{minute} min", 10,
                "end" if minute == last else "middle", "#57606a")

    def lines(self, svg):
        _, top, _, bottom = self.plot
        is_stacked = self.defaults["custom"]["stacking"]["mode"] == "normal"
        series, floor = [], {}
        for name, values in self.series:
            if is_stacked:
                values = [(at, value + floor.get(at, 0.0)) for at, value in values]
                floor.update(values)
            series.append((name, values))
        highest = max((value for _, values in series for _, value in values), default=1)
        highest = nice(highest, self.unit == "bytes")
        self.axes(svg, highest)
        for rank, (name, values) in reversed(list(enumerate(series))):
            colour = COLOURS[rank % len(COLOURS)]
            places = [(round(self.x_of(at)), round(bottom - value / highest * (bottom - top)))
                for at, value in values]
            data = pieces(places, values)
            if is_stacked:
                svg.path(f"{data}L{places[-1][0]} {bottom}H{places[0][0]}z", fill=lighter(colour))
            svg.path(data, fill="none", stroke=colour, stroke_width=1.3)
        self.legend(svg, [name for name, _ in series])

    def legend(self, svg, names):
        x, y = self.x + 12, self.y + self.height - 9
        for rank, name in enumerate(names):
            width = 20 + 6 * len(name)
            if x + width > self.x + self.width:
                break
            svg.path(f"M{x} {y - 4}h10", stroke=COLOURS[rank % len(COLOURS)], stroke_width=3)
            svg.text(x + 14, y, name, 10)
            x += width

    def heatmap(self, svg):
        """A class of the histogram has what its bound has more than the one below."""
        left, top, right, bottom = self.plot
        bounds = sorted(((float(name), dict(values)) for name, values in self.series
            if name != "+Inf"), key=lambda bound: bound[0])
        below, rows = {}, []
        for bound, values in bounds:
            rows.append((bound, {at: value - below.get(at, 0.0) for at, value in values.items()}))
            below = values
        while rows and not any(value > 1e-9 for value in rows[-1][1].values()):
            rows.pop()
        highest = max(value for _, values in rows for value in values.values())
        height, width = (bottom - top) / len(rows), (right - left) * STEP_S / (self.end - self.start)
        shades = {}
        for rank, (bound, values) in enumerate(rows):
            y = bottom - (rank + 1) * height
            if rank % 2 == 0:
                svg.text(left - 5, y + height / 2 + 4, number(bound, "s"), 9, "end", "#57606a")
            for at, value in values.items():
                shade = math.ceil(6 * math.sqrt(max(value, 0) / highest)) if value > 1e-9 else 0
                if shade:
                    shades.setdefault(shade, []).append(
                        f"M{self.x_of(at) - width:.0f} {y:.0f}h{width:.0f}v{height:.0f}h-{width:.0f}")
        for shade, cells in sorted(shades.items()):
            level = f"{(7 - shade) * 34:02x}"
            svg.path("".join(cells), fill=f"#{level}{level}ff" if shade < 6 else "#0a3069")
        self.times(svg)
        svg.text(self.x + 12, self.y + self.height - 9, "turns per second: the darker, the more", 10)


def pieces(places, values):
    """Draws a line with gaps where there are no samples."""
    data, last = "", None
    for (x, y), (at, _) in zip(places, values):
        data += f"{'M' if last is None or at - last > 1.5 * STEP_S else 'L'}{x} {y}"
        last = at
    return data


def nice(value, is_bytes):
    """The next number that looks well on an axis; for bytes that is a power of two."""
    if value <= 0:
        return 1
    if is_bytes:
        return 2 ** math.ceil(math.log2(value * 0.999))
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * 0.999)


def lighter(colour):
    """For what is below a line."""
    rgb = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    hue, light, saturation = colorsys.rgb_to_hls(*rgb)
    mixed = colorsys.hls_to_rgb(hue, 1 - (1 - light) * 0.35, saturation)
    return "#" + "".join(f"{round(part * 255):02x}" for part in mixed)


def draw(api, start, end):
    """The whole dashboard."""
    with open(DASHBOARD, encoding="utf-8") as file:
        dashboard = json.load(file)
    svg = Svg()
    # What is folded shows nothing.
    shown = [panel for panel in dashboard["panels"] if not panel.get("collapsed")]
    rows = [panel["gridPos"] for panel in shown]
    height = max(row["y"] + row["h"] for row in rows) * CELL_HEIGHT + HEAD_HEIGHT + 10
    svg.text(10, 26, "beanstalkd: five minutes of made-up load, scraped by Prometheus", 17,
        weight="bold")
    for panel in shown:
        if panel["type"] == "row":
            svg.text(10, panel["gridPos"]["y"] * CELL_HEIGHT + HEAD_HEIGHT + 20, panel["title"], 15,
                weight="bold")
            continue
        series = [one for target in panel["targets"]
            for one in ask(api, target, LENGTH_S, start, end)]
        Panel(panel, series, start, end).draw(svg)
    elements = "\n".join(svg.parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 {height}" '
        f'font-family="sans-serif">\n<rect width="1200" height="{height}" fill="#f6f8fa"/>\n'
        f"{elements}\n</svg>\n")


def main():
    program, path = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        jobs, data = f"{directory}/jobs", f"{directory}/data"
        os.mkdir(jobs)
        os.mkdir(data)
        with server(program, jobs, max_memory=1 << 24) as process, \
             prometheus(data, [process.metrics], interval="1s") as scraper:
            scraper.api.expect("up", 1)
            start = time.time()
            live(process)
            picture = draw(scraper.api, start, start + LENGTH_S)
    with open(path, "w", encoding="utf-8") as file:
        file.write(picture)
    print(f"{path}: {len(picture)} bytes")


main()

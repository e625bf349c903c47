"""Draws dist/grafana/beanstalkd.svg: the dashboard in its layout, with what a real Prometheus has scraped from
a real server in five minutes of generated load. Matplotlib draws (Debian's python3-matplotlib), not Grafana.

Use: dashboard.py SERVER FILE [SECONDS]"""

import math
import sys
import tempfile
import time

import matplotlib
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter

from load import LENGTH_S, Load  # also finds the modules of the tests
from prometheus import DASHBOARD, Prometheus, substituted
from server import Server

STEP_S = 4
# One row of the grid, and what a panel needs around its axes, in inches.
WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM = 12, 0.26, 0.52, 0.1, 0.3, 0.42
COLORS = ["#0550ae", "#d1500a", "#1a7f37", "#8250df", "#bf8700", "#cf222e", "#6e7781", "#0e8a8a"]
NAMED = {"green": "#1a7f37", "yellow": "#bf8700", "red": "#cf222e"}
SECONDS, BYTES = EngFormatter("s"), EngFormatter("B")
FORMATS = {"short": "{:.4g}".format, "ops": "{:.4g}/s".format, "percentunit": "{:.0%}".format,
           "s": lambda value: SECONDS.format_eng(float(f"{value:.3g}")) + "s",
           "bytes": lambda value: BYTES.format_eng(value) + "B"}
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "beanstalkd", "font.family": "sans-serif", "font.size": 7,
    "axes.prop_cycle": matplotlib.cycler(color=COLORS), "axes.spines.top": False, "axes.spines.right": False})


def series(scraper, target, start, end):
    """The series of a query: values at all times, or NaN, by their legends."""
    times = range(0, math.ceil(end - start), STEP_S)
    expression = substituted(target["expr"], "12s", f"{int(end - start)}s")
    found = {}
    for one in scraper.ask("query_range", query=expression, start=start, end=end, step=STEP_S)["result"]:
        legend = target["legendFormat"]
        for label, value in one["metric"].items():
            legend = legend.replace("{{" + label + "}}", value)
        values = {round(at - start): float(value) for at, value in one["values"]}
        found[legend] = [values.get(at, math.nan) for at in times]
    return times, found


def draw_stat(axes, panel, _, found):
    """The last value, in the color of its threshold."""
    defaults = panel["fieldConfig"]["defaults"]
    value = next(iter(found.values()))[-1]
    words = FORMATS[defaults["unit"]](value)
    for mapping in defaults["mappings"]:
        words = mapping["options"].get(f"{value:g}", {}).get("text", words)
    color = [step["color"] for step in defaults["thresholds"]["steps"]
             if step["value"] is None or step["value"] <= value][-1]
    axes.text(0.5, 0.3, words, size=20, weight="bold", ha="center", color=NAMED[color])
    axes.axis("off")


def draw_lines(axes, panel, times, found):
    defaults = panel["fieldConfig"]["defaults"]
    if defaults["custom"]["stacking"]["mode"] == "normal":
        values = [[0 if math.isnan(value) else value for value in each] for each in found.values()]
        axes.stackplot(times, values, labels=found, alpha=0.6)
    else:
        for name, values in found.items():
            axes.plot(times, values, linewidth=1, label=name)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: FORMATS[defaults["unit"]](value))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=5, frameon=False, fontsize=6,
                handlelength=1, columnspacing=1)


def draw_heatmap(axes, _, times, found):
    """A bucket of the histogram has what its bound has more than the one below: the darker, the more."""
    bounds = sorted((float(name), values) for name, values in found.items() if name != "+Inf")
    rows = [[max(0, more - less) for more, less in zip(values, below)]
            for (_, values), (_, below) in zip(bounds, [(0, [0] * len(times)), *bounds])]
    axes.pcolormesh(times, range(len(rows)), rows, cmap="Blues", norm="symlog", rasterized=True)
    axes.set_yticks(range(0, len(rows), 3), [FORMATS["s"](bound) for bound, _ in bounds[::3]])


DRAW = {"stat": draw_stat, "timeseries": draw_lines, "heatmap": draw_heatmap}


def draw(scraper, start, end, path):
    """The whole dashboard. What is folded shows nothing."""
    shown = [panel for panel in DASHBOARD["panels"] if not panel.get("collapsed")]
    places = [panel["gridPos"] for panel in shown]
    height = ROW * max(place["y"] + place["h"] for place in places)
    figure = pyplot.figure(figsize=(WIDTH, height))
    for panel, place in zip(shown, places):
        left, top = place["x"] * WIDTH / 24, height - place["y"] * ROW
        is_row = panel["type"] == "row"
        figure.text((left + 0.1) / WIDTH, (top - 0.18) / height, panel["title"], weight="bold",
                    size=11 if is_row else 8)
        if is_row:
            continue
        wide, high = place["w"] * WIDTH / 24 - LEFT - RIGHT, place["h"] * ROW - TOP - BOTTOM
        axes = figure.add_axes((
            (left + LEFT) / WIDTH, (top - TOP - high) / height, wide / WIDTH, high / height))
        found = {}
        for target in panel["targets"]:
            times, more = series(scraper, target, start, end)
            found.update(more)
        assert found, f"{panel['title']} shows nothing"
        DRAW[panel["type"]](axes, panel, times, found)
        axes.set_xticks(range(0, len(times) * STEP_S, 60), minor=False)
        axes.xaxis.set_major_formatter(lambda second, _: f"{second / 60:.0f} min")
    figure.savefig(path, metadata={"Date": None} if path.endswith("svg") else None)


def main():
    program, path, *seconds = sys.argv[1:]
    length_s = int(seconds[0]) if seconds else LENGTH_S
    with tempfile.TemporaryDirectory() as jobs, tempfile.TemporaryDirectory() as data, \
         Server(program, "-b", jobs, "-f", "50", "--max-memory", str(1 << 24)) as server, \
         Prometheus(data, [server.metrics], interval="1s") as scraper:
        scraper.expect("up", 1)
        start = time.time()
        Load(server, length_s)
        time.sleep(length_s)
        draw(scraper, start, start + length_s, path)


main()

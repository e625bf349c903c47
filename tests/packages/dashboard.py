"""Looks whether the parts of the dashboard fit together; with --typescript, prints it as a program
that compiles only if all of it has the types that Grafana publishes."""

import json
import sys

from prometheus import DASHBOARD, fail, panels

GRID_WIDTH = 24
# Where @grafana/schema keeps what each kind of panel understands.
KINDS = {
    "timeseries": ("timeseries", "TimeSeries", True),
    "stat": ("stat", "Stat", False),
    "heatmap": ("heatmap", "Heatmap", True),
}


def check(dashboard):
    """Ids are unique, nothing lies upon something else, and everything is explained."""
    everything = [each for panel in dashboard["panels"] for each in [panel, *panel.get("panels", [])]]
    ids = [panel["id"] for panel in everything]
    if len(ids) != len(set(ids)):
        fail("two panels have the same id")
    taken = {}
    for panel in everything:
        place, title = panel["gridPos"], panel["title"]
        if place["x"] + place["w"] > GRID_WIDTH:
            fail(f"{title} is outside the grid")
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                if (x, y) in taken:
                    fail(f"{title} lies upon {taken[x, y]}")
                taken[x, y] = title
    for panel in panels(dashboard):
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        if not panel.get("description", "").endswith("."):
            fail(f"{title} has no description")
        if "unit" not in defaults:
            fail(f"{title} has no unit")
        sources = [panel["datasource"]] + [target["datasource"] for target in panel["targets"]]
        if any(source != {"type": "prometheus", "uid": "${datasource}"} for source in sources):
            fail(f"{title} does not ask the source that was chosen")
        letters = [target["refId"] for target in panel["targets"]]
        if len(letters) != len(set(letters)) or panel["type"] not in KINDS:
            fail(f"{title} has an unknown type, or two queries have one letter")
    rows = sum(panel["type"] == "row" for panel in everything)
    print(f"the dashboard has {len(everything) - rows} panels in {rows} rows, none upon another")


def typescript(dashboard):
    """The whole, and what the type of the whole leaves open: the options of each panel."""
    print("import type { Dashboard } from '@grafana/schema';")
    raw = "./node_modules/@grafana/schema/dist/esm/raw/composable"
    for kind, (room, name, _) in KINDS.items():
        print(f"import type * as {kind} from '{raw}/{room}/panelcfg/x/{name}PanelCfg_types.gen';")
    # In JSON an enumeration is the text of its member.
    print("type Json<T> = T extends string ? `${T}` : T extends object ? "
          "{ [Key in keyof T]: Json<T[Key]> } : T;")
    print(f"export const dashboard: Json<Dashboard> = {json.dumps(dashboard)};")
    for panel in panels(dashboard):
        kind = panel["type"]
        print(f"export const options{panel['id']}: Json<Partial<{kind}.Options>> = "
              f"{json.dumps(panel['options'])};")
        if KINDS[kind][2]:
            print(f"export const field{panel['id']}: Json<{kind}.FieldConfig> = "
                  f"{json.dumps(panel['fieldConfig']['defaults']['custom'])};")


with open(DASHBOARD, encoding="utf-8") as file:
    document = json.load(file)
if "--typescript" in sys.argv:
    typescript(document)
else:
    check(document)

"""Checks that the parts of the dashboard fit together (tests/tidy.rs, that it is what its table generates);
with --typescript, prints it as a program that compiles only if all of it has the types that Grafana publishes."""

import itertools
import json
import sys

from prometheus import DASHBOARD, panels

GRID_WIDTH = 24
# Where @grafana/schema keeps what each kind of panel understands.
KINDS = {
    "timeseries": ("timeseries", "TimeSeries", True),
    "stat": ("stat", "Stat", False),
    "heatmap": ("heatmap", "Heatmap", True),
}


def check():
    """Ids are unique, nothing lies upon something else, and everything is explained."""
    everything = [each for panel in DASHBOARD["panels"] for each in [panel, *panel.get("panels", [])]]
    assert len({panel["id"] for panel in everything}) == len(everything), "two panels have the same id"
    taken = {}
    for panel in everything:
        place, title = panel["gridPos"], panel["title"]
        assert place["x"] + place["w"] <= GRID_WIDTH, f"{title} is outside the grid"
        for cell in itertools.product(range(place["x"], place["x"] + place["w"]),
                                      range(place["y"], place["y"] + place["h"])):
            assert taken.setdefault(cell, title) == title, f"{title} lies upon {taken[cell]}"
    for panel in panels():
        title = panel["title"]
        assert panel.get("description", "").endswith("."), f"{title} has no description"
        assert panel["fieldConfig"]["defaults"].get("unit"), f"{title} has no unit"
        for each in panel, *panel["targets"]:
            is_chosen = each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert is_chosen, f"{title} does not ask the source that was chosen"
        letters = {target["refId"] for target in panel["targets"]}
        assert len(letters) == len(panel["targets"]), f"{title} has two queries with one letter"
        assert panel["type"] in KINDS, f"{title} has an unknown type"
    print(f"the dashboard has {len(list(panels()))} panels, none upon another")


def typescript():
    """The whole, and what the type of the whole leaves open: the options of each panel."""
    print("import type { Dashboard } from '@grafana/schema';")
    raw = "./node_modules/@grafana/schema/dist/esm/raw/composable"
    for kind, (room, name, _) in KINDS.items():
        print(f"import type * as {kind} from '{raw}/{room}/panelcfg/x/{name}PanelCfg_types.gen';")
    # In JSON an enumeration is the text of its member.
    print("type Json<T> = T extends string ? `${T}` : T extends object ? "
          "{ [Key in keyof T]: Json<T[Key]> } : T;")
    print(f"export const dashboard: Json<Dashboard> = {json.dumps(DASHBOARD)};")
    for panel in panels():
        kind = panel["type"]
        print(f"export const options{panel['id']}: Json<Partial<{kind}.Options>> = "
              f"{json.dumps(panel['options'])};")
        if KINDS[kind][2]:
            print(f"export const field{panel['id']}: Json<{kind}.FieldConfig> = "
                  f"{json.dumps(panel['fieldConfig']['defaults']['custom'])};")


typescript() if "--typescript" in sys.argv else check()

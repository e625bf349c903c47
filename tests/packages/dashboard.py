"""Prints the dashboard as a program in TypeScript, which compiles only if all of it has the types that Grafana
publishes. Its places, ids and letters are right by construction: dist/grafana/dashboard.py makes them."""

import json

from prometheus import DASHBOARD, panels

# Where @grafana/schema keeps what each kind of panel understands.
KINDS = {
    "timeseries": ("timeseries", "TimeSeries", True),
    "stat": ("stat", "Stat", False),
    "heatmap": ("heatmap", "Heatmap", True),
}


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


typescript()

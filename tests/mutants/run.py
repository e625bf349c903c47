"""Tests the tests: plants the bugs of a table in one build, and requires that each is found.

Use: run.py [--search] [NAME...]. `TABLE` names the table in this folder, and `FEATURES` those of the build.
`simulation, SEED=n STEPS=n` in the table is a run of the simulation that finds the bug, and nothing without it.
With `--search` random runs look for one, for FOR_SECONDS, one minute by default, and the table is rewritten.
"""
import concurrent.futures
import json
import math
import os
import re
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "planted"))
import apply

TABLE = os.path.join(HERE, os.environ.get("TABLE", "bugs.txt"))
FEATURES = os.environ.get("FEATURES", "")
TREE = apply.ROOT / "target" / ("planted" + FEATURES)
SECONDS = int(os.environ.get("FOR_SECONDS", "60"))
# The time after which a suite is ended, which says nothing about the bug. A bug may make the simulation
# hang, but it ends without one.
PATIENCE = 240


def build(suites):
    """Builds the test programs of these suites; returns the path of each."""
    targets = [word for suite in sorted(suites) for word in ("--test", suite)]
    command = ["test", "--quiet", "--profile", "simulation", "--no-run", "--message-format=json-render-diagnostics",
               "--features", FEATURES]
    # Switched expressions are in parentheses, where they need them and where they do not.
    environment = {**os.environ, "CARGO_TARGET_DIR": TREE / "target", "RUSTFLAGS": "-A unused_parens"}
    built = subprocess.run([os.environ.get("CARGO", "cargo"), *command, *targets], check=True, text=True, cwd=TREE,
                           stdout=subprocess.PIPE, env=environment)
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    return {message["target"]["name"]: message["executable"] for message in messages
            if message.get("executable") and message["target"]["name"] in suites}


def run(program, bug, *arguments, **settings):
    """Returns the line with the failure of a test program, or `None` if it passes."""
    environment = {**os.environ, "BEANSTALKD_BUG": bug, "NO_SHRINK": "1", **settings}
    try:
        done = subprocess.run([program, *arguments], check=False, text=True, errors="replace", cwd=TREE,
                              env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "it does not end"
    assert "running 0 tests" not in done.stdout, f"{program} has no test {arguments[0]}"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line]
    failed = [line for line in lines if line.startswith("SEED=")]
    panicked = ["".join(lines[at:at + 2]) for at, line in enumerate(lines) if "panicked at" in line]
    return (failed + panicked + lines[-1:] + ["it ends without a message"])[0]


def failure(programs, bug, suite):
    """Returns what the suite finds when this bug is planted, or `None`."""
    names, _, settings = suite.partition(", ")
    suite, *tests = names.split()
    if suite == "simulation" and not tests:
        run_of = dict(word.split("=") for word in settings.split())
        return run_of and simulate(programs, bug, **run_of)
    found = run(programs[suite], bug, *tests)
    return None if bug and found == "it does not end" else found


def simulate(programs, bug, **settings):
    return run(programs["simulation"], bug, "simulate", "--ignored", "--nocapture", **settings)


def search(programs, bug):
    """Returns a run of the simulation that finds this bug, or `None`. Prints failures without a bug."""
    end = time.monotonic() + SECONDS
    while (left := math.ceil(end - time.monotonic())) > 0:
        found = re.match(r"SEED=(\d+) fails at step (\d+)", simulate(programs, bug, FOR_SECONDS=str(left)) or "")
        if found:
            run_of = {"SEED": found[1], "STEPS": str(int(found[2]) + 1)}
            flaw = simulate(programs, "", **run_of)
            if not flaw:
                return "simulation, " + " ".join(f"{key}={value}" for key, value in run_of.items())
            print(f"the simulation finds a failure without a planted bug: {flaw}", flush=True)
    return None


def rewrite(name, suite):
    with open(TABLE, encoding="utf-8") as table:
        text = re.sub(rf"^(## {name}: .*, found by ).*", rf"\g<1>{suite}", table.read(), flags=re.MULTILINE)
    with open(TABLE, "w", encoding="utf-8") as table:
        table.write(text)


def main():
    table = apply.read_table(TABLE)
    apply.write_tree(table, TREE)
    bugs = {bug.name: (bug.suite, bug.what) for bug in table}
    is_search = sys.argv[1:2] == ["--search"]
    names = sys.argv[1 + is_search:] or list(bugs)
    names = [name for name in names if not is_search or bugs[name][0].split(",")[0] == "simulation"]
    suites = {bugs[name][0] for name in names}
    programs = build({re.split("[ ,]", suite)[0] for suite in suites})

    def find(name):
        began = time.monotonic()
        found = search(programs, name) if is_search else failure(programs, name, bugs[name][0])
        return name, found, time.monotonic() - began

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for suite, flaw in zip(suites, pool.map(lambda suite: failure(programs, "", suite), suites)):
            if flaw:
                failed += 1
                print(f"{suite} finds a failure without a planted bug: {flaw}")
        for done in concurrent.futures.as_completed([pool.submit(find, name) for name in names]):
            name, found, seconds = done.result()
            suite, what = bugs[name]
            failed += not found
            if found and is_search:
                rewrite(name, found)
            print(f"{name}: found after {seconds:.1f} s by {suite}: {found[:140]}" if found else
                  f"{name}: NOT FOUND by {suite}: {what}", flush=True)
    print(f"{len(names)} bugs, {failed} failures")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

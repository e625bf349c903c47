"""Tests these tests: plants the bugs of mutants.txt in one build, and requires that each is found.

Use: mutants.py [NAME...]. The case of check.py that the table names must find a bug. Random faults have
FOR_SECONDS for that, five minutes by default.
"""
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
APPLY = os.path.join(HERE, "..", "planted", "apply.py")
TABLE = os.path.join(HERE, "mutants.txt")
TREE = os.path.join(ROOT, "target", "planted-cluster")
# A release build that takes less time.
PROFILE = {"LTO": "off", "CODEGEN_UNITS": "256", "OPT_LEVEL": "1"}
SECONDS = os.environ.get("FOR_SECONDS", "300")


def build():
    """Builds a server with all bugs; returns its path, and for each bug where it is found and what it is."""
    listing = subprocess.run([sys.executable, "-B", APPLY, TABLE, TREE, "--list"], check=True, text=True,
                             stdout=subprocess.PIPE).stdout
    bugs = {name: (suite, what) for name, suite, what in (line.split("\t") for line in listing.splitlines())}
    target = os.path.join(TREE, "target")
    profile = {f"CARGO_PROFILE_RELEASE_{key}": value for key, value in PROFILE.items()}
    command = ["build", "--quiet", "--release", "--features", "etcd", "--bin", "beanstalkd", "--target-dir", target]
    subprocess.run([os.environ.get("CARGO", "cargo"), *command], check=True, cwd=TREE, env={**os.environ, **profile})
    return os.path.join(target, "release", "beanstalkd"), bugs


def failure(program, bug, suite, seconds):
    """Returns the line with the failure that is found when this bug is planted, or `None`."""
    with open(os.path.join(TREE, f"{bug or 'none'}.log"), "w+", encoding="utf-8") as log:
        done = subprocess.run([sys.executable, "-B", os.path.join(HERE, "check.py"), program, suite], stdout=log,
                              stderr=subprocess.STDOUT,
                              env={**os.environ, "BEANSTALKD_BUG": bug, "FOR_SECONDS": seconds})
        log.seek(0)
        lines = [line.strip() for line in log if line.startswith("FAILED")]
    assert bool(lines) == (done.returncode != 0), f"{log.name}: the test itself has failed"
    return lines[0] if lines else None


def main():
    program, bugs = build()
    found = failure(program, "", "random-faults", "60")
    if found:
        sys.exit(f"the random faults find a failure without a planted bug: {found}")
    names, missed = sys.argv[1:] or list(bugs), 0
    for name in names:
        suite, what = bugs[name]
        began = time.monotonic()
        found = failure(program, name, suite, SECONDS)
        missed += not found
        print(f"{name}: found in {time.monotonic() - began:.0f} s: {found[:140]}" if found else
              f"{name}: NOT FOUND by {suite}: {what}", flush=True)
    print(f"{len(names) - missed} of {len(names)} bugs found")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

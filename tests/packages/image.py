"""Checks the documents of an unpacked image, and what skopeo and umoci have made of it next to it.

    image.py DIRECTORY VERSION     prints the architecture"""

import gzip
import hashlib
import json
import pathlib
import sys

DIRECTORY, VERSION = pathlib.Path(sys.argv[1]), sys.argv[2]
LAYOUT = DIRECTORY / "layout"
TITLE = "org.opencontainers.image."
LABELS = {TITLE + "version": VERSION, TITLE + "licenses": "MIT", TITLE + "title": "beanstalkd-server"}


def document(name):
    return json.loads((DIRECTORY / name).read_text(encoding="utf-8"))


def blob(entry):
    """The bytes that an entry names. skopeo checks digests and sizes."""
    return (LAYOUT / "blobs/sha256" / entry["digest"].removeprefix("sha256:")).read_bytes()


def expect(what, found, expected):
    """All that is expected must be there; more may be."""
    for key, value in expected.items():
        assert found[key] == value, f"{what}: {key} is {found[key]}, not {value}"


manifest = json.loads(blob(document("layout/index.json")["manifests"][0]))
config = json.loads(blob(manifest["config"]))
[layer] = manifest["layers"]
layer_id = "sha256:" + hashlib.sha256(gzip.decompress(blob(layer))).hexdigest()
expect("the root", config["rootfs"], {"diff_ids": [layer_id]})
expect("the configuration", config, {"os": "linux"})
expect("the configuration", config["config"], {
    "User": "11300:11300", "ExposedPorts": {"11300/tcp": {}}, "Volumes": {"/var/lib/beanstalkd": {}},
    "Entrypoint": ["/usr/bin/beanstalkd"], "StopSignal": "SIGTERM"})
assert "Cmd" not in config["config"], "it has flags of its own"
expect("the labels", config["config"]["Labels"], LABELS)
expect("the annotations", manifest["annotations"], LABELS)

# What docker before version 25 reads.
[docker] = document("layout/manifest.json")
expect("manifest.json", docker, {"RepoTags": [f"beanstalkd-server:{VERSION}"]})
for name in docker["Config"], *docker["Layers"]:
    assert (LAYOUT / name).is_file(), f"manifest.json names {name}, which is not there"

inspected = document("inspected")
expect("skopeo inspect", inspected, {"Architecture": config["architecture"]})
expect("skopeo inspect", inspected["Labels"], {TITLE + "version": VERSION})
loaded = document("loaded/manifest.json")["config"]
expect("what docker loads", document("copied/manifest.json")["config"], {"digest": loaded["digest"]})
process = document("bundle/config.json")["process"]
expect("the process", process, {"args": ["/usr/bin/beanstalkd"]})
expect("its user", process["user"], {"uid": 11300, "gid": 11300})
print(f"configured as promised, {config['architecture']}")

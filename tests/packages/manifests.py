"""Checks what the schemas of Kubernetes do not: that the parts of a manifest fit together.

    manifests.py FILE DIRECTORY

Selectors must match pods, ports must be those of containers, and what is mounted must exist. Writes into
the directory, for other checks: haproxy.cfg, the configuration of the proxy, and arguments, the
flags of the server."""

import pathlib
import sys

import yaml


def named(documents, *kinds):
    return {each["metadata"]["name"]: each for each in documents if each["kind"] in kinds}


def matches(selector, pod):
    labels = pod["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in selector.items())


def ports_of(pod):
    ports = [port for container in pod["spec"]["containers"] for port in container["ports"]]
    return {port["name"]: port["containerPort"] for port in ports}


def check_service(name, service, pods):
    """A service must choose one kind of pods, and each of its ports must be a port of their containers."""
    chosen = [pod for pod in pods if matches(service["spec"]["selector"], pod)]
    assert len(chosen) == 1, f"the service {name} chooses {len(chosen)} kinds of pods"
    ports = ports_of(chosen[0])
    for port in service["spec"]["ports"]:
        is_there = ports.get(port["targetPort"]) == port["port"]
        assert is_there, f"the service {name} has a port {port['port']}, and its pods have {ports}"


def check_workload(name, workload, services, configs):
    """A workload must choose its own pods; probes and volumes must name what there is."""
    spec, pod = workload["spec"], workload["spec"]["template"]
    assert matches(spec["selector"]["matchLabels"], pod), f"{name} does not choose its own pods"
    is_served = workload["kind"] != "StatefulSet" or spec["serviceName"] in services
    assert is_served, f"there is no service for {name}"
    for spread in pod["spec"]["topologySpreadConstraints"]:
        is_own = matches(spread["labelSelector"]["matchLabels"], pod)
        assert is_own, f"{name} spreads other pods than its own"
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    for volume in volumes.values():
        assert volume["configMap"]["name"] in configs, f"{name} mounts a ConfigMap that does not exist"
    for container in pod["spec"]["containers"]:
        for probe in ("readinessProbe", "livenessProbe"):
            action = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            assert action["port"] in ports_of(pod), f"the {probe} of {name} names no port: {action}"
        for mount in container.get("volumeMounts", []):
            assert mount["name"] in volumes, f"{name} mounts {mount['name']}, which is not a volume"


def main():
    source, directory = map(pathlib.Path, sys.argv[1:])
    documents = list(yaml.safe_load_all(source.read_text(encoding="utf-8")))
    services, configs = named(documents, "Service"), named(documents, "ConfigMap")
    workloads = named(documents, "StatefulSet", "Deployment")
    pods = [workload["spec"]["template"] for workload in workloads.values()]
    for name, service in services.items():
        check_service(name, service, pods)
    for name, workload in workloads.items():
        check_workload(name, workload, services, configs)
    for name, budget in named(documents, "PodDisruptionBudget").items():
        is_used = any(matches(budget["spec"]["selector"]["matchLabels"], pod) for pod in pods)
        assert is_used, f"the budget {name} chooses no pod"
    config = configs["beanstalkd-proxy"]["data"]["haproxy.cfg"]
    server = workloads["beanstalkd"]["spec"]
    for number in range(server["replicas"]):
        address = f"beanstalkd-{number}.{server['serviceName']}.${{NAMESPACE}}.svc."
        assert address in config, f"the proxy has no server {address}"
    directory.mkdir(exist_ok=True)
    (directory / "haproxy.cfg").write_text(config, encoding="utf-8")
    arguments = server["template"]["spec"]["containers"][0]["args"]
    (directory / "arguments").write_text(" ".join(arguments), encoding="utf-8")
    print(f"the manifest has {len(documents)} objects, and they fit together")


main()

"""Checks what the schemas of Kubernetes do not: that the parts of a manifest fit together.

    manifests.py FILE DIRECTORY

Selectors must match pods, ports must be those of containers, and what is mounted must exist. Writes into
the directory, for other checks: haproxy.cfg, the configuration of the proxy, and arguments, the
flags of the server."""

import pathlib
import sys

import yaml


def fail(what):
    """Ends the check."""
    raise SystemExit(f"FAILED: {what}")


def named(documents, kind):
    """The documents of a kind, by name."""
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def matches(selector, pod):
    """Returns whether a selector chooses a pod."""
    labels = pod["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in selector.items())


def check_services(services, pods):
    """Each service must choose pods, and each of its ports must be a port of their containers."""
    for name, service in services.items():
        chosen = [pod for pod in pods if matches(service["spec"]["selector"], pod)]
        if len(chosen) != 1:
            fail(f"the service {name} chooses {len(chosen)} kinds of pods")
        ports = {port["name"]: port["containerPort"] for port in container_ports(chosen[0])}
        for port in service["spec"]["ports"]:
            target = port["targetPort"]
            if ports.get(target) != port["port"]:
                fail(f"the service {name} has a port {port['port']}, and its pods have {ports}")


def container_ports(pod):
    """All ports of a pod."""
    return [port for container in pod["spec"]["containers"] for port in container["ports"]]


def check_pods(workload, services, configs):
    """A workload must choose its own pods; probes and volumes must name what there is."""
    spec, name = workload["spec"], workload["metadata"]["name"]
    pod = spec["template"]
    if not matches(spec["selector"]["matchLabels"], pod):
        fail(f"{name} does not choose its own pods")
    if workload["kind"] == "StatefulSet" and spec["serviceName"] not in services:
        fail(f"there is no service {spec['serviceName']} for {name}")
    for spread in pod["spec"]["topologySpreadConstraints"]:
        if not matches(spread["labelSelector"]["matchLabels"], pod):
            fail(f"{name} spreads other pods than its own")
    ports = {port["name"] for port in container_ports(pod)}
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    for volume in volumes.values():
        if volume["configMap"]["name"] not in configs:
            fail(f"{name} mounts a ConfigMap that does not exist")
    for container in pod["spec"]["containers"]:
        for probe in ("readinessProbe", "livenessProbe"):
            action = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            if action["port"] not in ports:
                fail(f"the {probe} of {name} names the port {action['port']}, not one of {ports}")
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                fail(f"{name} mounts {mount['name']}, which is not a volume")


def main():
    source, directory = map(pathlib.Path, sys.argv[1:])
    documents = list(yaml.safe_load_all(source.read_text(encoding="utf-8")))
    services, configs = named(documents, "Service"), named(documents, "ConfigMap")
    workloads = named(documents, "StatefulSet") | named(documents, "Deployment")
    budgets = named(documents, "PodDisruptionBudget")
    pods = [workload["spec"]["template"] for workload in workloads.values()]
    check_services(services, pods)
    for workload in workloads.values():
        check_pods(workload, services, configs)
    for name, budget in budgets.items():
        if not any(matches(budget["spec"]["selector"]["matchLabels"], pod) for pod in pods):
            fail(f"the budget {name} chooses no pod")
    config = configs["beanstalkd-proxy"]["data"]["haproxy.cfg"]
    server = workloads["beanstalkd"]
    for number in range(server["spec"]["replicas"]):
        address = f"beanstalkd-{number}.{server['spec']['serviceName']}.${{NAMESPACE}}.svc."
        if address not in config:
            fail(f"the proxy has no server {address}")
    directory.mkdir(exist_ok=True)
    (directory / "haproxy.cfg").write_text(config, encoding="utf-8")
    arguments = server["spec"]["template"]["spec"]["containers"][0]["args"]
    (directory / "arguments").write_text(" ".join(arguments), encoding="utf-8")
    print(f"the manifest has {len(documents)} objects, and they fit together")


main()

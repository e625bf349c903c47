#!/bin/sh
# Checks the files in dist/cluster: Kubernetes' own schemas accept the manifest and its parts fit together,
# HAProxy accepts both configurations, systemd accepts the drop-in, and the server knows every flag in
# them. Then it runs the five commands of dist/README.md, see trial.sh.
#
#     manifests.sh SERVER     a server with the feature `etcd'
set -eu
server=$(realpath "$1")
cluster=dist/cluster
# The first version with unhealthyPodEvictionPolicy, and the newest one that the validator knows.
oldest_kubernetes=1.27.0

. tests/packages/common.sh
needs 'the files for clusters are not checked' haproxy systemd-analyze python3

# ---- Kubernetes ----

home=target/kubernetes-validate
install_validator() {
	python3 -m venv "$home" &&
		"$home/bin/pip" install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
}

# All documents of a file against two versions of Kubernetes: validate FILE
validate() {
	"$home/bin/kubernetes-validate" --strict --quiet --kubernetes-version "$oldest_kubernetes" "$1" &&
		"$home/bin/kubernetes-validate" --strict --quiet "$1"
}

if [ -x "$home/bin/kubernetes-validate" ] || install_validator >"$scratch/pip.log" 2>&1; then
	validate "$cluster/kubernetes.yml" || fail 'the schemas of Kubernetes refuse the manifest'
	"$home/bin/python" -B tests/packages/manifests.py "$cluster/kubernetes.yml" "$scratch"
	"$server" $(cat "$scratch/arguments") --help 2>/dev/null ||
		fail "the server does not know all of: $(cat "$scratch/arguments")"
else
	tail -n 2 "$scratch/pip.log"
	skip 'kubernetes-validate cannot be installed, the manifest is not checked'
fi

# ---- HAProxy ----

# Refuses warnings too.
check_proxy() {
	NAMESPACE=test haproxy -dW -c -f "$1" >"$scratch/haproxy.log" 2>&1
}

for file in "$cluster/haproxy.cfg" "$scratch/haproxy.cfg"; do
	[ -e "$file" ] || continue
	check_proxy "$file" || fail "HAProxy refuses $file: $(cat "$scratch/haproxy.log")"
done
if [ -e /etc/haproxy/haproxy.cfg ]; then
	cat /etc/haproxy/haproxy.cfg "$cluster/haproxy.cfg" >"$scratch/both.cfg"
	check_proxy "$scratch/both.cfg" || fail "not at the end of Debian's: $(cat "$scratch/haproxy.log")"
fi
haproxy -v | sed -n '1s/ .*version \([^ ]*\).*/ \1 accepts the configurations/p'

# ---- systemd. units.sh shows that systemd-analyze finds a fault. ----

drop_in=$scratch/units/beanstalkd.service.d
mkdir -p "$drop_in"
cp dist/systemd/beanstalkd.socket "$scratch/units"
sed -e "s|^ExecStart=/usr/bin/beanstalkd |ExecStart=$server |" -e '/^Documentation=/d' \
	dist/systemd/beanstalkd.service >"$scratch/units/beanstalkd.service"
cp "$cluster/systemd.conf" "$drop_in/cluster.conf"
faults=$(systemd-analyze verify --man=no "$scratch/units/beanstalkd.service" 2>&1)
[ -z "$faults" ] || fail "$faults"
systemd-analyze security --no-pager --offline=true --threshold=15 \
	"$scratch/units/beanstalkd.service" >"$scratch/security" || fail "$(cat "$scratch/security")"
extra=$(sed -n 's/^# *BEANSTALKD_EXTRA="\(.*\)"$/\1/p' "$cluster/systemd.conf")
"$server" $extra --help 2>/dev/null || fail "the server does not know all of: $extra"
echo 'systemd accepts the drop-in'

exec sh tests/packages/trial.sh "$server"

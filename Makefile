# The targets of C beanstalkd's makefile, and more.
#
#   make            build the server, and beanstalkctl
#   make run        build it and run it on port 11300; -V logs each address (FLAGS='-l 127.0.0.1')
#   make clean      remove everything that was built
#
# Tests, described in tests/README.md:
#   make check      everything that must hold before a commit
#   make check-repeat   repeats make check while all cores are busy (RUNS=20)
#   make simulate   runs a randomized simulation for one minute (FOR_SECONDS=n; SEED=n STEPS=n
#                   repeats one run; HISTORY=FILE replays a history)
#   make mutants    plants bugs, and requires that the suite that the table names finds each
#                   (MUTANTS='name name' for some of them; MUTANTS=--search looks for other seeds)
#   make fuzz       hostile bytes for the engine, one minute for each target of tests/fuzz
#                   (TARGET=replay FOR_SECONDS=3600 for one target and one hour)
#   make soak       the server under stress, for about ten minutes (SCENARIO=churn MINUTES=60 for
#                   one hour of some scenarios, SEED=n for the same random numbers)
#   make check-etcd  lints and tests of the sources with the feature `etcd', on a fake of etcd
#                   (ETCD_SEED=n ETCD_SEEDS=n for other random faults)
#   make check-cluster  servers with etcd, HAProxy and faults, for about five minutes
#                   (CASES='name name' for some cases)
#   make chaos      random faults in a cluster, for one hour (FOR_SECONDS=n; SEED=n repeats the
#                   choices of a run)
#   make mutants-etcd   plants bugs in the binlog in etcd, and requires that its tests on a fake of
#                   etcd find each (MUTANTS='name name' for some of them)
#
# Speed, described in tests/bench/README.md:
#   make bench      cost of operations (AGAINST='path path' compares with other servers, ARGS='...'
#                   passes flags: ARGS=--help lists them; ARGS=--instructions counts user
#                   instructions per command, with valgrind)
#   make pgo        builds target/pgo/release/beanstalkd with the counts of a load: a fifth fewer
#                   instructions (needs the component llvm-tools of rustup)
#   make walk       counts the functions and files that a put, a reserve, a delete and a wake cross
#   make screenshots    takes the pictures of the status page again, with ten minutes of load
#   make picture    draws dist/grafana/beanstalkd.svg again, from five minutes of generated load
#
# Deployment, described in dist/README.md; `make check-...' tests the result of each:
#   make etcd       the server for a cluster, with the feature `etcd': target/etcd/release/beanstalkd;
#                   `make install FEATURES=etcd' and `make deb FEATURES=etcd' take this binary
#   make install    into PREFIX (/usr/local) below DESTDIR: the binary, man pages, systemd units
#                   (into UNITDIR), the licence, and completions for bash, zsh and fish;
#                   `make uninstall' removes them
#   make static     the server without shared libraries, target/static/beanstalkd
#                   (STATIC_TARGET=triple for another machine)
#   make image      a container image with it, target/image/beanstalkd.oci.tar
#   make deb        a Debian package, in target/deb
#   make release    what is published: static programs, package, image, crate and checksums, in
#                   target/published; from a clean tree only
#   make vm         virtual machines with only a kernel and the server, booted in qemu
#   make check-units    the systemd units: valid, sandboxed, and able to serve
#   make check-moving   moves jobs from C beanstalkd to this server and back (part of check)
#   make check-pages    runs the blocks of shell in README.md and the pages of dist (part of check;
#                   WITH='root minutes' also those that build and install)
#   make check-browser  shows the status page to a real browser, Debian's chromium
#   make check-metrics  a real Prometheus scrapes the server, and evaluates the dashboard and alerts
#   make check-manifests    the files for clusters: Kubernetes' schemas, HAProxy and systemd accept them, and
#                   the trial of dist/README.md works

PREFIX ?= /usr/local
DESTDIR ?=
BINDIR ?= $(PREFIX)/bin
MANDIR ?= $(PREFIX)/share/man
LICENSEDIR ?= $(PREFIX)/share/doc/beanstalkd-server
UNITDIR ?= $(PREFIX)/lib/systemd/system
BASHDIR ?= $(PREFIX)/share/bash-completion/completions
ZSHDIR ?= $(PREFIX)/share/zsh/site-functions
FISHDIR ?= $(PREFIX)/share/fish/vendor_completions.d
CARGO ?= cargo
# Selenium and matplotlib are modules of Debian's Python.
PYTHON ?= /usr/bin/python3
INSTALL ?= install
FLAGS ?=
AGAINST ?=
ARGS ?=
CASES ?=
MUTANTS ?=
TARGET ?= connection replay
STATIC_TARGET ?=
FEATURES ?=
WITH ?=

# What is installed and packaged, and the target that builds it.
BINARY = target/$(if $(FEATURES),$(FEATURES)/)release/beanstalkd
BUILT = $(or $(FEATURES),all)
PAGES = $(notdir $(wildcard man/*.[1-9]))

all:
	$(CARGO) build --release

run:
	$(CARGO) run --release -- -V $(FLAGS)

# Many tests wait for processes, so that as many at a time as there are cores leave these idle for a third of the
# time. The suites with such tests run next to the others, because each suite ends with few tests. Each part prints
# when it ends.
check: check-style check-man
	$(MAKE) --no-print-directory --jobs=5 --output-sync=target \
		check-waiting check-computing check-clients check-moving check-pages

WAITING = conversations ctl daemon interop
# Cargo tests these by default. `etcd' needs a feature, see check-etcd.
SUITES = $(basename $(notdir $(wildcard tests/*.rs))) $(patsubst tests/%/main.rs,%,$(wildcard tests/*/main.rs))
COMPUTING = $(filter-out etcd $(WAITING),$(SUITES))
TEST = RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$(n=$$(nproc); echo $$((n > 6 ? n : 6)))} $(CARGO) test

check-waiting:
	$(TEST) $(addprefix --test ,$(WAITING))

check-computing:
	$(TEST) --lib $(addprefix --test ,$(COMPUTING))

check-repeat:
	@RUNS='$(or $(RUNS),20)' MAKE='$(MAKE)' sh tests/repeat.sh

check-style:
	$(CARGO) fmt --check
	rustfmt --check --edition 2024 tests/fuzz/*.rs
	$(CARGO) clippy --all-targets -- --deny warnings
	RUSTDOCFLAGS='--deny warnings' $(CARGO) doc --no-deps --document-private-items --quiet

# Skipped if mandoc is not installed; .ci/run installs it.
check-man:
	@if command -v mandoc >/dev/null; then \
		cd man && mandoc -T lint -W warning $(PAGES); \
	else echo 'SKIPPED: mandoc is not installed, the man pages are not checked'; [ "$$CI" != true ]; fi

check-clients: all
	@sh tests/clients/run.sh target/release/beanstalkd

check-moving: all
	@sh tests/packages/moving_in.sh target/release/beanstalkd

check-pages: all
	@sh tests/packages/pages.sh target/release $(WITH)

check-units: all
	@sh tests/packages/units.sh target/release/beanstalkd

deb: $(BUILT)
	@FEATURES='$(FEATURES)' sh dist/debian/build.sh $(BINARY)

check-deb: deb
	@sh tests/packages/deb.sh

bench:
	$(CARGO) build --release
	$(CARGO) bench --bench bench -- target/release/beanstalkd $(AGAINST) $(ARGS)

pgo:
	@CARGO='$(CARGO)' sh tests/bench/pgo.sh

walk:
	$(CARGO) build --config profile.dev.opt-level=0 --target-dir target/walk
	@python3 -B tests/bench/walk.py $(ARGS) target/walk/debug/beanstalkd

simulate:
	$(CARGO) test --profile simulation --test simulation -- simulate --ignored --nocapture

mutants:
	@CARGO='$(CARGO)' python3 -B tests/mutants/run.py $(MUTANTS)

fuzz:
	@CARGO='$(CARGO)' sh tests/fuzz/run.sh '$(TARGET)' '$(or $(FOR_SECONDS),60)'

# Without SOAK, `cargo test` plays one small round of each scenario.
soak:
	SOAK=1 MINUTES='$(MINUTES)' SEED='$(SEED)' $(CARGO) test --release --test daemon \
		'soak::$(SCENARIO)' -- --nocapture --test-threads 1

check-cluster: etcd
	@sh tests/cluster/run.sh target/etcd/release/beanstalkd $(CASES)

chaos: etcd
	@FOR_SECONDS=$(or $(FOR_SECONDS),3600) python3 -B tests/cluster/check.py target/etcd/release/beanstalkd random-faults

mutants-etcd:
	@CARGO='$(CARGO)' TABLE=etcd.txt FEATURES=etcd-tests python3 -B tests/mutants/run.py $(MUTANTS)

static:
	@CARGO='$(CARGO)' STATIC_TARGET='$(STATIC_TARGET)' sh dist/static/build.sh target/static/beanstalkd

check-static: static
	@sh tests/packages/static.sh target/static/beanstalkd

image: static
	@sh dist/image/build.sh target/static/beanstalkd target/image/beanstalkd.oci.tar

release:
	@MAKE='$(MAKE)' CARGO='$(CARGO)' sh dist/release/build.sh target/published

check-release:
	@MAKE='$(MAKE)' sh tests/packages/release.sh

check-image: image
	@sh tests/packages/image.sh target/image/beanstalkd.oci.tar

# The only program of a machine must be static.
vm: static
	@sh tests/vm/run.sh target/static/beanstalkd

check-metrics: all
	@sh tests/packages/metrics.sh target/release/beanstalkd

# The client of etcd needs protobuf-compiler and libprotobuf-dev.
etcd:
	$(CARGO) build --release --features etcd --target-dir target/etcd

# The sources that only a cluster needs.
check-etcd:
	$(CARGO) clippy --features etcd-tests --target-dir target/etcd --lib --bins --test etcd -- --deny warnings
	$(CARGO) test --features etcd-tests --target-dir target/etcd --lib etcd
	$(CARGO) test --features etcd-tests --target-dir target/etcd --test etcd

check-manifests: etcd
	@sh tests/packages/manifests.sh target/etcd/release/beanstalkd

check-browser: all
	@timeout 300 $(PYTHON) -B tests/browser/check.py target/release/beanstalkd

screenshots: all
	@$(PYTHON) -B dist/pictures/status.py target/release/beanstalkd dist/status

picture: all
	@$(PYTHON) -B dist/pictures/dashboard.py target/release/beanstalkd dist/grafana/beanstalkd.svg

# `sudo make install' installs what is built, so that cargo does not run as root.
install: $(if $(and $(filter 0,$(shell id -u)),$(wildcard $(BINARY))),,$(BUILT))
	$(INSTALL) -d '$(DESTDIR)$(BINDIR)' '$(DESTDIR)$(LICENSEDIR)' '$(DESTDIR)$(UNITDIR)' \
		'$(DESTDIR)$(BASHDIR)' '$(DESTDIR)$(ZSHDIR)' '$(DESTDIR)$(FISHDIR)'
	$(INSTALL) -m 755 $(BINARY) $(dir $(BINARY))beanstalkctl '$(DESTDIR)$(BINDIR)'
	for page in $(PAGES); do \
		$(INSTALL) -D -m 644 man/$$page '$(DESTDIR)$(MANDIR)'/man$${page##*.}/$$page || exit 1; \
	done
	$(INSTALL) -m 644 LICENSE '$(DESTDIR)$(LICENSEDIR)/LICENSE'
	$(INSTALL) -m 644 dist/systemd/beanstalkd.service dist/systemd/beanstalkd.socket \
		'$(DESTDIR)$(UNITDIR)'
	sed 's|/usr/bin/beanstalkd|$(BINDIR)/beanstalkd|' dist/systemd/beanstalkd.service \
		>'$(DESTDIR)$(UNITDIR)/beanstalkd.service'
	for program in beanstalkd beanstalkctl; do \
		$(INSTALL) -m 644 dist/completions/$$program.bash '$(DESTDIR)$(BASHDIR)'/$$program && \
		$(INSTALL) -m 644 dist/completions/_$$program '$(DESTDIR)$(ZSHDIR)' && \
		$(INSTALL) -m 644 dist/completions/$$program.fish '$(DESTDIR)$(FISHDIR)' || exit 1; \
	done

# Keeps directories, except the one with the name of the project.
uninstall:
	for page in $(PAGES); do rm -f '$(DESTDIR)$(MANDIR)'/man$${page##*.}/$$page; done
	for program in beanstalkd beanstalkctl; do \
		rm -f '$(DESTDIR)$(BINDIR)'/$$program '$(DESTDIR)$(BASHDIR)'/$$program \
			'$(DESTDIR)$(ZSHDIR)'/_$$program '$(DESTDIR)$(FISHDIR)'/$$program.fish; \
	done
	rm -f '$(DESTDIR)$(LICENSEDIR)/LICENSE' \
		'$(DESTDIR)$(UNITDIR)/beanstalkd.service' '$(DESTDIR)$(UNITDIR)/beanstalkd.socket'
	[ ! -d '$(DESTDIR)$(LICENSEDIR)' ] || rmdir '$(DESTDIR)$(LICENSEDIR)'

check-install: all
	@MAKE='$(MAKE)' sh tests/packages/install.sh

clean:
	$(CARGO) clean

.PHONY: all run etcd check-etcd check check-repeat check-waiting check-computing check-style check-man check-clients check-moving check-pages check-units bench pgo walk simulate mutants fuzz soak \
	check-cluster chaos mutants-etcd \
	static check-static image check-image check-metrics check-manifests check-browser screenshots picture vm deb check-deb release check-release install uninstall check-install clean

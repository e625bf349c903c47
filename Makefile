# The words of C beanstalkd's makefile, and what cargo needs to hear for each.
#
#   make            build the server
#   make run        build it and run it on port 11300; -V logs each address (FLAGS='-l 127.0.0.1')
#   make clean      remove all that was built
#
# To check it:
#   make check      everything that must hold before a commit
#   make check-repeat   runs make check again and again while all cores are busy (RUNS=20)
#   make simulate   made-up clients, disks and times against a model, for a minute (FOR_SECONDS=n,
#                   or one world: SEED=n STEPS=n, or one that is written down: HISTORY=FILE)
#   make mutants    plants bugs, and looks whether the simulation finds each within a minute
#                   (MUTANTS='name name' for some of them)
#   make fuzz       hostile bytes for the engine, a minute for each target of tests/fuzz
#                   (TARGET=replay FOR_SECONDS=3600 for one, and an hour)
#   make soak       the server under stress, some five minutes (ARGS='--minutes 60 --only
#                   churn' for one scenario and long, ARGS=--list tells all)
#
# To measure it:
#   make bench      what operations cost (AGAINST='path path' beside other servers,
#                   ARGS='...' for flags of the benchmark: ARGS=--help lists them;
#                   ARGS=--instructions counts user instructions per command, with valgrind)
#   make picture    draws dist/grafana/beanstalkd.svg anew, from five minutes of made-up load
#
# To bring it somewhere; what each makes is tried with `make check-...':
#   make install    into PREFIX (/usr/local), below DESTDIR if that is set: the binary, man pages,
#                   units of systemd (into UNITDIR), the licence, and completions for bash, zsh and
#                   fish; `make uninstall' takes them away
#   make static     the server without shared libraries, target/static/beanstalkd
#                   (STATIC_TARGET=triple for another machine)
#   make image      that in an image for containers, target/image/beanstalkd.oci.tar
#   make deb        a package of Debian, in target/deb
#   make vm         machines that have nothing but a kernel and the server, booted in qemu
#   make check-units    the units of systemd: are they sound, how much do they allow, do they serve
#   make check-moving   moves jobs from C beanstalkd to this server and back (part of check)
#   make check-metrics  a real Prometheus scrapes the server; the dashboard and the alerts of dist/
#                   are tried with what it has

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
INSTALL ?= install
FLAGS ?=
AGAINST ?=
ARGS ?=
MUTANTS ?=
TARGET ?= command connection replay options
STATIC_TARGET ?=

all:
	$(CARGO) build --release

run:
	$(CARGO) run --release -- -V $(FLAGS)

check: check-style check-man check-clients check-moving
	$(CARGO) test

check-repeat:
	@RUNS='$(or $(RUNS),20)' MAKE='$(MAKE)' sh tests/repeat.sh

check-style:
	$(CARGO) fmt --check
	rustfmt --check --edition 2024 tests/fuzz/*.rs
	$(CARGO) clippy --all-targets -- --deny warnings
	RUSTDOCFLAGS='--deny warnings' $(CARGO) doc --no-deps --document-private-items --quiet

# Reported as skipped, not as failed, where the tool is missing: .ci/run installs both.
check-man:
	@if command -v mandoc >/dev/null; then \
		cd man && mandoc -T lint -W warning beanstalkd.1 beanstalkd-protocol.7; \
	else echo 'SKIPPED: mandoc is not installed, the man pages are not checked'; fi

check-clients: all
	@sh tests/clients/run.sh target/release/beanstalkd

check-moving: all
	@sh tests/packages/moving_in.sh target/release/beanstalkd

check-units: all
	@sh tests/packages/units.sh target/release/beanstalkd

deb: all
	@sh dist/debian/build.sh

check-deb: deb
	@sh tests/packages/deb.sh

bench:
	$(CARGO) build --release
	$(CARGO) bench --bench bench -- target/release/beanstalkd $(AGAINST) $(ARGS)

simulate:
	$(CARGO) test --profile simulation --test simulation -- simulate --ignored --nocapture

mutants:
	@sh tests/mutants/run.sh $(MUTANTS)

fuzz:
	@CARGO='$(CARGO)' sh tests/fuzz/run.sh '$(TARGET)' '$(or $(FOR_SECONDS),60)'

# The program is a test too; with this flag it is what it is called.
soak:
	$(CARGO) test --release --test soak -- --soak $(ARGS)

static:
	@CARGO='$(CARGO)' STATIC_TARGET='$(STATIC_TARGET)' sh dist/static/build.sh target/static/beanstalkd

check-static: static
	@sh tests/packages/static.sh target/static/beanstalkd

image: static
	@sh dist/image/build.sh target/static/beanstalkd target/image/beanstalkd.oci.tar

check-image: image
	@sh tests/packages/image.sh target/image/beanstalkd.oci.tar

# The only program of a machine brings what it needs of the C library along.
vm: static
	@sh tests/vm/run.sh target/static/beanstalkd

check-metrics: all
	@sh tests/packages/metrics.sh target/release/beanstalkd

picture: all
	@python3 -B tests/packages/picture.py target/release/beanstalkd dist/grafana/beanstalkd.svg

install: all
	$(INSTALL) -d '$(DESTDIR)$(BINDIR)' '$(DESTDIR)$(MANDIR)/man1' '$(DESTDIR)$(MANDIR)/man7' \
		'$(DESTDIR)$(LICENSEDIR)' '$(DESTDIR)$(UNITDIR)' \
		'$(DESTDIR)$(BASHDIR)' '$(DESTDIR)$(ZSHDIR)' '$(DESTDIR)$(FISHDIR)'
	$(INSTALL) -m 755 target/release/beanstalkd '$(DESTDIR)$(BINDIR)/beanstalkd'
	$(INSTALL) -m 644 man/beanstalkd.1 '$(DESTDIR)$(MANDIR)/man1/beanstalkd.1'
	$(INSTALL) -m 644 man/beanstalkd-protocol.7 '$(DESTDIR)$(MANDIR)/man7/beanstalkd-protocol.7'
	$(INSTALL) -m 644 LICENSE '$(DESTDIR)$(LICENSEDIR)/LICENSE'
	$(INSTALL) -m 644 dist/systemd/beanstalkd.service dist/systemd/beanstalkd.socket \
		'$(DESTDIR)$(UNITDIR)'
	sed 's|=/usr/bin/beanstalkd|=$(BINDIR)/beanstalkd|' dist/systemd/beanstalkd.service \
		>'$(DESTDIR)$(UNITDIR)/beanstalkd.service'
	$(INSTALL) -m 644 dist/completions/beanstalkd.bash '$(DESTDIR)$(BASHDIR)/beanstalkd'
	$(INSTALL) -m 644 dist/completions/_beanstalkd '$(DESTDIR)$(ZSHDIR)/_beanstalkd'
	$(INSTALL) -m 644 dist/completions/beanstalkd.fish '$(DESTDIR)$(FISHDIR)/beanstalkd.fish'

# Directories are left, but for the one that has the name of the project.
uninstall:
	rm -f '$(DESTDIR)$(BINDIR)/beanstalkd' '$(DESTDIR)$(MANDIR)/man1/beanstalkd.1' \
		'$(DESTDIR)$(MANDIR)/man7/beanstalkd-protocol.7' '$(DESTDIR)$(LICENSEDIR)/LICENSE' \
		'$(DESTDIR)$(UNITDIR)/beanstalkd.service' '$(DESTDIR)$(UNITDIR)/beanstalkd.socket' \
		'$(DESTDIR)$(BASHDIR)/beanstalkd' '$(DESTDIR)$(ZSHDIR)/_beanstalkd' \
		'$(DESTDIR)$(FISHDIR)/beanstalkd.fish'
	[ ! -d '$(DESTDIR)$(LICENSEDIR)' ] || rmdir '$(DESTDIR)$(LICENSEDIR)'

check-install: all
	@MAKE='$(MAKE)' sh tests/packages/install.sh

clean:
	$(CARGO) clean

.PHONY: all run check check-repeat check-style check-man check-clients check-moving check-units bench simulate mutants fuzz soak \
	static check-static image check-image check-metrics picture vm deb check-deb install uninstall check-install clean

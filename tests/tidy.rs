//! What the compiler does not check: who may name whom, and that pages say what is so.

use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn sources_in(directory: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(directory)).expect("the directory is there");
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("it can be read").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    paths.sort();
    assert!(!paths.is_empty(), "no sources in {directory}");
    paths
}

#[test]
fn the_engine_names_no_operating_system_and_no_clock() {
    const FORBIDDEN: [&str; 6] = ["mio", "socket2", "libc", "Instant", "SystemTime", "unsafe"];
    // Of std::io only what names an error or a slice, not what does something.
    const ALLOWED_IN_STD: [&str; 14] = [
        "borrow::Cow",
        "collections",
        "fmt",
        "hash",
        "io;",
        "io::{self, ErrorKind, Write}",
        "io::IoSlice",
        "iter",
        "marker",
        "mem",
        "num",
        "array",
        "ops",
        "rc",
    ];
    for path in sources_in("src/engine") {
        for (index, line) in read(&path).lines().enumerate() {
            if line.trim_start().starts_with("//") {
                continue;
            }
            let place = format!("{}:{}: {line}", path.display(), index + 1);
            let is_word_part = |char: char| char.is_alphanumeric() || char == '_';
            let words: Vec<&str> = line.split(|char| !is_word_part(char)).collect();
            for forbidden in FORBIDDEN {
                assert!(!words.contains(&forbidden), "the engine names {forbidden}: {place}");
            }
            assert!(!line.contains("crate::os"), "the engine names os: {place}");
            for (at, _) in line.match_indices("std::") {
                let named = &line[at + "std::".len()..];
                let is_allowed = ALLOWED_IN_STD.iter().any(|allowed| named.starts_with(allowed));
                assert!(is_allowed, "the engine names what it should not: {place}");
            }
        }
    }
}

#[test]
fn imports_of_the_engine_run_downward() {
    // The floors of the map in lib.rs, from the ground up.
    const FLOORS: [&[&str]; 6] = [
        &[
            "heap",
            "list",
            "wheel",
            "slots",
            "pages",
            "beside",
            "index",
            "table",
            "ids",
            "bytes",
            "time",
            "keys",
            "spare",
            "disk",
            "json",
            "histogram",
            "http",
        ],
        &["job", "tube", "command", "reply", "output", "body", "record", "scan", "segments"],
        &["queue", "waiting", "check", "binlog", "space", "compaction", "durable", "replay"],
        &["conn", "stats", "inspect", "metrics"],
        &["server"],
        &["visit"],
    ];
    let floor = |room: &str| FLOORS.iter().position(|rooms| rooms.contains(&room));
    for path in sources_in("src/engine") {
        let room = path.file_stem().expect("a source has a name").to_string_lossy().into_owned();
        if room == "mod" {
            continue;
        }
        let own = floor(&room).unwrap_or_else(|| panic!("{room} stands on no floor"));
        for line in read(&path).lines().filter_map(|line| line.strip_prefix("use super::")) {
            let named = line.split([':', ';']).next().expect("an import names something");
            let other = floor(named).unwrap_or(own);
            // A tube keeps the line of those who wait for it; lib.rs says so.
            let is_known = (room.as_str(), named) == ("tube", "waiting");
            assert!(other <= own || is_known, "{room} imports {named}, which is above it");
        }
    }
}

#[test]
fn unsafe_is_in_one_room_only() {
    for directory in ["src", "src/engine", "src/os"] {
        for path in sources_in(directory) {
            let is_the_room = path.ends_with("src/os/process.rs");
            assert!(
                is_the_room || !read(&path).contains("unsafe_code"),
                "{} switches a lint off that it must not",
                path.display()
            );
        }
    }
}

#[test]
fn every_file_opens_with_what_it_is_for() {
    for directory in [
        "src",
        "src/engine",
        "src/os",
        "tests",
        "tests/support",
        "tests/script",
        "tests/fake_disk",
        "tests/made_up",
        "tests/simulation",
        "tests/simulation/model",
        "tests/soak",
        "tests/soak/scenarios",
        "tests/bench",
        "tests/bench/scenarios",
        "tests/bench/scripts",
        "tests/fuzz",
        "tests/fuzz/targets",
    ] {
        for path in sources_in(directory) {
            assert!(read(&path).starts_with("//! "), "{} has no head", path.display());
        }
    }
}

/// Scripts say in their first comment what they are for.
#[test]
fn every_script_opens_with_what_it_is_for() {
    let mut count = 0;
    for directory in [
        "tests/clients",
        "tests/mutants",
        "tests/packages",
        "tests/vm",
        "dist/completions",
        "dist/debian",
        "dist/image",
        "dist/static",
    ] {
        for entry in std::fs::read_dir(root().join(directory)).expect("it is there") {
            let path = entry.expect("it can be read").path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            let is_opened = match extension {
                Some("sh") => {
                    let text = read(&path);
                    let text = text.strip_prefix("#!/bin/sh\n").unwrap_or(&text);
                    text.starts_with("# ")
                }
                Some("py") => {
                    read(&path).trim_start_matches("#!/usr/bin/env python3\n").starts_with("\"\"\"")
                }
                _ => continue,
            };
            assert!(is_opened, "{} has no head", path.display());
            count += 1;
        }
    }
    assert!(count >= 20, "only {count} scripts");
}

/// A bug that cannot be planted any more shows nothing.
#[test]
fn every_mutant_still_applies() {
    let mut count = 0;
    for entry in std::fs::read_dir(root().join("tests/mutants")).expect("it is there") {
        let path = entry.expect("it can be read").path();
        if path.extension().is_none_or(|extension| extension != "patch") {
            continue;
        }
        let patch = std::fs::File::open(&path).expect("it can be read");
        let mut command = std::process::Command::new("patch");
        command.args(["--dry-run", "-s", "-p1", "-F3"]).current_dir(root()).stdin(patch);
        let Ok(output) = command.output() else {
            return eprintln!("SKIPPED: there is no patch(1)");
        };
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}: {said}", path.display());
        count += 1;
    }
    assert!(count >= 19, "only {count} bugs are planted");
}

#[test]
fn the_map_has_every_room() {
    let map = read("src/lib.rs");
    for wing in ["engine", "os"] {
        for path in sources_in(&format!("src/{wing}")) {
            let room = path.file_stem().expect("a source has a name").to_string_lossy();
            let is_there = room == "mod" || map.contains(&format!("[`{wing}::{room}`]"));
            assert!(is_there, "the map in src/lib.rs has no {wing}::{room}");
        }
    }
}

#[test]
fn quirks_name_scripts_that_exist() {
    let mut count = 0;
    for directory in ["src/engine", "src/os"] {
        for path in sources_in(directory) {
            let source = read(&path);
            for (at, _) in source.match_indices("// Quirk:") {
                let comment =
                    source[at..].lines().map(str::trim).take_while(|line| line.starts_with("//"));
                let comment: String = comment.map(|line| line.trim_start_matches('/')).collect();
                let script = comment
                    .split_once("tests/scripts/")
                    .and_then(|(_, rest)| rest.split_once(".txt"));
                let (name, _) = script.unwrap_or_else(|| {
                    panic!("{}: a quirk names no script:{comment}", path.display())
                });
                let script = root().join("tests/scripts").join(format!("{name}.txt"));
                assert!(script.is_file(), "{}: there is no {}", path.display(), script.display());
                count += 1;
            }
        }
    }
    assert!(count >= 8, "quirks are marked in another way now");
}

#[test]
fn the_man_page_has_the_flags_and_defaults_of_the_program() {
    let page = read("man/beanstalkd.1");
    let usage = beanstalkd::options::usage();
    let mut flags = 0;
    for line in usage.lines().filter(|line| line.trim_start().starts_with('-')) {
        for word in line.split([' ', ',']).filter(|word| word.starts_with('-')) {
            let name =
                word.trim_start_matches('-').split([' ', '=']).next().expect("a flag has a name");
            let written =
                if word.starts_with("--") { format!("Fl -{name}") } else { format!("Fl {name}") };
            assert!(page.contains(&written), "man/beanstalkd.1 has no {written}");
            flags += 1;
        }
        if let Some((_, default)) = line.split_once("(default: ") {
            let default = default.trim_end_matches(')');
            if default.parse::<u64>().is_ok() {
                assert!(
                    page.contains(default),
                    "man/beanstalkd.1 does not know the default {default}"
                );
            }
        }
    }
    assert!(flags >= 32, "the usage text has changed its form");
    let documented = page.lines().filter(|line| line.starts_with(".It Fl ")).count();
    let lines = usage.lines().filter(|line| line.trim_start().starts_with('-')).count();
    assert!(documented >= lines, "man/beanstalkd.1 documents {documented} of {lines} flags");
}

/// In each shell's own way to write a flag: before its name, and what cannot follow it.
#[test]
fn completions_have_the_flags_of_the_program() {
    let usage = beanstalkd::options::usage();
    let is_name = |char: char| char.is_ascii_alphanumeric() || char == '-';
    let mut flags: Vec<&str> = Vec::new();
    for line in usage.lines().filter(|line| line.trim_start().starts_with('-')) {
        let words = line.trim_start().split("  ").next().expect("a line begins with flags");
        flags.extend(words.split([' ', ',']).filter(|word| word.starts_with('-')));
    }
    assert!(flags.len() >= 30, "the usage text has changed its form");
    for file in ["beanstalkd.bash", "_beanstalkd", "beanstalkd.fish"] {
        let text = read(format!("dist/completions/{file}"));
        // fish has dashes nowhere: `-s b -l binlog-dir`.
        let text = match file {
            "beanstalkd.fish" => text
                .lines()
                .filter(|line| line.starts_with("complete "))
                .fold(String::new(), |all, line| {
                    all + &line.replace(" -l ", " --").replace(" -s ", " -") + "\n"
                }),
            _ => text,
        };
        let written: Vec<&str> = text.split(|char| !is_name(char)).collect();
        for flag in &flags {
            assert!(written.contains(flag), "dist/completions/{file} has no {flag}");
        }
        for long in written.iter().filter(|word| word.len() > 2 && word.starts_with("--")) {
            assert!(flags.contains(long), "dist/completions/{file} has {long}, which is no flag");
        }
    }
}

#[test]
fn the_protocol_page_has_every_command_and_reply() {
    let page = read("man/beanstalkd-protocol.7");
    let commands = read("src/engine/command.rs");
    let (commands, _) = commands.split_once("#[cfg(test)]").expect("its tests come last");
    let mut count = 0;
    for (at, quote) in commands.match_indices("b\"") {
        let (word, rest) =
            commands[at + quote.len()..].split_once('"').expect("what is quoted ends");
        if rest.starts_with(" =>") {
            let word = word.trim_end();
            assert!(page.contains(word), "man/beanstalkd-protocol.7 does not know {word}");
            count += 1;
        }
    }
    assert_eq!(count, 25, "command.rs has changed its form, or there is a new command");
    let replies = read("src/engine/reply.rs");
    let words = replies.split('"').filter(|text| {
        let word = text.trim_end_matches("\\r\\n").trim_end();
        word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
    });
    let mut count = 0;
    for word in words {
        let word = word.trim_end_matches("\\r\\n").trim_end();
        assert!(page.contains(word), "man/beanstalkd-protocol.7 does not know {word}");
        count += 1;
    }
    assert!(count >= 20, "reply.rs has changed its form");
}

#[test]
fn versions_agree() {
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        read("CHANGELOG.md").contains(&format!("## {version}")),
        "CHANGELOG.md has no {version}"
    );
    assert!(
        read("README.md").contains(&beanstalkd::options::version()),
        "README.md shows another version"
    );
    assert!(read("man/beanstalkd.1").contains(&beanstalkd::options::version()));
    let package = format!("beanstalkd ({}+server{version}-", beanstalkd::engine::stats::VERSION);
    assert!(
        read("dist/debian/changelog").starts_with(&package),
        "dist/debian/changelog does not begin with {package}"
    );
}

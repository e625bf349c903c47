//! Checks that the compiler does not make: layers of modules, and pages that agree with the code.

use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below a directory, without what is built there.
fn files_below(directory: &str) -> Vec<PathBuf> {
    let mut directories = vec![root().join(directory)];
    let mut paths = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("the directory is there") {
            let path = entry.expect("it can be read").path();
            match path.is_dir() {
                true if path.ends_with("target") => {}
                true => directories.push(path),
                false => paths.push(path),
            }
        }
    }
    paths.sort();
    paths
}

/// All Rust sources below a directory.
fn sources_below(directory: &str) -> Vec<PathBuf> {
    let mut paths = files_below(directory);
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    assert!(paths.len() > 40, "only {} sources in {directory}", paths.len());
    paths
}

#[test]
fn the_engine_names_no_operating_system_and_no_clock() {
    const FORBIDDEN: [&str; 6] = ["mio", "socket2", "libc", "Instant", "SystemTime", "unsafe"];
    // Of std::io only errors, slices and traits: a test may give the engine its own streams. Of std::net only
    // addresses.
    const ALLOWED_IN_STD: &str = "array borrow::Cow cell::Cell cell::{Cell,_RefCell} cmp collections fmt hash hint \
        io; io::{self, io::IoSlice io::{Read,_Write} iter marker mem net::SocketAddr \
        net::{IpAddr,_Ipv6Addr,_SocketAddr} num ops rc str";
    for path in sources_below("src").iter().filter(|path| module_of(path).starts_with("engine")) {
        for (index, line) in read(path).lines().enumerate() {
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
                let named = line[at + "std::".len()..].replace(' ', "_");
                let is_allowed =
                    ALLOWED_IN_STD.split(' ').any(|allowed| named.starts_with(allowed));
                assert!(is_allowed, "the engine names what it should not: {place}");
            }
        }
    }
}

/// The map at the head of src/lib.rs: the modules of each layer, from the top.
fn layers() -> Vec<Vec<String>> {
    let map = read("src/lib.rs");
    let rows = map.lines().filter_map(|line| line.strip_prefix("//! | "));
    let names = |row: &str| -> Vec<String> {
        let (names, _) = row.split_once(" | ").expect("a row has two columns");
        let names = names.split(", ").map(|name| name.trim_matches(['[', ']', '`']).to_owned());
        names.collect()
    };
    rows.skip(1).map(names).collect()
}

/// The module of the map to which a path of modules belongs, such as `engine::queue::job`.
fn layer_of(layers: &[Vec<String>], path: &str) -> Option<usize> {
    let is_in = |name: &String| path == name || path.starts_with(&format!("{name}::"));
    layers.iter().position(|names| names.iter().any(is_in))
}

#[test]
fn imports_run_downward_in_the_map() {
    let layers = layers();
    let mut count = 0;
    for path in sources_below("src") {
        let module = module_of(&path);
        let Some(own) = layer_of(&layers, &module) else {
            let is_outside =
                ["lib", "testing", "engine", "bin::beanstalkctl"].contains(&module.as_str());
            assert!(is_outside, "the map in src/lib.rs has no {module}");
            continue;
        };
        for line in read(&path).lines() {
            let Some(import) = line.strip_prefix("use ") else { continue };
            let import = import.split([';', '{', ' ']).next().expect("it names something");
            let named = match import.strip_prefix("crate::") {
                Some(rest) => rest.to_owned(),
                None if import.starts_with("super::") => resolve(&path, import),
                None => continue,
            };
            let Some(other) = layer_of(&layers, named.trim_end_matches(':')) else { continue };
            assert!(other >= own, "{module} imports {named}, which is above it in the map");
            count += 1;
        }
    }
    assert!(count > 100, "only {count} imports were found");
}

/// The module of an import that begins with `super`.
fn resolve(path: &Path, import: &str) -> String {
    let mut module: Vec<String> = module_of(path).split("::").map(str::to_owned).collect();
    let mut rest = import;
    while let Some(after) = rest.strip_prefix("super::") {
        module.pop();
        rest = after;
    }
    module.push(rest.to_owned());
    module.join("::")
}

/// The path of modules of a source file.
fn module_of(path: &Path) -> String {
    let path = path.strip_prefix(root().join("src")).expect("it is in src").with_extension("");
    let path = path.to_str().expect("names are ASCII").replace('/', "::");
    path.strip_suffix("::mod").map_or(path.clone(), str::to_owned)
}

#[test]
fn unsafe_code_is_in_one_folder_only() {
    for path in sources_below("src") {
        let may = path.starts_with(root().join("src/os/sys"));
        let allows = read(&path).contains("unsafe_code");
        assert!(may || !allows, "{} switches a lint off that it must not", path.display());
    }
}

/// The first comment of a source or script is its purpose.
#[test]
fn every_file_opens_with_what_it_is_for() {
    let mut count = 0;
    for path in ["src", "tests", "dist"].into_iter().flat_map(files_below) {
        let heads: &[&str] = match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => &["//! "],
            Some("sh") => &["# ", "#!/bin/sh\n# "],
            Some("py") => &["\"\"\"", "#!/usr/bin/env python3\n\"\"\""],
            _ => continue,
        };
        let text = read(&path);
        assert!(heads.iter().any(|head| text.starts_with(head)), "{} has no head", path.display());
        count += 1;
    }
    assert!(count >= 150, "only {count} sources and scripts");
}

/// A longer one asks to be two.
#[test]
fn no_source_is_too_long_to_read() {
    const MOST_BYTES: usize = 30_000;
    for path in sources_below("src") {
        let len = read(&path).len();
        assert!(len <= MOST_BYTES, "{} has {len} bytes", path.display());
    }
}

/// What a script in Python prints; `None` without Python.
fn python(arguments: &[&str]) -> Option<String> {
    let mut command = std::process::Command::new("python3");
    let Ok(output) = command.arg("-B").args(arguments).current_dir(root()).output() else {
        let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
        assert!(!is_ci, "python3 is required");
        eprintln!("SKIPPED: there is no python3");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Each hunk has its place, and each table says its number of bugs.
#[test]
fn every_planted_bug_fits_the_sources() {
    for table in ["tests/mutants/bugs.txt", "tests/mutants/etcd.txt"] {
        let Some(bugs) = python(&["tests/planted/apply.py", table, "--list"]) else { return };
        let number = format!("There are {} bugs.", bugs.lines().count());
        assert!(read(table).contains(&number), "{table} does not say: {number}");
    }
}

#[test]
fn every_folder_lists_its_files() {
    let mut count = 0;
    let sources = sources_below("src");
    for path in sources.iter().filter(|path| path.ends_with("mod.rs")) {
        let own_module = module_of(path);
        if ["engine", "os"].contains(&own_module.as_str()) {
            continue;
        }
        for file in sources.iter().filter(|file| file.parent() == path.parent()) {
            let name = file.file_stem().expect("a source has a name").to_string_lossy();
            let is_listed = name == "mod" || read(path).contains(&format!("//! | [`{name}`] |"));
            assert!(is_listed, "{} does not list {name}", path.display());
            count += 1;
        }
    }
    assert!(count > 25, "only {count} files");
}

#[test]
fn quirks_name_scripts_that_exist() {
    let mut count = 0;
    for path in sources_below("src") {
        for quirk in read(&path).split("// Quirk:").skip(1) {
            let comment = quirk.lines().enumerate().map(|(index, line)| (index, line.trim()));
            let comment: String = comment
                .take_while(|(index, line)| *index == 0 || line.starts_with("//"))
                .map(|(_, line)| line.trim_start_matches('/'))
                .collect();
            let script = comment.split_once("tests/conversations/").map(|(_, rest)| rest);
            let script = script.and_then(|rest| rest.split_once(".txt")).map(|(name, _)| name);
            let script = format!("tests/conversations/{}.txt", script.unwrap_or("no script"));
            assert!(root().join(&script).is_file(), "{}: a quirk: {script}", path.display());
            count += 1;
        }
    }
    assert!(count >= 8, "quirks are marked in another way now");
}

#[test]
fn the_man_page_has_the_flags_and_defaults_of_the_program() {
    let page = read("man/beanstalkd.1");
    let documented = flag_entries(&page);
    let usage = usage_entries();
    assert!(usage.len() >= 19, "the usage text has changed its form");
    for (flags, text) in &usage {
        let entry = documented.iter().find(|(names, _)| names == flags);
        let (_, entry) = entry.unwrap_or_else(|| panic!("man/beanstalkd.1 has no entry {flags:?}"));
        let Some((_, default)) = text.split_once("(default: ") else { continue };
        let default = default.split_once(')').expect("a bracket is closed").0;
        if default.parse::<u64>().is_err() {
            continue;
        }
        let words: Vec<&str> = entry.split_whitespace().collect();
        let has_default = words.windows(4).any(|words| {
            let rest = if words[1] == "bytes" { &words[2..] } else { &words[1..3] };
            words[0] == default && rest[0] == "by" && rest[1].starts_with("default")
        });
        assert!(has_default, "man/beanstalkd.1 does not say {default} by default at {flags:?}");
    }
    for (flags, _) in &documented {
        let is_flag = usage.iter().any(|(names, _)| names == flags);
        assert!(is_flag, "man/beanstalkd.1 has an entry {flags:?}, which are no flags");
    }
}

/// The entries of the usage text: the flags of each, and all of its text.
fn usage_entries() -> Vec<(Vec<String>, String)> {
    let mut entries: Vec<(Vec<String>, String)> = Vec::new();
    for line in beanstalkd::options::usage(true).lines().map(str::trim) {
        if line.starts_with('-') {
            let flags = line.split("  ").next().expect("a line has a beginning");
            let flags = flags.split([' ', ',']).filter(|word| word.starts_with('-'));
            entries.push((flags.map(str::to_owned).collect(), String::new()));
        }
        if let Some((_, text)) = entries.last_mut() {
            *text += &format!("{line} ");
        }
    }
    entries
}

/// The entries of a man page that begin with a flag: the flags of each, as they are typed, and the
/// text down to the next one.
fn flag_entries(page: &str) -> Vec<(Vec<String>, String)> {
    let mut entries: Vec<(Vec<String>, String)> = Vec::new();
    let mut is_inside = false;
    for line in page.lines() {
        if line.starts_with(".It Fl ") {
            let words: Vec<&str> = line.split(' ').collect();
            let flags = words.windows(2).filter(|pair| pair[0] == "Fl");
            entries.push((flags.map(|pair| format!("-{}", pair[1])).collect(), String::new()));
            is_inside = true;
        } else if line.starts_with(".Ss ") || line.starts_with(".Sh ") {
            is_inside = false;
        } else if let Some((_, text)) = entries.last_mut().filter(|_| is_inside) {
            *text += &format!("{line} ");
        }
    }
    entries
}

/// In each shell's own way to write a flag: before its name, and what cannot follow it.
#[test]
fn completions_have_the_flags_of_the_program() {
    let is_name = |char: char| char.is_ascii_alphanumeric() || char == '-';
    let flags: Vec<String> = usage_entries().into_iter().flat_map(|(flags, _)| flags).collect();
    assert!(flags.len() >= 30, "the usage text has changed its form");
    for file in ["beanstalkd.bash", "_beanstalkd", "beanstalkd.fish"] {
        let mut text = read(format!("dist/completions/{file}"));
        // fish has dashes nowhere: `-s b -l binlog-dir`.
        if file == "beanstalkd.fish" {
            let lines = text.lines().filter(|line| line.starts_with("complete "));
            text = lines.collect::<Vec<_>>().join("\n");
            text = text.replace(" -l ", " --").replace(" -s ", " -");
        }
        let written: Vec<&str> = text.split(|char| !is_name(char)).collect();
        for flag in &flags {
            assert!(written.contains(&flag.as_str()), "dist/completions/{file} has no {flag}");
        }
        for long in written.iter().filter(|word| word.len() > 2 && word.starts_with("--")) {
            let is_flag = flags.iter().any(|flag| flag == long);
            assert!(is_flag, "dist/completions/{file} has {long}, which is no flag");
        }
    }
}

/// The words of the parser's table, such as `kick-job`.
fn parsed_words() -> Vec<String> {
    let source = read("src/engine/commands/mod.rs");
    let (_, table) = source.split_once("pub static COMMANDS: ").expect("it has the table");
    let (table, _) = table.split_once("\n];\n").expect("the table ends");
    let rows = table.lines().filter_map(|line| line.split_once("(\"")?.1.split_once('"'));
    let words: Vec<String> = rows.map(|(word, _)| word.trim_end().to_owned()).collect();
    assert!(words.iter().any(|word| word == "quit"), "the table has changed its form");
    words
}

/// The table in CONTRIBUTING.md names each place, and the form of `kick-job` there.
#[test]
fn every_place_has_every_command() {
    let page = read("CONTRIBUTING.md");
    let (_, section) = page.split_once("\n## How to add a command\n").expect("it has the section");
    let (section, _) = section.split_once("\n## ").expect("another section follows");
    let words = parsed_words();
    let mut count = 0;
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split('`').collect();
        let (place, form) = (cells[1], cells[3]);
        let is_filled = form.contains("kick-job") || form.contains("kick_job");
        assert!(is_filled, "CONTRIBUTING.md has no form of kick-job in {row}");
        let text = text_of(place);
        for word in &words {
            let form = form.replace("kick-job", word).replace("kick_job", &function_name(word));
            assert!(has_word(&text, &form), "{place} has no {form}");
        }
        count += 1;
    }
    assert!(count >= 5, "only {count} places are named");
}

/// A file, or all files of a directory.
fn text_of(place: &str) -> String {
    let path = root().join(place);
    if !path.is_dir() {
        return read(path);
    }
    let entries = std::fs::read_dir(path).expect("the directory is there");
    entries.map(|entry| read(entry.expect("it can be read").path())).collect()
}

/// `kick-job` as the name of its handler.
fn function_name(word: &str) -> String {
    if word == "use" { "use_tube".to_owned() } else { word.replace('-', "_") }
}

/// Returns true if `text` has `form` and no more of a word behind it: `kick` is not in `kick-job`.
fn has_word(text: &str, form: &str) -> bool {
    let is_word_part = |char: char| char.is_ascii_alphanumeric() || "-_".contains(char);
    text.match_indices(form).any(|(at, _)| !text[at + form.len()..].starts_with(is_word_part))
}

/// Each command has a section, and each reply is an entry of one. `every_place_has_every_command` reads
/// the table of commands.
#[test]
fn the_protocol_page_has_every_command_and_reply() {
    let page = read("man/beanstalkd-protocol.7");
    let marked = |mark: &str| -> Vec<String> {
        page.lines().filter_map(|line| line.strip_prefix(mark)).map(str::to_owned).collect()
    };
    let sections = marked(".Ss ").join(", ");
    for word in parsed_words() {
        let has_section = sections.split(", ").any(|section| section == word);
        assert!(has_section, "man/beanstalkd-protocol.7 has no section {word}");
    }
    let entries = marked(".It Sy ");
    let replies = read("src/engine/protocol/reply.rs") + &text_of("src/engine/commands");
    let words = replies.split('"').map(|text| text.trim_end_matches("\\r\\n").trim_end());
    let is_reply = |word: &str| word.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
    let mut count = 0;
    for word in words.filter(|word| word.len() > 1 && is_reply(word)) {
        let has_entry = entries.iter().any(|entry| entry.split(' ').next() == Some(word));
        assert!(has_entry, "man/beanstalkd-protocol.7 has no entry {word}");
        count += 1;
    }
    assert!(count >= 20, "reply.rs has changed its form");
}

/// CONTRIBUTING.md has this bound, so that each fact stays in one page. There is room for a few commands more.
#[test]
fn the_man_pages_have_at_most_3100_lines() {
    let count: usize = files_below("man").iter().map(|path| read(path).lines().count()).sum();
    assert!((1000..=3100).contains(&count), "the pages have {count} lines");
}

#[test]
fn versions_agree() {
    let version = env!("CARGO_PKG_VERSION");
    let shown = beanstalkd::options::version();
    let debian = format!("beanstalkd ({}+server{version}-", beanstalkd::testing::stats::VERSION);
    let places = [
        ("CHANGELOG.md", format!("## {version}")),
        ("README.md", shown.clone()),
        ("man/beanstalkd.1", shown),
    ];
    for (place, version) in places {
        assert!(read(place).contains(&version), "{place} has another version than {version}");
    }
    let is_debian = read("dist/debian/changelog").starts_with(&debian);
    assert!(is_debian, "dist/debian/changelog does not begin with {debian}");
}

/// `dist/grafana/dashboard.py` has the table of its panels.
#[test]
fn the_dashboard_is_what_its_table_generates() {
    let Some(generated) = python(&["dist/grafana/dashboard.py"]) else { return };
    let is_same = generated == read("dist/grafana/beanstalkd.json");
    assert!(is_same, "generate dist/grafana/beanstalkd.json again with dashboard.py");
}

/// The source, and something for each pattern of `include` in Cargo.toml.
#[test]
fn the_package_has_what_its_users_need() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = std::process::Command::new(cargo);
    command.args(["package", "--list", "--allow-dirty", "--offline"]).current_dir(root());
    let output = command.output().expect("cargo can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let list = String::from_utf8_lossy(&output.stdout);
    let manifest = read("Cargo.toml");
    let (_, patterns) = manifest.split_once("\ninclude = [").expect("it has the list");
    let (patterns, _) = patterns.split_once("\n]").expect("the list ends");
    let patterns: Vec<&str> = patterns.split('"').skip(1).step_by(2).collect();
    assert!(patterns.len() >= 15, "only {} patterns", patterns.len());
    for pattern in patterns {
        let start = pattern.trim_start_matches('/').split('*').next().expect("it has a start");
        assert!(list.lines().any(|path| path.starts_with(start)), "nothing is {pattern}");
    }
    let in_src = list.lines().filter(|path| path.starts_with("src/"));
    let mut sources: Vec<PathBuf> = in_src.map(|path| root().join(path)).collect();
    sources.sort();
    assert_eq!(sources, files_below("src"));
}

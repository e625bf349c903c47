//! The cost of operations: our server against any others, in one run.
//!
//! `make bench AGAINST='/usr/bin/beanstalkd'` runs all scenarios; `ARGS='--only tubes'` those
//! with this in their names. Servers are started by the benchmark, on one core, while it
//! drives them from another; the servers run in turns, and medians are printed. A built-in
//! server without a queue gives the ceiling.
//!
//! This file owns the command line, [`scenarios`] what is measured, [`rounds`] the order of servers,
//! [`server`] a server and its figures, [`machine`] the cores, [`instructions`] their count in user
//! space, [`client`] the load generator, [`load`] the requests, [`scrape`] the scrapes next to the
//! load, [`report`] and [`picture`] the output.
#![allow(unreachable_pub, reason = "a program has no interface")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![allow(clippy::cast_precision_loss, reason = "figures have three digits")]

mod client;
mod figures;
#[path = "../harness/mod.rs"]
mod harness;
mod instructions;
mod limit;
mod load;
mod machine;
mod picture;
mod reply;
mod report;
mod rounds;
mod scenarios;
mod scrape;
mod server;
mod trace;
mod waits;

use getopts::{Matches, Options};
use harness::program;
use report::Document;
use scenarios::{Scenario, Settings};
use server::Program;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    // cargo adds a flag of its own.
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [flag, body_size, address] = &arguments[..]
        && flag == "--limit-server"
    {
        let body_size = body_size.parse().expect("the benchmark passes a number");
        limit::serve(address.parse().expect("the benchmark passes an address"), body_size);
    }
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Wrong(what)) => {
            eprintln!("bench: {what}\nmake bench ARGS=--help lists the flags");
            ExitCode::from(2)
        }
    }
}

const USAGE: &str = "Use: bench [OPTIONS] SERVER [SERVER...]

Measures beanstalkd servers. Ratios compare all others with the first, and the first with
a server that keeps no queue.";

/// An error of the command line or of a file.
struct Wrong(String);

fn options() -> Options {
    let mut options = Options::new();
    options
        .optmulti("", "only", "only scenarios with this in their names; may be repeated", "TEXT")
        .optopt("", "rounds", "measured rounds (default: as the scenario says)", "N")
        .optopt(
            "",
            "patience",
            "how long a server may take for each step beside the measured rounds before it \
             counts as too slow, and five times that to be filled with millions of jobs \
             (default: 20)",
            "SECONDS",
        )
        .optopt("", "json", "write all figures of all rounds to this file", "FILE")
        .optopt("", "picture", "draw a picture of what --from has; measure nothing", "FILE")
        .optopt("", "from", "what an earlier run has written with --json", "FILE")
        .optflag(
            "",
            "instructions",
            "count the instructions in user space of a command with valgrind, on 1 and on 50 \
             connections, and measure nothing else",
        )
        .optflag("", "list", "list the scenarios, measure nothing")
        .optflag("h", "help", "show this help");
    options
}

fn run(arguments: &[String]) -> Result<(), Wrong> {
    let matches = options().parse(arguments).map_err(|fail| Wrong(fail.to_string()))?;
    if matches.opt_present("help") {
        println!("{}", options().usage(USAGE));
        return Ok(());
    }
    match (matches.opt_str("picture"), matches.opt_str("from")) {
        (Some(to), Some(from)) => return draw(&to, &from),
        (None, None) => {}
        _ => return Err(Wrong("--picture and --from go together".to_owned())),
    }
    let counts_instructions = matches.opt_present("instructions");
    let all =
        if counts_instructions { scenarios::counting_instructions() } else { scenarios::all() };
    let scenarios = program::chosen(&matches, all, |scenario| &scenario.name).map_err(Wrong)?;
    if matches.opt_present("list") {
        for scenario in &scenarios {
            println!("{:20} {}", scenario.name, scenario.what);
        }
        return Ok(());
    }
    if counts_instructions && !instructions::can_be_counted() {
        println!("SKIPPED: valgrind is not installed, instructions are not counted");
        return Ok(());
    }
    measure(&matches, &scenarios)
}

fn draw(to: &str, from: &str) -> Result<(), Wrong> {
    let text = std::fs::read_to_string(from).map_err(|error| Wrong(format!("{from}: {error}")))?;
    let document =
        serde_json::from_str(&text).map_err(|error| Wrong(format!("{from}: {error}")))?;
    let picture = picture::draw(&document).ok_or_else(|| {
        Wrong(format!("{from}: has no figures to draw, they come of --only tubes- --only deep-"))
    })?;
    write_file(to, &picture)
}

fn write_file(path: &str, text: &str) -> Result<(), Wrong> {
    std::fs::write(path, text).map_err(|error| Wrong(format!("{path}: {error}")))
}

fn measure(matches: &Matches, scenarios: &[Scenario]) -> Result<(), Wrong> {
    const PATIENCE_S: u64 = 20;
    let settings = Settings {
        rounds: program::number(matches, "rounds").map_err(Wrong)?,
        patience: Duration::from_secs(
            program::number(matches, "patience").map_err(Wrong)?.unwrap_or(PATIENCE_S),
        ),
    };
    if settings.rounds == Some(0) {
        return Err(Wrong("--rounds: at least one is needed".to_owned()));
    }
    if matches.free.is_empty() {
        return Err(Wrong("name at least one server".to_owned()));
    }
    let programs = matches.free.iter().map(|path| Program::find(path).map_err(Wrong));
    let mut programs = programs.collect::<Result<Vec<Program>, Wrong>>()?;
    programs.push(Program::Limit);
    machine::move_to_second_core();
    if machine::core_count() == 1 {
        eprintln!(
            "bench: server and client share the only core: latencies and stalls mean nothing here"
        );
    }
    let open_files = program::raise_open_files();
    let mut document = Document::default();
    let json = matches.opt_str("json");
    // Before anything else, in case it cannot be written; and again after each scenario, so that
    // an aborted benchmark leaves its figures.
    let write = |document: &Document| match &json {
        Some(path) => write_file(path, &document.text(&programs)),
        None => Ok(()),
    };
    write(&document)?;
    for scenario in scenarios {
        let needed = rounds::open_files(scenario, &programs);
        if needed > open_files {
            let name = &scenario.name;
            eprintln!("bench: {name} left out: needs {needed} open files, may have {open_files}");
            continue;
        }
        let rows = rounds::play(scenario, &programs, &settings);
        if rows.is_empty() {
            eprintln!("bench: {} left out: none of the servers can do it", scenario.name);
            continue;
        }
        report::print(scenario, &rows);
        document.add(scenario, &rows);
        write(&document)?;
    }
    Ok(())
}

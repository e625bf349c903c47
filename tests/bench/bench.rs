//! The cost of operations: our server against any others, in one run.
//!
//! `make bench AGAINST='/usr/bin/beanstalkd'` runs all scenarios; `ARGS='--only tubes'` those
//! with this in their names. Servers are started by the benchmark, on one core, while it
//! drives them from another; the servers run in turns, and medians are printed. A built-in
//! server without a queue gives the ceiling.
//!
//! This file owns the command line and the order of servers, [`scenarios`] what is measured,
//! [`server`] a server and its figures, [`machine`] the kernel's counts, [`load`] what clients send,
//! [`client`] their connections, [`probe`] the clients next to them, [`report`] the output.
#![allow(unreachable_pub, reason = "a program has no interface")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![allow(clippy::cast_precision_loss, reason = "figures have three digits")]

mod client;
#[path = "../harness/mod.rs"]
mod harness;
mod limit;
mod load;
mod machine;
mod probe;
mod report;
mod scenarios;
mod server;

use getopts::{Matches, Options};
use harness::process::raise_open_files;
use report::{Row, Series};
use scenarios::Scenario;
use server::{Program, Server};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    // cargo adds a flag of its own.
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [flag, body_len, address] = &arguments[..]
        && flag == "--limit-server"
    {
        let body_len = body_len.parse().expect("the benchmark passes a number");
        limit::serve(address.parse().expect("the benchmark passes an address"), body_len);
    }
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(wrong) => {
            eprintln!("bench: {wrong}\nmake bench ARGS=--help lists the flags");
            ExitCode::from(2)
        }
    }
}

const USAGE: &str = "Use: bench [OPTIONS] SERVER [SERVER...]

Measures beanstalkd servers. Ratios compare all others with the first, and the first with
a server that keeps no queue.";

fn options() -> Options {
    const INSTRUCTIONS: &str = "count the instructions in user space of a command with valgrind, \
        and measure nothing else";
    let mut options = Options::new();
    options
        .optmulti("", "only", "only scenarios with this in their names; may be repeated", "TEXT")
        .optopt("", "rounds", "measured rounds (default: as the scenario says)", "N")
        .optflag("", "instructions", INSTRUCTIONS)
        .optflag("", "list", "list the scenarios, measure nothing")
        .optflag("h", "help", "show this help");
    options
}

/// Does what the arguments ask for; returns what is wrong with them.
fn run(arguments: &[String]) -> Result<(), String> {
    let matches = options().parse(arguments).map_err(|fail| fail.to_string())?;
    if matches.opt_present("help") {
        println!("{}", options().usage(USAGE));
        return Ok(());
    }
    let counts_instructions = matches.opt_present("instructions");
    let mut scenarios = scenarios::all();
    scenarios.retain(|scenario| scenario.counts_instructions == counts_instructions);
    let only = matches.opt_strs("only");
    let is_named = |text: &String| scenarios.iter().any(|it| it.name.contains(text));
    if let Some(text) = only.iter().find(|text| !is_named(text)) {
        return Err(format!("--only {text}: no scenario has this in its name"));
    }
    scenarios.retain(|it| only.is_empty() || only.iter().any(|text| it.name.contains(text)));
    if matches.opt_present("list") {
        for scenario in &scenarios {
            println!("{:22} {}", scenario.name, scenario.what);
        }
        return Ok(());
    }
    if counts_instructions && Command::new("valgrind").arg("--version").output().is_err() {
        return Err("--instructions: valgrind is not installed".to_owned());
    }
    measure(&matches, &scenarios)
}

fn measure(matches: &Matches, scenarios: &[Scenario]) -> Result<(), String> {
    let rounds = matches.opt_get::<usize>("rounds");
    let rounds = rounds.map_err(|error| format!("--rounds: {error}"))?;
    if rounds == Some(0) || matches.free.is_empty() {
        return Err("name at least one server, and at least one round".to_owned());
    }
    let programs = matches.free.iter().map(|path| Program::find(path));
    let mut programs = programs.collect::<Result<Vec<Program>, String>>()?;
    programs.push(Program::limit());
    machine::move_to_second_core();
    if machine::CORES.len() == 1 {
        eprintln!("bench: server and client share the only core: latencies mean nothing here");
    }
    let open_files = raise_open_files();
    for Program { name, version, .. } in &programs {
        println!("{name}: {version}");
    }
    for scenario in scenarios {
        let name = &scenario.name;
        if scenario.open_files > open_files {
            let needed = scenario.open_files;
            eprintln!("bench: {name} left out: needs {needed} open files, may have {open_files}");
            continue;
        }
        let rows = play(scenario, &programs, rounds.unwrap_or(scenario.rounds));
        if rows.is_empty() {
            eprintln!("bench: {name} left out: none of the servers can do it");
            continue;
        }
        report::print(scenario, &rows);
    }
    Ok(())
}

/// Runs a scenario with all programs that can take part in it. They take their rounds in turn, each
/// with a fresh server that has the machine to itself, so that whatever else the machine does falls
/// on all of them. In one round more, system calls are counted.
fn play<'p>(scenario: &Scenario, programs: &'p [Program], rounds: usize) -> Vec<Row<'p>> {
    let players = programs.iter().filter(|program| program.can_play(scenario));
    let mut rows: Vec<Row<'_>> =
        players.map(|program| Row { program, series: Some(Series::default()) }).collect();
    for round in 0..rounds + usize::from(scenario.is_traced) {
        let is_traced = round == rounds;
        for Row { program, series } in &mut rows {
            let Some(known) = series else { continue };
            let mut server = Server::start(program, scenario);
            server.is_traced = is_traced;
            match (scenario.round)(&mut server) {
                Ok(figures) => known.add(figures, is_traced),
                // A server that only a tracer makes too slow keeps what was measured without.
                Err(_) if is_traced => {}
                Err(_) => *series = None,
            }
        }
    }
    rows
}

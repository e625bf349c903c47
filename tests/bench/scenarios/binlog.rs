//! Jobs on disk: what each promise about syncing costs, starting up, and space that is
//! used again next to jobs that stay.

use super::{ROUND, Round, Scenario, Settings, Turns};
use crate::client::{Limits, Outcome, Pool, Question};
use crate::figures::Figures;
use crate::load::{Cycle, Fill, Say};
use crate::server::{MIB, Server, Setup};
use std::time::{Duration, Instant};

pub fn all() -> Vec<Scenario> {
    const PROMISES: [(&str, &[&str]); 3] =
        [("f0", &["-f", "0"]), ("f50", &["-f", "50"]), ("F", &["-F"])];
    const CLIENTS: [(&str, usize, usize); 3] = [("1", 1, 1), ("50", 50, 1), ("pipelined", 1, 100)];
    let mut all = Vec::new();
    for (promise, flags) in PROMISES {
        for (clients, connections, batch) in CLIENTS {
            all.push(cycle(&format!("binlog-{promise}-{clients}"), flags, connections, batch));
        }
    }
    all.extend([start_up(), churn()]);
    all
}

fn with_binlog(flags: &[&str]) -> Setup {
    let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
    Setup { flags, has_binlog: true, ..Setup::default() }
}

fn cycle(name: &str, flags: &[&str], connections: usize, batch: usize) -> Scenario {
    let what = format!(
        "put, reserve, delete of 64 bytes with {}; connections: {connections}, \
         requests to a write: {batch}",
        flags.join(" ")
    );
    let scenario = Scenario::new(name, what, move |server, _| {
        let mut pool = Pool::connect(server.address, connections);
        Ok(Box::new(move |server| {
            let mut script = Cycle::new(connections, batch, 64);
            Ok(server.measure(|| pool.run(&mut script, Limits::lasting(ROUND)))?.figures())
        }))
    });
    Scenario { setup: with_binlog(flags), ..scenario }
}

/// Each server reads what it has written itself.
fn start_up() -> Scenario {
    const JOBS: usize = 1_000_000;
    let what = "from start to the first reply with a million live jobs of 150 bytes, \
                whose files the kernel has in memory";
    let prepare = |server: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = settings.patience;
        let mut producer = Pool::connect(server.address, 1);
        producer.run(&mut Fill::new(JOBS, 150), Limits::within(patience))?;
        Ok(Box::new(move |server| {
            server.terminate();
            let start = Instant::now();
            server.start_again(patience)?;
            let mut first = Pool::connect(server.address, 1);
            first
                .run(&mut Say::one_by_one(["use default".to_owned()]), Limits::within(patience))?;
            let mut figures = Figures::default();
            figures.add("elapsed_ms", start.elapsed().as_secs_f64() * 1e3);
            figures.add("cpu_ms", server.cpu_ns() as f64 / 1e6);
            figures.add("binlog_mib", server.binlog_bytes() / MIB);
            Ok(figures)
        }))
    };
    let setup = with_binlog(&["-F"]);
    Scenario {
        setup,
        rounds: 3,
        turns: Turns::Interleaved { is_traced: false },
        ..Scenario::new("start-up", what, prepare)
    }
}

fn churn() -> Scenario {
    let what = "20,000 jobs of 1 KiB stay while others come and go on 10 connections; \
                what is written and kept per byte needed, and the stalls of a probe that \
                puts and deletes";
    let prepare = |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = settings.patience;
        Ok(Box::new(move |server| churn_once(server, patience)))
    };
    let setup = with_binlog(&["-f", "50"]);
    Scenario { setup, rounds: 1, turns: Turns::Alone, ..Scenario::new("churn", what, prepare) }
}

fn churn_once(server: &Server, patience: Duration) -> Outcome<Figures> {
    const LIVE: usize = 20_000;
    const CONNECTIONS: usize = 10;
    const TIME: Duration = Duration::from_secs(8);
    let mut producer = Pool::connect(server.address, 1);
    let mut use_tube = Say::one_by_one(["use long-lived".to_owned()]);
    producer.run(&mut use_tube, Limits::within(patience))?;
    producer.run(&mut Fill::new(LIVE, BODY_SIZE), Limits::within(patience))?;
    let mut pool =
        Pool::with_probe(server.address, CONNECTIONS, Question::PutAndDelete, server.waits());
    // What its connection had to wait for is not of the churn.
    pool.take_stalls();
    let mut script = Cycle::new(CONNECTIONS, 1, BODY_SIZE);
    let before_bytes = server.written_bytes();
    let measured = server.measure(|| pool.run(&mut script, Limits::lasting(TIME)))?;
    let written_bytes = server.written_bytes() - before_bytes;
    // A put, a reserve and a delete; the reserve is not recorded.
    let needed_bytes = measured.ops / 3.0 * (put_bytes("default") + RECORD_BYTES);
    let mut figures = pool.take_stalls().figures("");
    figures.add("written_per_needed", written_bytes / needed_bytes);
    let live_bytes = LIVE as f64 * put_bytes("long-lived");
    figures.add("kept_per_live", server.binlog_bytes() / live_bytes);
    figures.append(measured.figures());
    Ok(figures)
}

const BODY_SIZE: usize = 1024;

/// What version 7 of the format needs for a change of a job: the length of a name, and what
/// the job is now.
const RECORD_BYTES: f64 = 84.0;

/// And for a new job: the name of its tube and its body too.
fn put_bytes(tube: &str) -> f64 {
    RECORD_BYTES + (tube.len() + BODY_SIZE + b"\r\n".len()) as f64
}

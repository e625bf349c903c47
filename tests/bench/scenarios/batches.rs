//! The commands that C beanstalkd does not have: what many jobs at once cost, next to the single
//! commands that do the same, and how long other clients wait meanwhile.

use super::{Round, Scenario, Settings, Turns};
use crate::client::{Limits, Outcome, Pool, Question, Run, TooSlow};
use crate::figures::Figures;
use crate::load::{DrainAll, Fill, List, Say, Taking};
use crate::server::Server;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub fn all() -> Vec<Scenario> {
    vec![
        flush(),
        workers(),
        distant_worker(),
        list("list-1m", 1_000_000),
        list("list-10m", 10_000_000),
    ]
}

/// As many jobs as a user of beanstalkd once wanted to delete.
const FLUSHED: usize = 711_769;

/// A stall that the work causes begins within this time after it.
const AFTERMATH: Duration = Duration::from_secs(1);

fn flush() -> Scenario {
    let what = format!(
        "flush-tube of {FLUSHED} jobs: until a probe that asks every millisecond sees an empty tube, \
         without the time in which server or client waited for a core; processor time until the \
         reply; stalls are of the probe; single: the jobs are reserved and deleted, 100 to a write"
    );
    let prepare = |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = 5 * settings.patience;
        Ok(Box::new(move |server| {
            let mut figures = Figures::default();
            if server.has_extensions {
                figures.append(flush_all(server, patience)?);
            }
            figures.append(delete_all(server, patience)?);
            Ok(figures)
        }))
    };
    Scenario { rounds: 3, turns: Turns::Alone, ..Scenario::new("flush-712k", what, prepare) }
}

fn flush_all(server: &Server, patience: Duration) -> Outcome<Figures> {
    let mut others = filled(server, patience)?;
    let (address, is_over) = (server.address, AtomicBool::new(false));
    let waits = server.waits();
    let (cpu_before_ns, waited_before, start) = (server.cpu_ns(), waits.total(), Instant::now());
    let mut figures = Figures::default();
    let flushed = thread::scope(|scope| {
        let flusher = scope.spawn(|| {
            let reply = ask_alone(address, "flush-tube default", patience);
            is_over.store(true, Ordering::Relaxed);
            reply
        });
        let is_empty = others.watch_for_no_ready(patience);
        // The kernel counts the processor time of a running process in steps of some milliseconds.
        let visible = start.elapsed().saturating_sub(waits.total() - waited_before);
        figures.add("visible_ms", visible.as_secs_f64() * 1e3);
        others.watch_while(|| !is_over.load(Ordering::Relaxed), patience);
        figures.add("flush_cpu_ms", (server.cpu_ns() - cpu_before_ns) as f64 / 1e6);
        figures.add("flush_ms", start.elapsed().as_secs_f64() * 1e3);
        let reply = flusher.join().expect("the reply is a line");
        is_empty.then_some(reply).ok_or(TooSlow)
    })?;
    assert_eq!(flushed, format!("FLUSHED {FLUSHED}\r\n"));
    others.watch(AFTERMATH);
    figures.append(others.take_stalls().figures(""));
    Ok(figures)
}

/// Sends a line on a connection of its own; returns the reply.
fn ask_alone(address: SocketAddr, line: &str, patience: Duration) -> String {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(patience)).expect("the option can be set");
    stream.write_all(format!("{line}\r\n").as_bytes()).expect("the server reads");
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).expect("the server answers");
    reply
}

fn delete_all(server: &Server, patience: Duration) -> Outcome<Figures> {
    let mut others = filled(server, patience)?;
    let mut script = DrainAll::new(1, Taking::Pipelined(100));
    let measured = server.measure(|| others.run(&mut script, Limits::within(patience)))?;
    assert_eq!(script.deleted, FLUSHED as u64);
    others.watch(AFTERMATH);
    let mut figures = Figures::default();
    figures.add("single_cpu_ms", measured.cpu_us / 1e3);
    figures.append(others.take_stalls().figures("single_"));
    Ok(figures)
}

/// A connection and a probe, in front of a tube with these jobs.
fn filled(server: &Server, patience: Duration) -> Outcome<Pool> {
    let mut pool = Pool::with_probe(server.address, 1, Question::ReadyJobs, server.waits());
    pool.run(&mut Fill::new(FLUSHED, 64), Limits::within(patience))?;
    pool.take_stalls();
    pool.watch_for_ready(FLUSHED as u64, patience);
    Ok(pool)
}

fn workers() -> Scenario {
    const CONNECTIONS: usize = 50;
    let what = "50 workers reserve and delete jobs of 64 bytes: reserve-batch 100 and delete-batch; \
                100 single commands to a write; single commands one by one; an op is a job";
    let prepare = |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = settings.patience;
        Ok(Box::new(move |server| {
            let drain = |jobs, taking| {
                let script = DrainAll::new(CONNECTIONS, taking);
                drain(server, jobs, script, CONNECTIONS, patience)
            };
            let mut figures = Figures::default();
            if server.has_extensions {
                figures.append(drain(500_000, Taking::Batch(100))?.with_prefix("batch_"));
            }
            figures.append(drain(500_000, Taking::Pipelined(100))?.with_prefix("pipelined_"));
            figures.append(drain(100_000, Taking::Single)?.with_prefix("single_"));
            Ok(figures)
        }))
    };
    Scenario { rounds: 5, turns: Turns::Alone, ..Scenario::new("batch-workers", what, prepare) }
}

fn distant_worker() -> Scenario {
    const ROUND_TRIP: Duration = Duration::from_micros(100);
    let what = "one worker, to which each round trip takes 0.1 ms more, reserves and deletes jobs of \
                64 bytes: reserve-batch 100 and delete-batch; single commands; an op is a job";
    let prepare = |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = settings.patience;
        Ok(Box::new(move |server| {
            let drain = |jobs, taking| {
                let script = DrainAll::from_afar(taking, ROUND_TRIP);
                drain(server, jobs, script, 1, patience)
            };
            let mut figures = Figures::default();
            if server.has_extensions {
                figures.append(drain(200_000, Taking::Batch(100))?.with_prefix("batch_"));
            }
            figures.append(drain(4000, Taking::Single)?.with_prefix("single_"));
            Ok(figures)
        }))
    };
    Scenario { rounds: 5, turns: Turns::Alone, ..Scenario::new("batch-distant", what, prepare) }
}

/// Puts jobs, and has the script reserve and delete them all.
fn drain(
    server: &Server,
    jobs: usize,
    mut script: DrainAll,
    connections: usize,
    patience: Duration,
) -> Outcome<Figures> {
    let mut producer = Pool::connect(server.address, 1);
    producer.run(&mut Fill::new(jobs, 64), Limits::within(patience))?;
    let mut pool = Pool::connect(server.address, connections);
    let mut measured = server.measure(|| pool.run(&mut script, Limits::within(patience)))?;
    assert_eq!(script.deleted, jobs as u64);
    measured.ops = jobs as f64;
    Ok(measured.figures().only(&["cpu_us_per_op", "ops_per_s"]))
}

fn list(name: &str, others: usize) -> Scenario {
    /// Put at even distances, so that their ids are far apart.
    const FEW: usize = 10;
    const FULL: usize = 1000;
    const PAGES: usize = 500;
    let what = format!(
        "list-jobs of a tube with {FEW} jobs while another tube has {others}, and of a page of \
         {FULL} jobs of that tube from its middle; an op is a page"
    );
    let prepare = move |server: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = 5 * settings.patience;
        let mut pool = Pool::connect(server.address, 1);
        for _ in 0..FEW {
            pool.run(&mut Fill::new(others / FEW, 64), Limits::within(patience))?;
            pool.run(&mut Say::one_by_one(["use few".to_owned()]), Limits::within(patience))?;
            pool.run(&mut Fill::new(1, 64), Limits::within(patience))?;
            pool.run(&mut Say::one_by_one(["use default".to_owned()]), Limits::within(patience))?;
        }
        Ok(Box::new(move |server| {
            let mut list = |line: String, jobs: usize, prefix: &str| -> Outcome<Figures> {
                let mut script = List { line, left: PAGES, jobs: jobs as u64 };
                let run = || -> Outcome<Run> { pool.run(&mut script, Limits::within(patience)) };
                let figures = server.measure(run)?.figures();
                Ok(figures.only(&["cpu_us_per_op", "p50_us", "max_us"]).with_prefix(prefix))
            };
            let mut figures = list("list-jobs few any 100".to_owned(), FEW, "few_")?;
            let middle = format!("list-jobs default any {FULL} {}", others / 2);
            figures.append(list(middle, FULL, "full_")?);
            Ok(figures)
        }))
    };
    let scenario = Scenario::new(name, what, prepare);
    Scenario { rounds: 3, needs_extensions: true, ..scenario }
}

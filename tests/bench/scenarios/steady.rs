//! Loads that go on unchanged: put, reserve, delete, by few clients or many, one by one or
//! pipelined, with and without a binlog, beside many tubes, and by clients that come and go. The
//! same loads count instructions.

use super::{CONSUME, Scenario, watch_all};
use crate::client::{Outcome, nanoseconds};
use crate::harness::client::Client;
use crate::load::{Load, Run, Step, Writes};
use crate::probe::Probe;
use crate::report::Figures;
use crate::server::{MIB, Server};
use std::time::{Duration, Instant};

/// A name, how many connections, and how many requests to a write.
type Clients = (&'static str, usize, usize);
const CLIENTS: [Clients; 3] = [("1", 1, 1), ("50", 50, 1), ("pipelined", 1, 100)];
const MORE: [Clients; 2] = [("50-pipelined", 50, 100), ("400", 400, 1)];
const USE: Writes = &[&[Step::Use]];
/// A worker that watches all tubes.
const WATCH: Writes = &[&[Step::Use, Step::Put], &[Step::Reserve], &[Step::Delete]];
/// Short-lived clients of a round: few enough for the ports that the kernel has to give away.
const SESSIONS: usize = 2000;

pub fn all() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (name, connections, batch, body_len) in [
        ("ping-pong", 1, 1, 64),
        ("50-connections", 50, 1, 64),
        ("50-connections-1k", 50, 1, 1024),
        ("50-connections-60k", 50, 1, 60 << 10),
        ("50-connections-1m", 50, 1, 1 << 20),
        ("pipelined", 1, 100, 64),
        ("50-pipelined", 50, 100, 64),
    ] {
        // Bodies above the limit that servers have by default.
        let flags = if body_len > 65_535 { format!("-z{body_len}") } else { String::new() };
        let load = Load { batch, body_len, ..Load::cycle() };
        all.push(Scenario { has_limit: true, ..steady(name, connections, &flags, load) });
    }
    for (prefix, writes, connections, counts) in [
        ("tubes", Load::cycle().writes, 10, &[1, 1000, 10_000, 100_000][..]),
        ("use", USE, 10, &[1, 1000, 10_000, 100_000]),
        ("watch", WATCH, 1, &[1, 1000]),
    ] {
        for &tubes in counts {
            let load = Load { tubes, ..Load::of(writes) };
            all.push(steady(&format!("{prefix}-{tubes}"), connections, "", load));
        }
    }
    for (promise, flags, more) in
        [("f0", "-f 0", &MORE[..]), ("f50", "-f 50", &[]), ("F", "-F", &[])]
    {
        for &(clients, connections, batch) in CLIENTS.iter().chain(more) {
            let (name, flags) = (format!("binlog-{promise}-{clients}"), format!("-b DIR {flags}"));
            all.push(steady(&name, connections, &flags, Load { batch, ..Load::cycle() }));
        }
    }
    for (prefix, flags, has_limit) in [
        ("instructions", "", true),
        ("instructions-metrics", "--metrics METRICS", false),
        ("instructions-binlog", "-b DIR -F", false),
    ] {
        for (clients, connections, batch) in CLIENTS {
            let load = Load { batch, ..Load::cycle() };
            let scenario = instructions(&format!("{prefix}-{clients}"), connections, flags, load);
            all.push(Scenario { has_limit, ..scenario });
        }
    }
    all.extend([hand_off("hand-off", 1000, 0), hand_off("hand-off-tubes", 100, 1000)]);
    all.push(short("short-put", "use, put", 0, |client| {
        client.ask("use default\r\n");
        client.put("hello");
    }));
    all.push(short("short-work", "watch, ignore, reserve, delete", SESSIONS, |client| {
        client.ask("watch default\r\n");
        client.ask("ignore other\r\n");
        let id = client.ask("reserve\r\n").number("RESERVED").expect("there are jobs");
        client.ask(format!("delete {id}\r\n"));
    }));
    all
}

/// Measures a load that goes on for a while, beside tubes that a connection watches.
fn steady(name: &str, connections: usize, flags: &str, load: Load) -> Scenario {
    let Load { batch, body_len, tubes, .. } = load;
    let mut what = describe(connections, flags, &load);
    if tubes > 0 {
        what += &format!("; tubes that exist: {tubes}");
    }
    let is_worker = load.writes == WATCH;
    if is_worker {
        what += ", all watched by the worker; an op is a job";
    }
    // Large bodies take so long that a round does, too.
    let time = Duration::from_millis(if body_len * batch > 65_535 { 1000 } else { 300 });
    let round = move |server: &mut Server| {
        let mut keeper = watch_all(server, 1, tubes)?;
        let mut others = server.connect(connections);
        let pool = if is_worker { &mut keeper } else { &mut others };
        // Warms up.
        pool.run_for(&load, time)?;
        let mut measured = server.measure(|| pool.run_for(&load, time))?;
        if is_worker {
            measured.ops /= WATCH.concat().len() as f64;
        }
        let rss_mib = server.rss_bytes() / MIB;
        Ok(measured.figures().with("", Figures::of([("rss_mib", rss_mib)])))
    };
    let scenario = Scenario::new(name, 5, what, round);
    Scenario { flags: flags.to_owned(), body_len, is_traced: true, ..scenario }
}

fn describe(connections: usize, flags: &str, load: &Load) -> String {
    let Load { batch, body_len, .. } = load;
    let steps: Vec<String> = load.writes.concat().iter().map(|step| format!("{step:?}")).collect();
    let steps = steps.join(", ").to_lowercase();
    let flags = if flags.is_empty() { String::new() } else { format!("; flags: {flags}") };
    format!(
        "{steps} of {body_len} bytes; connections: {connections}; requests to a write: {batch}{flags}"
    )
}

/// Two runs, of which one is longer, so that starting, connecting and ending do not count. They
/// are made only when asked for: in valgrind a server takes fifty times as long.
fn instructions(name: &str, connections: usize, flags: &str, load: Load) -> Scenario {
    let what = format!("{}; in valgrind", describe(connections, flags, &load));
    let round = move |server: &mut Server| {
        let mut count = |jobs| -> Outcome<(f64, f64)> {
            let run = server.connect(connections).run(&Load { jobs, ..load.clone() })?;
            server.terminate();
            let counted = (run.replies as f64, server.instructions());
            server.start_again()?;
            Ok(counted)
        };
        let ((few, short), (many, long)) = (count(1_000)?, count(10_000)?);
        Ok(Figures::of([("user_instructions_per_op", (long - short) / (many - few))]))
    };
    let scenario = Scenario::new(name, 1, what, round);
    Scenario { flags: flags.to_owned(), counts_instructions: true, ..scenario }
}

fn hand_off(name: &str, workers: usize, tubes: usize) -> Scenario {
    const TIME: Duration = Duration::from_millis(300);
    let what = format!(
        "one producer, {workers} workers waiting in reserve; each watches this number of tubes \
         more: {tubes}; from put to RESERVED, an op is a job; stalls are of a probe"
    );
    let round = move |server: &mut Server| {
        let mut pool = watch_all(server, 1 + workers, tubes)?;
        let producer: Writes = if tubes > 0 { &[&[Step::Use, Step::Put]] } else { &[&[Step::Put]] };
        let load = Load { producer, tubes, ..Load::of(CONSUME) };
        pool.run_for(&load, TIME / 3)?;
        let mut measured = Probe::beside(server, "use default", || {
            let mut run = pool.run_for(&load, TIME)?;
            run.latencies = hand_off_times(&run);
            Ok(run)
        })?;
        measured.ops = measured.run.latencies.len() as f64;
        Ok(measured.figures())
    };
    let open_files = 500 + workers as u64;
    Scenario { open_files, is_traced: true, ..Scenario::new(name, 5, what, round) }
}

/// From each put to the RESERVED that came of it. The ids of jobs follow each other.
fn hand_off_times(run: &Run) -> Vec<u64> {
    let first_id = run.reserved.iter().map(|&(id, _)| id).min().unwrap_or_default();
    let time = |&(id, reserved_at): &(u64, Instant)| {
        let index = usize::try_from(id - first_id).expect("few jobs were put");
        nanoseconds(reserved_at - run.put_at[index])
    };
    run.reserved.iter().map(time).collect()
}

/// Clients that come and go.
fn short(name: &str, what: &str, jobs: usize, session: fn(&mut Client)) -> Scenario {
    const BODY_LEN: usize = 5;
    let what = format!("short-lived clients: connect, {what}, quit; an op is a session");
    let round = move |server: &mut Server| {
        server.run(&Load { body_len: BODY_LEN, ..Load::put(jobs) })?;
        let measured = server.measure(|| {
            let latencies = (0..SESSIONS).map(|_| {
                let start = Instant::now();
                let mut client = Client::connect(server.address);
                session(&mut client);
                client.send("quit\r\n");
                // The server closes first, so that no port of the client's stays occupied.
                assert!(client.is_at_end(), "a reply after quit");
                nanoseconds(start.elapsed())
            });
            Ok(Run { latencies: latencies.collect(), replies: SESSIONS as u64, ..Run::default() })
        })?;
        Ok(measured.figures())
    };
    let scenario = Scenario::new(name, 5, what, round);
    Scenario { body_len: BODY_LEN, has_limit: true, is_traced: true, ..scenario }
}

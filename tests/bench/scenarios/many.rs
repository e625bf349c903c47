//! The commands that C beanstalkd does not have: what many jobs at once cost, next to the single
//! commands that do the same, and how long other clients wait meanwhile. Flushing is in `timers`.

use super::{Scenario, watch_all};
use crate::client::Outcome;
use crate::harness::client::Client;
use crate::load::{Load, Step, Writes};
use crate::probe::Probe;
use crate::report::Figures;
use crate::server::Server;
use std::time::Duration;

pub fn all() -> Vec<Scenario> {
    vec![
        drains("batch-workers", 50, Duration::ZERO, [500_000, 500_000, 100_000]),
        drains("batch-distant", 1, Duration::from_micros(100), [200_000, 0, 4000]),
        batch_of_tubes(),
        list("list-1m", 1_000_000),
        list("list-10m", 10_000_000),
    ]
}

/// Each load with the number of its jobs; none where a load is left out.
fn drains(name: &str, workers: usize, round_trip: Duration, jobs: [usize; 3]) -> Scenario {
    const SINGLE: Writes = &[&[Step::ReserveNow], &[Step::Delete]];
    const BATCH: Writes = &[&[Step::ReserveBatch], &[Step::DeleteBatch]];
    let what = format!(
        "workers that reserve and delete jobs of 64 bytes: {workers}; time added to each round \
         trip: {round_trip:?}; reserve-batch 100 and delete-batch; 100 single commands to a write; \
         single commands one by one; an op is a job"
    );
    Scenario::new(name, 5, what, move |server| {
        let mut figures = Figures::default();
        let loads = [("batch_", BATCH, 100), ("pipelined_", SINGLE, 100), ("single_", SINGLE, 1)];
        for ((prefix, writes, batch), jobs) in loads.into_iter().zip(jobs) {
            if jobs == 0 || (writes == BATCH && !server.has_extensions) {
                continue;
            }
            server.run(&Load::put(jobs))?;
            let mut pool = server.connect(workers);
            let drain = Load { batch, round_trip, ..Load::of(writes) };
            let mut measured = server.measure(|| pool.run(&drain))?;
            assert_eq!(measured.run.deleted, jobs);
            measured.ops = jobs as f64;
            let costs = measured.figures().only(&["cpu_us_per_op", "ops_per_s"]);
            figures = figures.with(prefix, costs);
        }
        Ok(figures)
    })
}

/// The jobs are in random tubes, so that a batch has to find tubes with jobs among the others.
fn batch_of_tubes() -> Scenario {
    const TUBES: usize = 10_000;
    const JOBS: usize = 20_000;
    let what = format!(
        "reserve-batch 1000 by a worker that watches {TUBES} tubes with {JOBS} jobs, until none is \
         ready; an op is a job; stalls are of a probe"
    );
    let scenario = Scenario::new("batch-tubes", 3, what, |server| {
        let mut worker = watch_all(server, 1, TUBES)?;
        // A random tube for each job: one `use` and one `put` to a write.
        let put = Load::of_jobs(&[&[Step::Use, Step::Put]], JOBS);
        server.run(&Load { tubes: TUBES, batch: 1, ..put })?;
        let reserve = Load { batch: 1000, ..Load::of(&[&[Step::ReserveBatch]]) };
        let mut measured = Probe::beside(server, "use default", || worker.run(&reserve))?;
        assert_eq!(worker.take_held().len(), JOBS);
        measured.ops = JOBS as f64;
        Ok(measured.figures().only(&["cpu_us_per_op", "max_us", "stall_ms", "stall_with_noise_ms"]))
    });
    Scenario { needs_extensions: true, ..scenario }
}

fn list(name: &str, others: usize) -> Scenario {
    /// Put at even distances, so that their ids are far apart.
    const FEW: usize = 10;
    const FULL: usize = 1000;
    let what = format!(
        "list-jobs of a tube with {FEW} jobs while another tube has {others}, and of a page of \
         {FULL} jobs of that tube from its middle; an op is a page"
    );
    let round = move |server: &mut Server| {
        let mut pool = server.connect(1);
        for _ in 0..FEW {
            pool.run(&Load::put(others / FEW))?;
            pool.say("use few")?;
            pool.run(&Load::put(1))?;
            pool.say("use default")?;
        }
        let few = measure_list(server, "few any 100", FEW)?;
        let full = measure_list(server, &format!("default any {FULL} {}", others / 2), FULL)?;
        Ok(Figures::default().with("few_", few).with("full_", full))
    };
    Scenario { needs_extensions: true, ..Scenario::new(name, 3, what, round) }
}

/// Asks for a page, which has this number of jobs, again and again.
fn measure_list(server: &Server, page: &str, jobs: usize) -> Outcome<Figures> {
    const PAGES: usize = 500;
    let line = format!("list-jobs {page}");
    let reply = Client::connect(server.address).ask(format!("{line}\r\n"));
    let listed = reply.text().lines().filter(|line| line.starts_with("- {")).count();
    assert_eq!(listed, jobs, "{line}");
    let measured = server.measure(|| server.run(&Load::lines(vec![line; PAGES])))?;
    Ok(measured.figures().only(&["cpu_us_per_op", "p50_us", "max_us"]))
}

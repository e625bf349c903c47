//! What happens between two steps while time passes. In the simulation a server ends all steps of one
//! moment before time goes on; here a busy server does not.

mod harness;

use harness::driver::{Client, Driver, End, Limits, Nanos, Options, START};
use std::collections::BTreeSet;

/// Each step does one job, or a few units of work.
fn server_in_small_steps() -> Driver {
    let limits = Limits {
        closing_work: 4,
        closing_slice_work: 4,
        jobs_per_touch_step: 1,
        jobs_per_reserve_step: 1,
        shared_work: 1,
        least_share_work: 1,
        ..Limits::DEFAULT
    };
    Driver::new(Options { limits, ..Options::DEFAULT }, START)
}

/// Returns the job that a worker has just received.
fn reserved(driver: &mut Driver, worker: Client) -> Option<u64> {
    let text = driver.take_text(worker);
    let number = text.strip_prefix("RESERVED ")?.split(' ').next()?;
    Some(number.parse().expect("an id is a number"))
}

/// Half of the TTRs of a closed connection run out before it has given back its jobs, and waiting workers
/// get these jobs. It must not give them back too.
#[test]
fn a_closing_connection_leaves_jobs_to_workers_that_have_them() {
    const JOBS: usize = 40;
    const WORKERS: usize = 30;
    let mut driver = server_in_small_steps();
    let holder = driver.connect();
    driver.ask(holder, "put 0 0 100 0\r\n\r\nput 0 0 1 0\r\n\r\n".repeat(JOBS / 2));
    driver.ask(holder, "reserve-batch 40\r\n");
    assert_eq!(driver.facts().reserved, JOBS as u64);
    let workers: Vec<Client> = (0..WORKERS).map(|_| driver.connect()).collect();
    for &worker in &workers {
        assert_eq!(driver.ask(worker, "reserve\r\n"), "");
    }
    driver.end(holder, End::HangUp);
    assert_eq!(driver.facts().closing, 1, "the jobs are given back in one step");
    driver.now = driver.now + Nanos::from_millis(1_001);
    driver.settle();
    let jobs: BTreeSet<u64> =
        workers.iter().filter_map(|&worker| reserved(&mut driver, worker)).collect();
    assert_eq!(jobs.len(), WORKERS, "a job has two workers, or a worker none");
    let facts = driver.facts();
    assert_eq!((facts.reserved, facts.ready), (WORKERS as u64, (JOBS - WORKERS) as u64));
    for &worker in &workers {
        assert_eq!(driver.ask(worker, "touch-all\r\n"), "TOUCHED_ALL 1\r\n");
    }
    driver.check();
}

/// The TTRs of some jobs run out between two steps of a `touch-all`: they are not counted, and the others
/// stay with their worker.
#[test]
fn jobs_that_come_back_during_a_touch_all_are_not_counted() {
    let mut driver = server_in_small_steps();
    let (worker, other) = (driver.connect(), driver.connect());
    driver.ask(worker, "put 0 0 100 0\r\n\r\n".repeat(5) + &"put 0 0 1 0\r\n\r\n".repeat(5));
    driver.ask(worker, "reserve-batch 10\r\n");
    driver.receive(worker, "touch-all\r\n");
    driver.iterate();
    assert!(driver.is_in_steps(worker), "all jobs were touched in one step");
    driver.now = driver.now + Nanos::from_millis(1_001);
    driver.settle();
    let text = driver.take_text(worker);
    let touched = text.strip_prefix("TOUCHED_ALL ").and_then(|rest| rest.trim_end().parse().ok());
    let touched: u64 = touched.unwrap_or_else(|| panic!("the reply is {text:?}"));
    let left = driver.facts().reserved;
    assert!((5..10).contains(&left), "{left} jobs are left");
    assert_eq!(touched, left, "jobs that have come back are counted, or others are not");
    let taken = driver.ask(other, "reserve-batch 10\r\n");
    assert!(taken.starts_with(&format!("RESERVED_BATCH {}\r\n", 10 - left)), "{taken}");
    driver.check();
}

/// Jobs of a batch come back and are taken by another worker before the batch is full: no job is in both
/// replies.
#[test]
fn a_job_that_comes_back_during_a_batch_has_one_worker() {
    let mut driver = server_in_small_steps();
    let (first, second) = (driver.connect(), driver.connect());
    driver.ask(first, "put 0 0 1 0\r\n\r\n".repeat(3) + &"put 1 0 100 0\r\n\r\n".repeat(9));
    driver.receive(first, "reserve-batch 12\r\n");
    for _ in 0..3 {
        driver.iterate();
    }
    assert!(driver.is_in_steps(first), "all jobs were reserved at once");
    driver.now = driver.now + Nanos::from_millis(1_001);
    driver.receive(second, "reserve-batch 3\r\n");
    driver.settle();
    let ids = |text: &str| -> Vec<u64> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("RESERVED "));
        lines.map(|rest| rest.split(' ').next().unwrap_or_default().parse().unwrap_or(0)).collect()
    };
    let (of_first, of_second) = (driver.take_text(first), driver.take_text(second));
    let both: Vec<u64> = [ids(&of_first), ids(&of_second)].concat();
    assert_eq!(both.iter().collect::<BTreeSet<_>>().len(), both.len(), "{both:?}");
    assert_eq!(driver.facts().reserved, both.len() as u64);
    for (client, text) in [(first, of_first), (second, of_second)] {
        let count = ids(&text).len();
        assert_eq!(driver.ask(client, "touch-all\r\n"), format!("TOUCHED_ALL {count}\r\n"));
    }
    driver.check();
}

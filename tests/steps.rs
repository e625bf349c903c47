//! What happens between two steps while time passes, and while there is no memory. In the simulation a
//! server ends all steps of one moment before time goes on; here a busy server does not.

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

/// Returns a server with a worker that has reserved jobs, and with buried and delayed jobs, 400 each. Their
/// priorities and delays are in no order, so that each place among ready or delayed jobs needs memory.
fn server_with_jobs_in_each_state() -> (Driver, Client) {
    let mut driver = Driver::new(Options::DEFAULT, START);
    let worker = driver.connect();
    let mut put = |pri: u32, delay: u32, ttr: u32| {
        let reply = driver.ask(worker, format!("put {pri} {delay} {ttr} 0\r\n\r\n"));
        assert!(reply.starts_with("INSERTED "), "{reply}");
    };
    (0..800).for_each(|number| put(number * 7_919 % 1_000, 0, 10 + number % 7));
    (0..400).for_each(|number| put(number * 7_919 % 1_000, 5 + number * 31 % 17, 10));
    driver.ask(worker, "reserve-batch 800\r\n");
    let ids: Vec<u64> = (1..=800).collect();
    for id in &ids[400..] {
        assert_eq!(driver.ask(worker, format!("bury {id} {}\r\n", id * 31 % 97)), "BURIED\r\n");
    }
    driver.check();
    (driver, worker)
}

/// Everything by which a job comes back works without memory, and no job is buried or lost. A second
/// after there is memory again, all jobs are in order.
#[test]
fn jobs_that_come_back_need_no_memory() {
    let (mut driver, worker) = server_with_jobs_in_each_state();
    let other = driver.connect();
    Driver::refuse_memory(true);
    for id in 1..=100 {
        let delay = id % 3 * 20;
        let released = driver.ask(worker, format!("release {id} {} {delay}\r\n", id % 11));
        assert_eq!(released, "RELEASED\r\n");
    }
    assert_eq!(driver.ask(other, "kick 399\r\n"), "KICKED 399\r\n");
    assert_eq!(driver.ask(other, "kick-job 800\r\n"), "KICKED\r\n");
    driver.check();
    // The TTRs of some jobs end, all short delays end, and the worker closes with the other jobs.
    driver.advance(Nanos::from_secs(13));
    assert!(driver.facts().reserved > 0);
    driver.end(worker, End::HangUp);
    driver.advance(Nanos::from_secs(30));
    driver.check();
    let facts = driver.facts();
    assert_eq!((facts.reserved, facts.buried, facts.ready + facts.delayed), (0, 0, 1_200));
    assert!(facts.ready > 0 && facts.delayed > 66, "{} jobs are delayed", facts.delayed);
    Driver::refuse_memory(false);
    driver.advance(Nanos::from_secs(1));
    driver.check();
    let facts = driver.facts();
    assert_eq!((facts.ready, facts.delayed), (1_200, 0), "the longest delay has ended");
    let text = driver.ask(other, "reserve-batch 1000\r\n");
    let ids = text.lines().filter_map(|line| line.strip_prefix("RESERVED ")?.split(' ').next());
    let ids: Vec<String> = ids.map(str::to_owned).collect();
    let mut pris = Vec::new();
    for id in ids {
        let stats = driver.ask(other, format!("stats-job {id}\r\n"));
        let pri = stats.lines().find_map(|line| line.strip_prefix("pri: "));
        pris.push(pri.and_then(|pri| pri.parse::<u32>().ok()).expect("a job has a priority"));
    }
    assert!(pris.len() == 1_000 && pris.is_sorted(), "{pris:?}");
}

/// Random commands while memory comes and goes: the counts of jobs stay right.
#[test]
fn no_job_is_lost_while_memory_comes_and_goes() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut driver = Driver::new(Options::DEFAULT, START);
        let mut clients: Vec<Client> = (0..4).map(|_| driver.connect()).collect();
        let (mut last_id, mut jobs) = (0, 0);
        for _ in 0..1_500 {
            let client = random.usize(..clients.len());
            let id = random.u64(..=last_id);
            let (pri, delay) = (random.u32(..50), random.u32(..3) * random.u32(..20));
            let (tube, count) = (random.u8(..2), random.u32(1..20));
            let command = match random.u8(..30) {
                0..12 => format!("put-in-tube t{tube} {pri} {delay} 9 0\r\n\r\n"),
                12..15 => format!("watch t{tube}\r\n"),
                15..18 => "reserve-with-timeout 0\r\n".repeat(count as usize),
                18 => format!("release {id} {pri} {delay}\r\n"),
                19 => format!("bury {id} {pri}\r\n"),
                20 => format!("use t{tube}\r\nkick {count}\r\n"),
                21 => format!("kick-job {id}\r\n"),
                22 => format!("delete {id}\r\n"),
                23 => format!("reserve-job {id}\r\n"),
                24 => format!("pause-tube t{tube} {}\r\n", random.u8(..3)),
                25 if random.u8(..20) == 0 => format!("flush-tube t{tube}\r\n"),
                26 if random.u8(..5) == 0 => {
                    driver.end(clients[client], End::HangUp);
                    clients[client] = driver.connect();
                    continue;
                }
                27 => {
                    Driver::refuse_memory(random.u8(..4) > 0);
                    continue;
                }
                _ => {
                    driver.advance(Nanos::from_millis(random.u64(..4_000)));
                    continue;
                }
            };
            let mut reply = driver.ask(clients[client], command);
            // A flush may end in a later iteration.
            driver.advance(Nanos::from_millis(1));
            reply += &driver.take_text(clients[client]);
            for line in reply.lines() {
                let number =
                    |word| line.strip_prefix(word).and_then(|rest| rest.parse::<u64>().ok());
                if let Some(id) = number("INSERTED ") {
                    (last_id, jobs) = (id, jobs + 1);
                }
                jobs -= number("FLUSHED ").unwrap_or(0) + u64::from(line == "DELETED");
            }
            driver.check();
            let facts = driver.facts();
            let sum = facts.ready + facts.reserved + facts.delayed + facts.buried;
            assert_eq!(sum, jobs, "seed {seed}: {reply:?}");
        }
        Driver::refuse_memory(false);
        driver.advance(Nanos::from_secs(60));
        driver.check();
        assert_eq!(driver.facts().delayed, 0, "seed {seed}");
    }
}

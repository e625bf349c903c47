//! What happens between two steps while time passes, and while there is no memory. In the simulation a
//! server ends all steps of one moment before time goes on; here a busy server does not.

mod harness;

use harness::driver::{Client, Driver, End, Facts, Limits, Nanos, Options, START};
use harness::fake_disk::FakeDisk;
use harness::reply::numbers;
use harness::request::put;
use harness::yaml;
use std::collections::BTreeSet;
use std::num::NonZero;

#[global_allocator]
static ALLOCATOR: beanstalkd::Allocator = beanstalkd::Allocator;

/// Each step does one job, or a few units of work.
const SMALL_STEPS: Limits = Limits {
    closing_work: 4,
    closing_slice_work: 4,
    jobs_per_touch_step: 1,
    jobs_per_batch_step: 1,
    shared_work: 1,
    least_share_work: 1,
    ..Limits::DEFAULT
};

/// A page of jobs compares one memory page of jobs in each step.
const PAGES_IN_STEPS: Limits = Limits {
    jobs_compared_at_once: 0,
    ids_looked_up_at_once: 1,
    memory_pages_per_step: 1,
    ..Limits::DEFAULT
};

/// Starts a server with these limits, and connects clients.
fn start<const N: usize>(limits: Limits) -> (Driver, [Client; N]) {
    start_with(|options| options.limits = limits)
}

fn start_with<const N: usize>(change: impl FnOnce(&mut Options)) -> (Driver, [Client; N]) {
    let mut options = Options::DEFAULT;
    change(&mut options);
    let mut driver = Driver::new(options, START);
    let clients = driver.clients();
    (driver, clients)
}

/// Lets time pass, after which a server that is late does what is due.
fn be_late(driver: &mut Driver, span: Nanos) {
    driver.now = driver.now + span;
    driver.settle();
}

/// Half of the TTRs of a closed connection run out before it has given back its jobs, and waiting workers
/// get these jobs. It must not give them back too.
#[test]
fn a_closing_connection_leaves_jobs_to_workers_that_have_them() {
    const JOBS: usize = 40;
    const WORKERS: usize = 30;
    let (mut driver, [holder]) = start(SMALL_STEPS);
    driver.ask(holder, "put 0 0 100 0\r\n\r\nput 0 0 1 0\r\n\r\n".repeat(JOBS / 2));
    driver.ask(holder, "reserve-batch 40\r\n");
    assert_eq!(driver.facts().reserved, JOBS as u64);
    let workers: [Client; WORKERS] = driver.clients();
    workers.iter().for_each(|&worker| assert_eq!(driver.ask(worker, "reserve\r\n"), ""));
    driver.end(holder, End::HangUp);
    assert_eq!(driver.facts().closing, 1, "the jobs are given back in one step");
    be_late(&mut driver, Nanos::from_millis(1_001));
    let replies: String = workers.iter().map(|&worker| driver.take_text(worker)).collect();
    let jobs: BTreeSet<u64> = numbers(&replies, "RESERVED ").into_iter().collect();
    assert_eq!(jobs.len(), WORKERS, "a job has two workers, or a worker none");
    let facts = driver.facts();
    assert_eq!((facts.reserved, facts.ready), (WORKERS as u64, (JOBS - WORKERS) as u64));
    for &worker in &workers {
        assert_eq!(driver.ask(worker, "touch-all\r\n"), "TOUCHED_ALL 1\r\n");
    }
}

/// They were sent after it, and arrive in the same iteration.
#[test]
fn the_commands_of_others_see_a_close_before_them() {
    for end in [Some(End::HalfClose), Some(End::SilentHalfClose), None] {
        let (mut driver, [holder, other]) = start(Limits::DEFAULT);
        driver.ask(holder, "use t\r\nput 0 0 9 0\r\n\r\nwatch t\r\nreserve\r\n");
        match end {
            Some(end) => driver.end(holder, end),
            None => driver.receive(holder, "quit\r\n"),
        }
        driver.receive(other, "delete 1\r\nlist-tubes\r\nstats\r\n");
        driver.iterate();
        let replies = driver.take_text(other);
        assert!(replies.starts_with("DELETED\r\nOK 14\r\n---\n- default\n\r\n"), "{replies}");
        assert_eq!(yaml::number(&replies, "current-connections"), 1);
    }
}

/// The loop was late for both.
#[test]
fn a_delay_ends_before_a_pause_that_ends_later() {
    let (mut driver, [producer, worker]) = start(Limits::DEFAULT);
    driver.ask(producer, "put 5 0 9 0\r\n\r\nput 0 1 9 0\r\n\r\npause-tube default 2\r\n");
    assert_eq!(driver.ask(worker, "reserve\r\n"), "");
    be_late(&mut driver, Nanos::from_secs(3));
    assert_eq!(driver.take_text(worker), "RESERVED 2 0\r\n\r\n");
}

/// Between two steps there may be a sync.
#[test]
fn the_ttrs_of_a_batch_begin_with_its_reply() {
    let limits = Limits { jobs_per_batch_step: 2, ..Limits::DEFAULT };
    for waits in [false, true] {
        let (mut driver, [producer, worker]) = start(limits);
        let puts = "put 0 0 1 0\r\n\r\n".repeat(7);
        if waits {
            driver.ask(worker, "reserve-batch 7 9\r\n");
            driver.receive(producer, &puts);
        } else {
            driver.ask(producer, &puts);
            driver.receive(worker, "reserve-batch 7\r\n");
        }
        let mut reply = String::new();
        for _ in 0..6 {
            driver.iterate();
            reply = driver.take_text(worker);
            if !reply.is_empty() {
                break;
            }
            driver.now = driver.now + Nanos::from_secs(2);
        }
        assert!(reply.starts_with("RESERVED_BATCH 7\r\nRESERVED 1 0\r\n"), "{reply}");
        for id in 1..8 {
            let stats = driver.ask(producer, format!("stats-job {id}\r\n"));
            assert!(stats.contains("\nreserves: 1\ntimeouts: 0\n"), "{stats}");
        }
    }
}

/// As in C, whichever ended first.
#[test]
fn pauses_that_have_ended_give_the_best_job_of_all_their_tubes_first() {
    let (mut driver, [producer, worker, other]) = start(Limits::DEFAULT);
    for (tube, pris) in [("a", [5, 6]), ("b", [1, 7]), ("c", [2, 3])] {
        for pri in pris {
            driver.ask(producer, format!("put-in-tube {tube} {pri} 0 9 0\r\n\r\n"));
        }
        driver.ask(producer, format!("pause-tube {tube} 1\r\n"));
    }
    assert_eq!(
        driver.ask(worker, "watch a\r\nwatch b\r\nreserve\r\n"),
        "WATCHING 2\r\nWATCHING 3\r\n"
    );
    driver.ask(other, "watch a\r\nwatch c\r\nreserve\r\n");
    be_late(&mut driver, Nanos::from_secs(2));
    assert_eq!(driver.take_text(worker), "RESERVED 3 0\r\n\r\n");
    assert_eq!(driver.take_text(other), "RESERVED 5 0\r\n\r\n");
    driver.check();
    // The next ones come without a wait.
    assert_eq!(driver.ask(worker, "reserve\r\n"), "RESERVED 1 0\r\n\r\n");
    assert_eq!(driver.ask(other, "reserve\r\n"), "RESERVED 6 0\r\n\r\n");
}

/// One step offers the job of one tube.
#[test]
fn a_reserve_without_a_wait_finds_each_job_whose_slot_is_free() {
    let limits = Limits { offers_work: 1, ..Limits::DEFAULT };
    for batch in [false, true] {
        let (mut driver, [holder, worker]) = start(limits);
        driver.ask(holder, "put 0 0 9 0 con:k\r\n\r\nreserve\r\n");
        for (pri, tube) in (1..).zip(["a", "b", "c", "d"]) {
            driver.ask(holder, format!("put-in-tube {tube} {pri} 0 9 0 con:k\r\n\r\n"));
        }
        driver.ask(worker, "watch d\r\nput 9 0 9 0\r\n\r\n");
        driver.receive(holder, "delete 1\r\n");
        let (reserve, reply) = if batch {
            ("reserve-batch 1\r\n", "RESERVED_BATCH 1\r\nRESERVED 5 0\r\n\r\n")
        } else {
            ("reserve-with-timeout 0\r\n", "RESERVED 5 0\r\n\r\n")
        };
        assert_eq!(driver.ask(worker, reserve), reply);
    }
}

/// Nothing else would make them run: the client waits until all of its commands are taken.
#[test]
fn commands_of_a_client_that_does_not_read_run_when_others_have_read() {
    let (mut driver, [reader, writer]) = start_with(|it| it.settings.max_memory_bytes = 1 << 20);
    driver.set_room(writer, Some(0));
    for (before, after) in [(1, 3), (3, 6)] {
        driver.set_room(reader, Some(0));
        driver.receive(reader, "stats\r\n".repeat(500));
        driver.settle();
        driver.receive(writer, "put 0 0 9 0\r\n\r\n".repeat(3));
        driver.settle();
        assert_eq!(driver.facts().ready, before, "replies take less memory than they may");
        driver.set_room(reader, None);
        driver.settle();
        assert_eq!(driver.facts().ready, after);
    }
}

/// Until the reply the TTRs of its jobs do not run, so the reply does not wait for the client to read.
#[test]
fn a_batch_of_a_client_that_does_not_read_keeps_no_job_for_good() {
    let (mut driver, [reader, worker, other]) =
        start_with(|it| it.settings.max_memory_bytes = 1 << 20);
    [reader, worker].into_iter().for_each(|client| driver.set_room(client, Some(0)));
    driver.receive(worker, "stats\r\nreserve-batch 10 100\r\n");
    driver.settle();
    driver.receive(reader, "stats\r\n".repeat(500));
    driver.settle();
    assert_eq!(driver.ask(other, "put 0 0 1 0\r\n\r\n"), "INSERTED 1\r\n");
    assert_eq!(driver.facts().reserved, 1);
    be_late(&mut driver, Nanos::from_millis(1_001));
    assert_eq!(driver.facts().ready, 1);
    driver.set_room(worker, None);
    driver.settle();
    assert!(driver.take_text(worker).ends_with("RESERVED_BATCH 1\r\nRESERVED 1 0\r\n\r\n"));
}

/// The TTRs of some jobs run out between two steps of a `touch-all`: they are not counted, and the others
/// stay with their worker.
#[test]
fn jobs_that_come_back_during_a_touch_all_are_not_counted() {
    let (mut driver, [worker, other]) = start(SMALL_STEPS);
    driver.ask(worker, "put 0 0 100 0\r\n\r\n".repeat(5) + &"put 0 0 1 0\r\n\r\n".repeat(5));
    driver.ask(worker, "reserve-batch 10\r\n");
    driver.receive(worker, "touch-all\r\n");
    (0..16).for_each(|_| _ = driver.iterate());
    assert!(driver.is_in_steps(worker), "all jobs were touched in 16 steps");
    be_late(&mut driver, Nanos::from_millis(1_001));
    let text = driver.take_text(worker);
    let left = driver.facts().reserved;
    assert!((5..10).contains(&left), "{left} jobs are left");
    assert_eq!(text, format!("TOUCHED_ALL {left}\r\n"), "jobs that have come back are counted");
    let taken = driver.ask(other, "reserve-batch 10\r\n");
    assert!(taken.starts_with(&format!("RESERVED_BATCH {}\r\n", 10 - left)), "{taken}");
}

/// Jobs of a batch come back and are taken by another worker before the batch is full: no job is in both
/// replies.
#[test]
fn a_job_that_comes_back_during_a_batch_has_one_worker() {
    let (mut driver, [first, second]) = start(SMALL_STEPS);
    driver.ask(first, "put 0 0 1 0\r\n\r\n".repeat(3) + &"put 1 0 100 0\r\n\r\n".repeat(9));
    driver.receive(first, "reserve-batch 12\r\n");
    for _ in 0..3 {
        driver.iterate();
    }
    assert!(driver.is_in_steps(first), "all jobs were reserved at once");
    driver.now = driver.now + Nanos::from_millis(1_001);
    driver.receive(second, "reserve-batch 3\r\n");
    driver.settle();
    let (of_first, of_second) = (driver.take_text(first), driver.take_text(second));
    let both: Vec<u64> = numbers(&[&of_first[..], &of_second].concat(), "RESERVED ");
    assert_eq!(both.iter().collect::<BTreeSet<_>>().len(), both.len(), "{both:?}");
    assert_eq!(driver.facts().reserved, both.len() as u64);
    for (client, text) in [(first, of_first), (second, of_second)] {
        let count = numbers(&text, "RESERVED ").len();
        assert_eq!(driver.ask(client, "touch-all\r\n"), format!("TOUCHED_ALL {count}\r\n"));
    }
}

/// Returns a server with a worker that has reserved jobs, and with buried and delayed jobs, 400 each. Their
/// priorities and delays are in no order, and a third of them have groups.
fn server_with_jobs_in_each_state() -> (Driver, Client) {
    let (mut driver, [worker]) = start(Limits::DEFAULT);
    let mut put = |pri: u32, delay: u32, ttr: u32| {
        let con =
            if pri.is_multiple_of(3) { format!(" con:k{}:1000", pri % 60) } else { String::new() };
        let reply = driver.ask(worker, format!("put {pri} {delay} {ttr} 0{con}\r\n\r\n"));
        assert!(reply.starts_with("INSERTED "), "{reply}");
    };
    (0..800).for_each(|number| put(number * 7_919 % 1_000, 0, 10 + number % 7));
    (0..400).for_each(|number| put(number * 7_919 % 1_000, 5 + number * 31 % 17, 10));
    driver.ask(worker, "reserve-batch 800\r\n");
    let ids: Vec<u64> = (1..=800).collect();
    for id in &ids[400..] {
        assert_eq!(driver.ask(worker, format!("bury {id} {}\r\n", id * 31 % 97)), "BURIED\r\n");
    }
    (driver, worker)
}

/// Everything by which a job comes back works without memory: it is in its place at once, and no job is buried
/// or lost.
#[test]
fn jobs_that_come_back_need_no_memory() {
    let (mut driver, worker) = server_with_jobs_in_each_state();
    let other = driver.connect();
    // The replies need no memory either: there is a buffer for them.
    driver.ask(other, "stats\r\n");
    Driver::refuse_memory_after(0);
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
    let facts = driver.facts();
    assert_eq!((facts.reserved, facts.buried, facts.ready + facts.delayed), (0, 0, 1_200));
    assert_eq!(facts.delayed, 0, "the longest delay has ended");
    Driver::refuse_memory_after(usize::MAX);
    let text = driver.ask(other, "reserve-batch 1000\r\n");
    let mut pris = Vec::new();
    for id in numbers(&text, "RESERVED ") {
        pris.push(yaml::number(&driver.ask(other, format!("stats-job {id}\r\n")), "pri"));
    }
    assert!(pris.len() == 1_000 && pris.is_sorted(), "{pris:?}");
}

/// Random commands while memory comes and goes: the counts of jobs stay right.
#[test]
fn no_job_is_lost_while_memory_comes_and_goes() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        Driver::refuse_memory_after(usize::MAX);
        let (mut driver, mut clients) = start::<4>(Limits::DEFAULT);
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
                    Driver::refuse_memory_after(usize::MAX);
                    clients[client] = driver.connect();
                    continue;
                }
                27 => {
                    Driver::refuse_memory_after(
                        [usize::MAX, 0, random.usize(..30)][random.usize(..3)],
                    );
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
            let inserted = numbers(&reply, "INSERTED ");
            last_id = inserted.last().copied().unwrap_or(last_id);
            jobs += inserted.len() as u64;
            jobs -= numbers(&reply, "FLUSHED ").iter().sum::<u64>();
            jobs -= reply.lines().filter(|line| *line == "DELETED").count() as u64;
            driver.check();
            let sum: u64 = driver.facts().jobs().iter().sum();
            assert_eq!(sum, jobs, "seed {seed}: {reply:?}");
        }
        Driver::refuse_memory_after(usize::MAX);
        driver.advance(Nanos::from_secs(60));
        assert_eq!(driver.facts().delayed, 0, "seed {seed}");
    }
}

/// One line for each command, and lines that arrive in two pieces.
const COMMANDS: [&str; 47] = [
    "put 0 0 9 5\r\nhello\r\n",
    "put 0 7 9 5\r\nhello\r\n",
    "put 0 0 9 5 idp:new con:new\r\nhello\r\n",
    "put 0 0 9 5 idp:old con:old\r\nhello\r\n",
    "put 0 0 9 5| idp:new\r\nhello\r\n",
    "put 0 0 9 5\r\nhel|lo\r\n",
    "put 0 0 9 1200\r\n{600}|{600}|\r\n",
    "put 0 0 9 9000\r\n{9000}|\r\n",
    "put-in-tube new 0 0 9 5\r\nhello\r\n",
    "peek 1\r\n",
    "peek 7\r\n",
    "peek-ready\r\n",
    "peek-delayed\r\n",
    "peek-buried\r\n",
    "reserve\r\n",
    "reserve-with-timeout 9\r\n",
    "ignore default\r\nreserve\r\n",
    "reserve-batch 20\r\n",
    "reserve-job 7\r\n",
    "reserve-job 2\r\n",
    "delete 1\r\n",
    "delete-batch 1 2 3 4\r\n",
    "release 3 1 0\r\n",
    "release 3 1 7\r\n",
    "use new\r\n",
    "watch new\r\n",
    "watch new\r\nreserve\r\n",
    "ignore other\r\n",
    "bury 3 1\r\n",
    "kick 9\r\n",
    "kick-job 2\r\n",
    "touch 3\r\n",
    "touch-all\r\n",
    "stats\r\n",
    "stats-job 1\r\n",
    "stats-tube default\r\n",
    "list-tubes\r\n",
    "list-tube-used\r\n",
    "list-tubes-watched\r\n",
    "pause-tube default 7\r\n",
    "flush-tube default\r\n",
    "flush-buried default\r\n",
    "list-jobs default any 9\r\n",
    "peek-batch default any 9\r\n",
    "list-clients 9\r\n",
    "list-clients 9 0 default\r\n",
    "quit\r\n",
];

/// Returns a server with a worker that holds job 3, buried job 2, delayed job 4, and ready ones: 7 has a large body,
/// and 8 keys. Another worker waits for jobs of other tubes.
fn server_for_each_command(is_cold: bool) -> (Driver, [Client; 2]) {
    let mut options = Options::DEFAULT;
    options.settings.body_cache_bytes = is_cold.then_some(0);
    let disk = is_cold.then(|| FakeDisk::default().boxed());
    let mut driver = Driver::start(options, disk, START).expect("the disk works");
    let clients @ [worker, other] = driver.clients();
    driver.ask(worker, "put 1 0 9 1\r\na\r\nput 0 0 9 1\r\nb\r\nput 0 0 9 1\r\nc\r\n");
    assert!(driver.ask(worker, "reserve-job 2\r\n").starts_with("RESERVED"));
    assert_eq!(driver.ask(worker, "bury 2 0\r\n"), "BURIED\r\n");
    assert!(driver.ask(worker, "reserve-job 3\r\n").starts_with("RESERVED"));
    driver.ask(worker, "put 1 9 9 1\r\nd\r\nput 2 0 9 1\r\ne\r\nput 2 0 9 1\r\nf\r\n");
    driver.ask(worker, format!("put 3 0 9 6000\r\n{}\r\n", "g".repeat(6000)));
    driver.ask(worker, "put 0 0 9 1 idp:old con:old\r\nh\r\n");
    assert_eq!(driver.ask(worker, "watch other\r\n"), "WATCHING 2\r\n");
    driver.ask(other, "watch other\r\nignore default\r\nreserve\r\n");
    assert_eq!(driver.facts().jobs(), [5, 1, 1, 1]);
    driver.check();
    (driver, clients)
}

/// Each allocation of each command that can fail fails: the command is done, or refused and nothing has changed, or
/// the connection is closed.
#[test]
fn each_command_survives_each_refused_allocation() {
    for (command, is_cold) in COMMANDS.into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let body = |len| "x".repeat(len);
        let bytes = command.replace("{600}", &body(600)).replace("{9000}", &body(9000));
        for count in 0.. {
            let (mut driver, [worker, other]) = server_for_each_command(is_cold);
            let (before, tubes) = (driver.facts(), driver.tubes());
            Driver::refuse_memory_after(count);
            let mut reply = String::new();
            for piece in bytes.split('|') {
                reply += &driver.ask(worker, piece);
            }
            let is_refused = Driver::is_memory_refused();
            Driver::refuse_memory_after(usize::MAX);
            driver.check();
            // A body for which there was no memory is read again.
            driver.advance(Nanos::from_millis(200));
            reply += &driver.take_text(worker);
            let what = format!("{command:?}, {is_cold}, refused after {count}: {reply:?}");
            assert!(!reply.contains("UNKNOWN_COMMAND"), "{what}");
            let facts = driver.facts();
            // A job whose body cannot be read is ready after `reserve-job`.
            if reply == "OUT_OF_MEMORY\r\n" && !command.starts_with("reserve-job") {
                assert_eq!((facts.jobs(), driver.tubes()), (before.jobs(), tubes), "{what}");
            }
            if !driver.is_closed(worker) {
                assert!(!reply.is_empty() || command.ends_with("reserve\r\n"), "{what}");
                let sum = |facts: Facts| facts.jobs().iter().sum::<u64>();
                let inserted = u64::from(reply.starts_with("INSERTED 9"));
                let lines = reply.lines().filter(|line| *line == "DELETED").count() as u64;
                let deleted = ["DELETED_BATCH ", "FLUSHED "].map(|word| numbers(&reply, word));
                let deleted = lines + deleted.iter().flatten().sum::<u64>();
                assert_eq!(sum(facts), sum(before) + inserted - deleted, "{what}");
            }
            // The server still works.
            driver.end(worker, End::HangUp);
            let client = driver.connect();
            let put = "put-in-tube other 0 0 9 1\r\nz\r\n";
            assert!(driver.ask(client, put).starts_with("INSERTED"), "{what}");
            assert!(driver.take_text(other).ends_with("1\r\nz\r\n"), "{what}");
            if !is_refused {
                break;
            }
        }
    }
}

/// Two bodies that arrive at the same time are not both stored if one of them fits.
#[test]
fn puts_above_the_limit_of_memory_are_refused_at_the_end_of_the_body() {
    // Each of these jobs takes 1,110 bytes. The 600 that are left suffice for what is smaller.
    let (mut driver, [first, second]) = start_with(|it| it.settings.max_memory_bytes = 100_500);
    let put = format!("put 0 0 9 1000\r\n{}\r\n", "x".repeat(1_000));
    let count = (0..200).take_while(|_| driver.ask(first, &put) != "OUT_OF_MEMORY\r\n").count();
    assert!((80..100).contains(&count), "{count} jobs of 1000 bytes");
    // Other commands work, and a smaller job may still fit.
    assert!(driver.ask(second, "reserve\r\n").starts_with("RESERVED 1 1000\r\n"));
    assert!(driver.ask(second, "put 0 0 9 1\r\nx\r\n").starts_with("INSERTED "));
    assert_eq!(driver.ask(second, "delete 1\r\n"), "DELETED\r\n");
    let (head, rest) = put.split_at(100);
    assert_eq!(driver.ask(first, head) + &driver.ask(second, head), "");
    assert!(driver.ask(second, rest).starts_with("INSERTED "));
    assert_eq!(driver.ask(first, rest), "OUT_OF_MEMORY\r\n");
    driver.set_draining(true);
    let large = format!("put 0 0 9 60000\r\n{}\r\n", "x".repeat(60_000));
    assert_eq!(driver.ask(first, large), "DRAINING\r\n");
}

/// The list is sent to some of those that share it in each iteration.
#[test]
fn a_list_of_tubes_is_sent_to_many_clients_in_several_iterations() {
    let limits = Limits { names_per_list_step: 5, ..Limits::DEFAULT };
    let (mut driver, [watcher]) = start(limits);
    driver.ask(watcher, (0..10).map(|tube| format!("watch {tube}\r\n")).collect::<String>());
    let clients: [Client; 200] = driver.clients();
    clients.iter().for_each(|&client| driver.receive(client, "list-tubes\r\n"));
    let sent: Vec<usize> = (0..20).map(|_| driver.iterate().replies.len()).collect();
    let lists = clients.iter().filter(|&&client| driver.take_text(client).contains("- 9\n"));
    assert_eq!(lists.count(), 200);
    assert!(sent[1..].iter().all(|&count| count <= 64), "{sent:?}");
}

/// An eighth of the memory is for lists, and as much for replies.
#[test]
fn a_single_reply_and_a_single_list_may_take_more_than_their_limit() {
    let (mut driver, [watcher, gone, other]) = start_with(|it| {
        it.limits =
            Limits { names_per_list_step: 5, shared_work: 1, least_share_work: 1, ..it.limits };
        it.settings.max_memory_bytes = 2_400;
    });
    for tube in 0..40 {
        driver.ask(watcher, format!("watch a-tube-with-a-long-name-{tube}\r\n"));
    }
    driver.receive(gone, "list-tubes\r\n");
    (0..7).for_each(|_| _ = driver.iterate());
    assert!(driver.is_in_steps(gone), "the list was made in seven steps");
    // The list goes with it.
    driver.end(gone, End::HangUp);
    driver.receive(other, "list-tubes\r\n");
    (0..20).for_each(|_| _ = driver.iterate());
    assert!(driver.take_text(other).contains("name-39\n"));
    assert!(driver.ask(watcher, "list-tubes-watched\r\n").contains("name-39\n"));
    driver.ask(other, "put 0 0 9 0\r\n\r\n".repeat(5));
    assert!(driver.ask(other, "list-jobs default any 5\r\n").contains("id: 5,"));
    // Of two lists that are made at the same time one is refused at least.
    for tube in 0..40 {
        driver.ask(other, format!("watch a-tube-with-a-long-name-{tube}\r\n"));
    }
    let both = [watcher, other];
    both.iter().for_each(|&client| driver.receive(client, "list-tubes-watched\r\n"));
    driver.settle();
    assert!(both.map(|client| driver.take_text(client)).contains(&"OUT_OF_MEMORY\r\n".into()));
    // While a reply is not read, a page, a long line and a long read do not fit.
    driver.set_room(watcher, Some(0));
    driver.ask(watcher, "stats\r\n");
    assert_eq!(driver.ask(other, "list-jobs default any 5\r\n"), "OUT_OF_MEMORY\r\n");
    assert_eq!(driver.ask(other, "delete-batch".to_owned() + &" 9".repeat(1_000)), "");
    assert_eq!(driver.ask(other, "\r\n"), "OUT_OF_MEMORY\r\n");
    driver.receive(other, "list-tube-used\r\n".repeat(200));
    driver.iterate();
    assert!(driver.unread(other) >= 200 * 16 - 1024, "{} bytes are left", driver.unread(other));
}

/// A command gives out only some hundred of them.
#[test]
fn a_group_whose_limit_rises_has_jobs_for_all_that_wait() {
    const WORKERS: usize = 300;
    let (mut driver, [client]) = start(Limits::DEFAULT);
    let puts = "put 0 0 9 0 con:k\r\n\r\n".repeat(WORKERS);
    driver.ask(client, puts + "reserve\r\n");
    for _ in 0..WORKERS {
        let worker = driver.connect();
        assert_eq!(driver.ask(worker, "reserve\r\n"), "");
    }
    driver.receive(client, "put 9 0 9 0 con:k:1000\r\n\r\n");
    driver.iterate();
    assert!(driver.facts().reserved < WORKERS as u64, "all are given out in one step");
    driver.advance(Nanos::from_millis(1));
    assert_eq!(driver.facts().reserved, WORKERS as u64 + 1);
}

/// The memory of groups is in the limit of that of jobs.
#[test]
fn a_job_with_a_group_takes_more_memory_than_one_with_a_key() {
    let [key, group] = ["idp", "con"].map(|tag| {
        let (mut driver, [client]) = start(Limits::DEFAULT);
        let put = |number| format!("put 0 0 9 0 {tag}:{number}\r\n\r\n");
        driver.ask(client, (0..10_000).map(put).collect::<String>());
        driver.job_bytes()
    });
    assert!(group > key + 10_000 * 200, "{key} bytes with keys, and {group} with groups");
}

/// An idle server gives it back.
#[test]
fn the_memory_of_large_bodies_is_given_back_after_a_while() {
    let (mut driver, [client]) = start(Limits::DEFAULT);
    let put = format!("put 0 0 9 60000\r\n{}\r\n", "x".repeat(60_000));
    driver.ask(client, put + "delete 1\r\n");
    assert!(driver.job_bytes() > 60_000, "pages are kept for the next bodies");
    driver.advance(Nanos::from_secs(1));
    assert!(driver.job_bytes() < 10_000, "{} bytes are taken", driver.job_bytes());
}

/// Of many that come back too often only the first 100 are logged one by one, and then how many more these are.
#[test]
fn the_number_of_jobs_that_were_buried_is_due_to_be_logged_by_an_idle_server() {
    let (mut driver, [worker]) = start_with(|it| it.settings.bury_after = NonZero::new(1));
    driver.ask(worker, "put 0 0 9 0\r\n\r\n".repeat(101) + "reserve-batch 101\r\n");
    driver.end(worker, End::HangUp);
    driver.settle();
    assert_eq!(driver.facts().buried, 101);
    let soon = driver.now + Nanos::from_millis(10_001);
    assert!(driver.next_due().is_some_and(|due| driver.now < due && due < soon));
}

/// The flush frees it last.
#[test]
fn a_flushed_job_that_waited_for_its_group_is_given_to_no_worker() {
    let (mut driver, [holder, flusher, worker]) = start(Limits::DEFAULT);
    driver.ask(holder, "put 0 0 9 0 con:k\r\n\r\nreserve\r\nuse a\r\n");
    driver.ask(holder, "put 0 0 9 0\r\n\r\n".repeat(5_000) + "put 0 0 9 0 con:k\r\n\r\n");
    driver.receive(flusher, "flush-tube a\r\n");
    driver.receive(worker, "watch a\r\nreserve\r\n");
    driver.receive(holder, "delete 1\r\n");
    driver.iterate();
    assert_eq!(driver.take_text(holder), "DELETED\r\n");
    driver.advance(Nanos::from_millis(1));
    assert_eq!(driver.take_text(flusher), "FLUSHED 5001\r\n");
    assert_eq!(driver.take_text(worker), "WATCHING 2\r\n");
}

/// A worker whose job is flushed while its body is read waits as long as before.
#[test]
fn a_worker_whose_job_is_flushed_keeps_its_place() {
    let disk = FakeDisk::default();
    disk.hold_reads(true);
    let driver = Driver::start(Options::DEFAULT.cold(), Some(disk.boxed()), START);
    let mut driver = driver.expect("the disk works");
    let [first, second, other] = driver.clients();
    driver.ask(other, "put 0 0 9 1\r\na\r\n");
    assert_eq!(driver.ask(first, "reserve\r\n"), "");
    assert_eq!(driver.ask(second, "reserve\r\n"), "");
    let reply = driver.ask(other, "flush-tube default\r\n");
    driver.advance(Nanos::from_millis(1));
    assert_eq!(reply + &driver.take_text(other), "FLUSHED 1\r\n");
    disk.hold_reads(false);
    driver.settle();
    driver.ask(other, "put 0 0 9 1\r\nb\r\n");
    assert_eq!(driver.take_text(first), "RESERVED 2 1\r\nb\r\n");
    assert_eq!(driver.take_text(second), "");
}

/// A page of clients looks at 64 connections in a step, and other clients are served between two of them.
#[test]
fn a_list_of_clients_has_each_that_stays() {
    let (mut driver, [first, other]) = start(Limits::DEFAULT);
    let more: Vec<Client> = (0..700).map(|_| driver.connect()).collect();
    driver.ask(more[0], "watch a\r\n");
    driver.ask(more[699], "watch a\r\n");
    driver.receive(first, "list-clients 1000\r\n");
    driver.receive(other, "list-tube-used\r\n");
    driver.iterate();
    assert_eq!(driver.take(first), b"", "702 connections are listed in one step");
    assert_eq!(driver.take_text(other), "USING default\r\n");
    // The last one is not listed yet, and the first one is.
    driver.end(more[698], End::HangUp);
    driver.end(more[1], End::HangUp);
    driver.settle();
    let page = driver.take_text(first);
    let ids: Vec<u64> = page
        .lines()
        .filter_map(|line| line.strip_prefix("- {id: ")?.split(',').next()?.parse().ok())
        .collect();
    let expected: Vec<u64> = (1..=702).filter(|id| *id != 701).collect();
    assert_eq!(ids, expected);
    let watching = driver.ask(first, "list-clients 1 0 a\r\n");
    assert!(watching.contains("next: 3\n") && watching.contains("- {id: 3,"), "{watching}");
    let watching = driver.ask(first, "list-clients 1 3 a\r\n");
    assert!(watching.contains("next: 0\n") && watching.contains("- {id: 702,"), "{watching}");
    // The tube is removed meanwhile.
    driver.receive(first, "list-clients 1000 0 a\r\n");
    driver.iterate();
    driver.receive(more[0], "ignore a\r\n");
    driver.receive(more[699], "ignore a\r\n");
    driver.settle();
    assert_eq!(driver.take_text(first), "NOT_FOUND\r\n");
    // One that is gone is not listed while it gives back its jobs.
    driver.ask(more[2], "put 0 0 9 0\r\n\r\n".repeat(1000) + "reserve-batch 1000\r\n");
    driver.end(more[2], End::HangUp);
    driver.receive(first, "list-clients 1 4\r\n");
    driver.iterate();
    let page = driver.take_text(first);
    assert!(driver.facts().closing == 1 && page.contains("\n- {id: 6,"), "{page}");
}

/// The pages of clients that are being made are in the limit of memory.
#[test]
fn pages_of_clients_are_refused_when_they_take_too_much_memory() {
    // An eighth of the memory is for input, text and pages: four pages of these clients.
    let (mut driver, clients) = start_with::<300>(|it| {
        (it.settings.max_memory_bytes, it.limits.iteration_work) = (1024 * 1024, 200);
    });
    for _ in 0..2 {
        clients.iter().for_each(|&client| driver.receive(client, "list-clients 1000\r\n"));
        driver.iterate();
        // The page of one that hangs up meanwhile is made, and takes nothing then.
        let closed = clients.iter().find(|&&client| driver.is_in_steps(client));
        driver.end(*closed.expect("a page is made in several iterations"), End::HangUp);
        for _ in 0..300 {
            driver.iterate();
            driver.check();
        }
        let replies = clients.iter().map(|&client| driver.take_text(client));
        let pages = replies.filter(|reply| reply.starts_with("OK ")).count();
        assert!((1..=100).contains(&pages), "{pages} pages");
    }
}

/// A page of jobs compares memory pages of jobs in steps. Another tube may get the place of one that is removed
/// meanwhile.
#[test]
fn a_page_of_jobs_of_a_removed_tube_shows_no_other_tube() {
    let (mut driver, [lister, other]) = start(PAGES_IN_STEPS);
    driver.ask(other, "put-in-tube gone 0 0 9 0\r\n\r\n");
    driver.ask(other, "put 0 0 9 0\r\n\r\n".repeat(5_000));
    driver.receive(lister, "list-jobs gone any 10\r\n");
    driver.iterate();
    assert!(driver.is_in_steps(lister), "the jobs are compared in one step");
    driver.receive(other, "delete 1\r\nput-in-tube new 0 0 9 0\r\n\r\n");
    driver.settle();
    assert_eq!(driver.take_text(other), "DELETED\r\nINSERTED 5002\r\n");
    assert_eq!(driver.take_text(lister), "NOT_FOUND\r\n");
    let page = driver.ask(lister, "list-jobs new any 10\r\n");
    assert!(page.contains("next: 0\n") && page.contains("- {id: 5002,"), "{page}");
}

/// A job that has left the state meanwhile is left out.
#[test]
fn a_page_of_jobs_in_steps_has_jobs_in_its_state_only() {
    let (mut driver, [lister, other]) = start(PAGES_IN_STEPS);
    driver.ask(other, "put-in-tube a 0 0 9 0\r\n\r\n".repeat(2));
    driver.ask(other, "put 0 0 9 0\r\n\r\n".repeat(5_000));
    driver.receive(lister, "list-jobs a ready 10\r\n");
    driver.iterate();
    assert!(driver.is_in_steps(lister), "the jobs are compared in one step");
    driver.receive(other, "reserve-job 1\r\n");
    driver.settle();
    let page = driver.take_text(lister);
    assert!(!page.contains("{id: 1,") && page.contains("{id: 2, state: ready,"), "{page}");
}

/// Each takes some memory.
#[test]
fn at_most_256_pages_of_jobs_are_made_in_steps_at_the_same_time() {
    let limits = Limits { iteration_work: 1 << 30, ..PAGES_IN_STEPS };
    let (mut driver, clients) = start::<300>(limits);
    driver.ask(clients[0], "put 0 0 9 0\r\n\r\n".repeat(5_000));
    clients.iter().for_each(|&client| driver.receive(client, "list-jobs default any 1\r\n"));
    driver.settle();
    let replies = clients.map(|client| driver.take_text(client));
    let refused = replies.iter().filter(|reply| *reply == "OUT_OF_MEMORY\r\n").count();
    assert_eq!(refused, 300 - 256);
    assert!(driver.ask(clients[299], "list-jobs default any 1\r\n").contains("{id: 1,"));
}

/// The flush of a job is found by a search among all of them.
#[test]
fn at_most_1024_flushes_have_jobs_that_are_not_freed() {
    const MOST: usize = 1024;
    let limits = Limits { iteration_work: 1 << 30, first_flush_work: 1, ..Limits::DEFAULT };
    let (mut driver, clients) = start::<{ MOST + 1 }>(limits);
    for tube in 0..clients.len() {
        driver.ask(clients[0], format!("put-in-tube {tube} 0 0 9 0\r\n\r\n").repeat(2));
    }
    for (tube, &client) in clients.iter().enumerate() {
        driver.receive(client, format!("flush-tube {tube}\r\n"));
    }
    driver.iterate();
    let pending = clients.iter().filter(|&&client| driver.received(client).is_empty()).count();
    assert_eq!(pending, MOST);
    assert_eq!(driver.take_text(clients[MOST]), "OUT_OF_MEMORY\r\n");
    driver.advance(Nanos::from_millis(1));
    assert_eq!(driver.take_text(clients[0]), "FLUSHED 2\r\n");
}

/// A large flush of the same tube is not over yet.
#[test]
fn the_key_of_a_held_job_is_kept_for_its_ttl_after_its_own_flush() {
    let put = "put 0 0 900 1 idp:key:60\r\nx\r\n";
    let (mut driver, [first, second, worker, producer]) = start(Limits::DEFAULT);
    driver.ask(producer, "put 0 0 900 0\r\n\r\n".repeat(10_000));
    driver.ask(producer, "reserve-job 1\r\n");
    driver.receive(first, "flush-tube default\r\n");
    driver.iterate();
    driver.now = driver.now + Nanos::from_secs(50);
    driver.receive(worker, [put, "reserve-job 10001\r\n"].concat());
    driver.iterate();
    assert_eq!(driver.take_text(worker), "INSERTED 10001\r\nRESERVED 10001 1\r\nx\r\n");
    driver.receive(second, "flush-tube default\r\n");
    driver.iterate();
    driver.now = driver.now + Nanos::from_secs(20);
    // While the job is not freed, and when its worker is gone.
    for id in 10_002..10_004 {
        driver.receive(producer, put);
        driver.iterate();
        let reply = driver.take_text(producer);
        assert!(reply.ends_with("INSERTED 10001 DELETED\r\n"), "put {id}: {reply}");
        driver.end(worker, End::HangUp);
    }
    assert_eq!(driver.take_text(first), "", "10,000 jobs are freed in six steps");
    driver.settle();
}

/// A deleted body is freed in steps, and its memory is for those that arrive.
#[test]
fn small_bodies_take_no_memory_before_a_large_one_is_freed() {
    let (mut driver, clients) = start_with::<60>(|it| {
        (it.settings.max_memory_bytes, it.settings.max_job_size) = (17 << 20, 16 << 20);
    });
    driver.ask(clients[0], put(0, 0, 9, vec![b'x'; 16 << 20]));
    driver.ask(clients[0], "delete 1\r\n");
    let small = put(0, 0, 9, [b'x'; 4_000]).repeat(80);
    clients.iter().for_each(|&client| driver.receive(client, &small));
    // Steps alone would take 16 iterations.
    (0..8).for_each(|_| _ = driver.iterate());
    assert_ne!(driver.next_due(), Some(Nanos::ZERO), "some of it is not freed");
}

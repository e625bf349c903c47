//! Fairness in the depth: how much one iteration of the loop does, and how long another client waits,
//! while tens of thousands of tubes, jobs, keys or watches are walked. Work is counted in iterations,
//! replies, jobs and tubes, not timed. The simulation checks fairness with few objects and low limits.

mod harness;

use harness::driver::{Client, Driver, End, Facts, Limits, Nanos, Options, START};
use harness::fake_disk::FakeDisk;
use harness::reply::numbers;
use harness::request::put;
use harness::yaml;
use std::ops::RangeInclusive;

/// The most replies in one iteration. A reply takes about a microsecond, and some 4 more if it is
/// sent to a client of its own.
const MOST_REPLIES: usize = 700;
/// The most jobs moved, or tubes removed, in one iteration.
const MOST_MOVES: u64 = 1_100;
/// The most jobs of batches moved in one iteration: it ends when they took 1 ms, and the batch that
/// was begun is the last.
const MOST_OF_BATCHES: u64 = 5_000;
/// The virtual time from one iteration to the next.
const ITERATION: Nanos = Nanos::from_nanos(100_000);

/// A server with a client that sends one short command after the other, so that no iteration is idle.
struct Server {
    driver: Driver,
    /// It sends no command during the work of a server that is otherwise idle.
    other: Option<Client>,
    /// The iterations since it has sent its command, and the most of them.
    waits: usize,
    most_waits: usize,
}

impl Server {
    fn new() -> Server {
        let mut driver = Driver::new(Options { period: ITERATION, ..Options::DEFAULT }, START);
        let other = Some(driver.connect());
        Server { driver, other, waits: 0, most_waits: 2 }
    }

    fn with_clients<const N: usize>() -> (Server, [Client; N]) {
        let mut server = Server::new();
        let clients = server.driver.clients();
        (server, clients)
    }

    /// Runs one iteration. Returns the most jobs that came into a state or left it, or the tubes that
    /// were added or removed.
    fn iterate(&mut self) -> u64 {
        if let Some(other) = self.other {
            if self.waits == 0 || !self.driver.take(other).is_empty() {
                self.driver.receive(other, "list-tube-used\r\n");
                self.waits = 0;
            }
            self.waits += 1;
            assert!(self.waits <= self.most_waits, "a command of another client has waited");
        }
        let before = self.driver.facts();
        let sent = self.driver.iterate().replies.len();
        assert!(sent <= MOST_REPLIES, "{sent} connections were sent replies in one iteration");
        let after = self.driver.facts();
        let moved = before.jobs().into_iter().zip(after.jobs()).map(|(old, new)| old.abs_diff(new));
        moved.fold(before.tubes.abs_diff(after.tubes), u64::max)
    }

    /// Iterates until `is_done`, which must take this number of iterations, of which none may move
    /// more jobs or tubes than `most_moved`.
    #[track_caller]
    fn until(
        &mut self,
        steps: RangeInclusive<usize>,
        most_moved: u64,
        mut is_done: impl FnMut(&mut Driver) -> bool,
    ) {
        let mut iterations = 0;
        while !is_done(&mut self.driver) {
            assert!(iterations < *steps.end(), "the work is not done in {iterations} iterations");
            let moved = self.iterate();
            assert!(moved <= most_moved, "{moved} jobs or tubes were moved in one iteration");
            iterations += 1;
        }
        assert!(iterations >= *steps.start(), "all was done in {iterations} iterations");
    }

    /// Iterates until the output of the client ends with `end`, and returns it.
    #[track_caller]
    fn reply(&mut self, client: Client, end: &str, steps: RangeInclusive<usize>) -> String {
        self.until(steps, MOST_MOVES, |driver| driver.received(client).ends_with(end.as_bytes()));
        self.driver.take_text(client)
    }

    /// Iterates until nothing is due, and serves no client.
    #[track_caller]
    fn until_idle(&mut self, steps: RangeInclusive<usize>, most_moved: u64) {
        self.other = None;
        self.until(steps, most_moved, |driver| {
            driver.next_due().is_none_or(|due| due > driver.now + ITERATION)
        });
    }

    fn pass(&mut self, span: Nanos) {
        self.driver.now = self.driver.now + span;
    }

    /// Makes a client watch this number of tubes that no other client watches.
    fn watch_many(&mut self, count: usize) -> Client {
        let client = self.driver.connect();
        let watch = |number| format!("watch tube-{number}\r\n");
        self.driver.ask(client, (0..count).map(watch).collect::<String>());
        assert_eq!(self.driver.facts().tubes, count as u64 + 1);
        client
    }

    /// Puts this number of jobs into a tube. Returns a client that uses it.
    fn fill(&mut self, tube: &str, delay: u32, jobs: usize) -> Client {
        let client = self.driver.connect();
        let puts = format!("put 0 {delay} 9000 0\r\n\r\n").repeat(jobs);
        let replies = self.driver.ask(client, format!("use {tube}\r\n{puts}"));
        assert_eq!(replies.matches("INSERTED").count(), jobs);
        client
    }

    /// Makes a client that holds this number of jobs of a tube.
    fn hold(&mut self, tube: &str, jobs: usize) -> Client {
        let client = self.driver.connect();
        let reserve = "reserve-batch 1000\r\n".repeat(jobs / 1000);
        self.driver.ask(client, format!("watch {tube}\r\nignore default\r\n{reserve}"));
        assert_eq!(self.driver.facts().reserved, jobs as u64);
        client
    }
}

#[test]
fn a_reserve_over_40000_tubes_finds_the_best_job_in_steps() {
    const WATCHES: usize = 40_000;
    let mut server = Server::new();
    let worker = server.watch_many(WATCHES);
    let producer = server.driver.connect();
    let put = |tube: usize, pri| format!("use tube-{tube}\r\nput {pri} 0 9 1\r\nx\r\n");
    server.driver.ask(producer, [17, WATCHES - 1, 5_000].map(|tube| put(tube, tube)).concat());
    for (id, least) in [(1, WATCHES / 2_048), (3, 1), (2, 1)] {
        server.driver.receive(worker, "reserve\r\n");
        let reply = server.reply(worker, "x\r\n", least..=WATCHES / 128);
        assert_eq!(reply, format!("RESERVED {id} 1\r\nx\r\n"));
    }
}

#[test]
fn a_list_of_30000_tubes_is_made_in_steps_and_shared_and_they_are_removed_in_steps() {
    const TUBES: usize = 30_000;
    let mut server = Server::new();
    let holder = server.watch_many(TUBES);
    let askers: [Client; 20] = server.driver.clients();
    let last = server.driver.connect();
    for &asker in &askers {
        server.driver.receive(asker, "list-tubes\r\nlist-tube-used\r\n");
    }
    server.until(TUBES / 2_048..=TUBES / 128, 0, |driver| {
        askers.iter().all(|asker| driver.received(*asker).ends_with(b"USING default\r\n"))
    });
    let list = server.driver.take_text(askers[0]);
    let is_shared = |asker: &Client| server.driver.received(*asker) == list.as_bytes();
    assert!(list.lines().count() > TUBES && askers[1..].iter().all(is_shared), "the lists differ");
    // A list is dropped when its last client is gone.
    server.driver.receive(last, "list-tubes\r\n");
    server.driver.iterate();
    server.driver.end(last, End::HangUp);
    let other = server.other;
    server.until_idle(0..=2, 1);
    server.driver.check();
    server.other = other;
    // The tubes go with the client that watches them.
    let left = server.driver.facts().tubes;
    server.driver.end(holder, End::HangUp);
    let steps = usize::try_from(left).unwrap() / 1_100..=3_000;
    server.until(steps, MOST_MOVES / 4, |driver| driver.facts().tubes == 1);
    server.driver.settle();
    assert_eq!(server.driver.facts().connections, 1 + askers.len() as u64);
}

#[test]
fn a_connection_with_50000_jobs_renews_and_returns_them_in_steps() {
    const JOBS: usize = 50_000;
    let mut server = Server::new();
    server.fill("a", 0, JOBS);
    let holder = server.hold("a", JOBS);
    server.driver.take(holder);
    // All TTRs are over at the same moment if they are not renewed.
    server.pass(Nanos::from_secs(8_000));
    server.driver.receive(holder, "touch-all\r\n");
    let reply = server.reply(holder, "\n", JOBS / 1_100..=JOBS / 100);
    assert_eq!(reply, format!("TOUCHED_ALL {JOBS}\r\n"));
    server.pass(Nanos::from_secs(8_000));
    server.driver.settle();
    assert_eq!(server.driver.facts().reserved, JOBS as u64, "a TTR has run out");
    server.driver.end(holder, End::HangUp);
    server.until(JOBS / 1_100..=JOBS, MOST_MOVES, |driver| driver.facts().ready == JOBS as u64);
}

#[test]
fn a_kick_of_50000_jobs_moves_them_in_steps() {
    const JOBS: usize = 50_000;
    let mut server = Server::new();
    let producer = server.fill("a", 9_000, JOBS);
    server.driver.receive(producer, format!("kick {JOBS}\r\n"));
    let reply = server.reply(producer, "\n", JOBS / 1_100..=JOBS / 100);
    assert_eq!(reply, format!("KICKED {JOBS}\r\n"));
}

/// They were set for delays and TTRs of jobs that were deleted since.
#[test]
fn timers_that_find_nothing_due_go_off_in_steps() {
    const TIMERS: usize = 8_000;
    for of_tubes in [true, false] {
        let mut server = Server::new();
        let client = server.watch_many(TIMERS);
        for number in 0..TIMERS {
            let (client, put) = if of_tubes {
                (client, format!("put-in-tube tube-{number} 0 5 9 0\r\n\r\n"))
            } else {
                (server.driver.connect(), "put 0 0 5 0\r\n\r\nreserve\r\n".to_owned())
            };
            server.driver.ask(client, format!("{put}delete {}\r\n", number + 1));
        }
        server.pass(Nanos::from_secs(6));
        server.until_idle(TIMERS / 4_000..=TIMERS / 32, 0);
    }
}

/// The jobs of a worker are searched for those of another tube.
#[test]
fn a_flush_passes_50000_reserved_jobs_in_steps() {
    const JOBS: usize = 50_000;
    let (mut server, [producer]) = Server::with_clients();
    server.fill("a", 0, JOBS);
    server.hold("a", JOBS);
    let worker = server.driver.connect();
    server.driver.ask(producer, "use b\r\nput 0 0 900 0\r\n\r\n");
    server.driver.ask(worker, "watch b\r\nreserve\r\n");
    server.driver.receive(producer, "flush-tube b\r\n");
    let reply = server.reply(producer, "\n", JOBS / 1_000..=JOBS / 100);
    assert_eq!(reply, "FLUSHED 1\r\n");
}

/// A delete makes garbage for which compaction may move 4 MiB: jobs, or keys that are kept.
#[test]
fn compaction_moves_records_in_steps() {
    const LARGE: usize = 4 << 20;
    let job = |_| String::from_utf8(put(0, 0, 9, "x".repeat(1_000))).unwrap();
    let key = |id| format!("put 0 0 9 0 idp:{id}:9000\r\n\r\ndelete {id}\r\n");
    for (jobs, records) in [(3_000, &job as &dyn Fn(usize) -> String), (20_000, &key)] {
        let (disk, mut options) = (FakeDisk::default(), Options::DEFAULT);
        options.settings.max_job_size = u32::try_from(LARGE).unwrap();
        let mut driver = Driver::start(options, Some(disk.boxed()), START).expect("the disk works");
        let client = driver.connect();
        driver.ask(client, (1..=jobs).map(records).collect::<String>());
        let (mut most, mut sum) = (0, 0);
        for id in jobs + 1..jobs + 10 {
            driver.ask(client, put(0, 0, 9, "x".repeat(LARGE)));
            driver.receive(client, format!("delete {id}\r\n"));
            while driver.is_busy() || driver.received(client).is_empty() {
                let before = disk.counts().bytes_written;
                driver.iterate();
                let moved = disk.counts().bytes_written - before;
                (most, sum) = (most.max(moved), sum + moved);
            }
            driver.take(client);
        }
        assert!(sum > 1 << 20, "only {sum} bytes were moved");
        assert!(most < 300_000, "{most} bytes were written in one iteration");
    }
}

/// Each has more names than a step.
#[test]
fn lists_of_watched_tubes_of_60_clients_share_the_iterations() {
    let mut server = Server::new();
    server.watch_many(1_500);
    let clients: [Client; 60] = server.driver.clients();
    let watches: String = (0..1_500).map(|tube| format!("watch tube-{tube}\r\n")).collect();
    clients.iter().for_each(|&client| _ = server.driver.ask(client, &watches));
    clients.iter().for_each(|&client| server.driver.receive(client, "list-tubes-watched\r\n"));
    server.until(6..=60, 0, |driver| {
        clients.iter().all(|client| driver.received(*client).ends_with(b"- tube-1499\n\r\n"))
    });
}

/// A job with a key of `con:` takes a few microseconds instead of a fraction of one.
#[test]
fn jobs_with_keys_move_in_shorter_steps() {
    const JOBS: usize = 10_000;
    const MOST: u64 = MOST_MOVES / 3;
    let (mut server, [producer, _]) = Server::with_clients();
    // Of each two jobs with a key one is blocked.
    let put = |job: usize| format!("put 0 9000 9000 0 con:key-{}\r\n\r\n", job / 2);
    server.driver.ask(producer, (0..JOBS).map(put).collect::<String>());
    server.driver.receive(producer, format!("kick {JOBS}\r\n"));
    server.until(JOBS / 400..=JOBS, MOST, |driver| driver.received(producer).ends_with(b"\n"));
    let holder = server.driver.connect();
    server.driver.ask(holder, "reserve-batch 1000\r\n".repeat(JOBS / 2000));
    assert_eq!(server.driver.facts().reserved, JOBS as u64 / 2);
    server.driver.end(holder, End::HangUp);
    server.until(JOBS / 800..=JOBS, MOST, |driver| driver.facts().reserved == 0);
    server.driver.receive(producer, "flush-tube default\r\n");
    server.driver.iterate();
    server.until_idle(JOBS / 400..=JOBS, 1);
}

/// All slots of the ready jobs of a paused tube are taken by jobs of another one.
#[test]
fn the_end_of_a_pause_passes_10000_blocked_jobs_in_steps() {
    const JOBS: usize = 10_000;
    let (mut server, [producer, waiter]) = Server::with_clients();
    server.driver.ask(producer, "use a\r\npause-tube a 9000\r\n");
    server.driver.ask(waiter, "watch a\r\nignore default\r\n");
    server.driver.receive(waiter, "reserve\r\n");
    for tube in ["a", "b"] {
        let put = |job: usize| format!("put-in-tube {tube} 0 0 9000 0 con:key-{job}\r\n\r\n");
        server.driver.ask(producer, (0..JOBS).map(put).collect::<String>());
    }
    server.driver.ask(producer, "put 9 0 9000 0\r\n\r\n");
    server.hold("b", JOBS);
    server.driver.receive(producer, "pause-tube a 0\r\n");
    let reply = server.reply(waiter, "\r\n\r\n", JOBS / 600..=JOBS / 10);
    assert_eq!(reply, format!("RESERVED {} 0\r\n\r\n", 2 * JOBS + 1));
}

/// Those of one tube, those of 20,000 tubes together, and those of workers whose replies with bodies cost more than
/// an iteration has.
#[test]
fn due_jobs_are_ready_soon_and_in_steps() {
    let put = |tube: usize, body: &str| {
        format!("put-in-tube {tube} 0 5 9000 {}\r\n{body}\r\n", body.len())
    };
    let body = "x".repeat(3_900);
    for (jobs, tubes, body, workers, is_idle) in [
        (100_000, 1, "", 0, true),
        (20_000, 20_000, "", 0, false),
        (3_000, 1, &*body, 3_000, false),
    ] {
        let (mut server, [producer]) = Server::with_clients();
        for job in 0..jobs {
            server.driver.receive(producer, put(job % tubes, body));
        }
        for _ in 0..workers {
            let worker = server.driver.connect();
            server.driver.receive(worker, "watch 0\r\nreserve\r\n");
        }
        server.driver.settle();
        server.pass(Nanos::from_secs(20));
        if is_idle {
            server.until_idle(50..=200, 2 * MOST_MOVES);
        } else {
            server.until(20..=200, MOST_MOVES, |driver| driver.facts().delayed == 0);
        }
        assert_eq!(server.driver.facts().delayed, 0);
    }
}

#[test]
fn a_backlog_of_50000_jobs_of_one_tube_or_client_delays_no_other() {
    const JOBS: usize = 50_000;
    let mut server = Server::new();
    server.fill("backlog", 1, JOBS);
    let [producer, waiter] = server.driver.clients();
    server.driver.receive(waiter, "reserve-with-timeout 6\r\n");
    server.driver.ask(producer, "use small\r\nput 0 1 9000 1\r\nx\r\n");
    server.pass(Nanos::from_secs(1));
    server.iterate();
    // One client sends one command at a time, so that iterations have little work.
    server.until(0..=20, MOST_MOVES / 4, |driver| {
        driver.receive(producer, "peek-ready\r\n");
        driver.take_text(producer).contains("FOUND ")
    });
    assert!(server.driver.facts().delayed > 0, "the backlog was too small");
    server.until(JOBS / 1_100..=JOBS, MOST_MOVES / 4, |driver| driver.facts().delayed == 0);
    // One client reserves all jobs, and their TTR ends together with the wait of another client.
    server.hold("backlog", JOBS);
    server.pass(Nanos::from_secs(1));
    server.fill("left", 0, 1_000);
    let leaver = server.driver.connect();
    server.driver.ask(leaver, "watch left\r\nreserve-batch 1000\r\n");
    server.pass(Nanos::from_secs(8_999));
    assert_eq!(server.reply(waiter, "\n", 1..=20), "TIMED_OUT\r\n");
    // Nor are the jobs late of one that is gone.
    server.driver.end(leaver, End::HangUp);
    server.until(0..=20, 2 * MOST_MOVES, |driver| driver.facts().closing == 0);
    assert!(server.driver.facts().reserved > 0, "the backlog was too small");
}

#[test]
fn the_end_of_50000_kept_keys_delays_no_timer() {
    const KEYS: usize = 50_000;
    let (mut server, [producer, waiter]) = Server::with_clients();
    let put = |key| format!("put 0 0 9 1 idp:{key}:5\r\nx\r\n");
    server.driver.ask(producer, (0..KEYS).map(put).collect::<String>());
    // All keys are kept until the same moment.
    server.driver.receive(producer, "flush-tube default\r\n");
    server.driver.receive(waiter, "reserve-with-timeout 6\r\n");
    server.until(1..=KEYS, KEYS as u64, |driver| !driver.received(producer).is_empty());
    server.pass(Nanos::from_secs(6));
    assert_eq!(server.reply(waiter, "\n", 1..=5), "TIMED_OUT\r\n");
    // The backlog was large enough to delay it. Next to a client with short commands it has a small part of each
    // iteration, and without one a large part.
    let is_over = |driver: &mut Driver| driver.next_due().is_none_or(|due| due > driver.now);
    assert!(!is_over(&mut server.driver));
    for _ in 0..1_000 {
        server.iterate();
        assert!(!is_over(&mut server.driver), "many keys were forgotten in one iteration");
    }
    server.until_idle(5..=100, 0);
}

#[test]
fn workers_that_wake_each_other_leave_budget_for_other_clients() {
    let mut server = Server::new();
    server.most_waits = 30;
    let workers: Vec<Client> = (0..1_500).map(|_| server.driver.connect()).collect();
    for &worker in &workers {
        let behind = "put 0 0 9 1\r\nx\r\nreserve\r\n".repeat(1_200);
        server.driver.receive(worker, format!("reserve\r\n{behind}"));
    }
    server.driver.settle();
    let starter = server.driver.connect();
    server.driver.receive(starter, "put 0 0 9 1\r\nx\r\n".repeat(100));
    let replies = |driver: &Driver| -> usize {
        let replies = |worker| driver.received(worker).windows(3).filter(|it| it == b"ED ").count();
        workers.iter().map(|worker| replies(*worker)).sum()
    };
    // The chains of workers begin one by one.
    (0..20).for_each(|_| _ = server.iterate());
    for _ in 0..10 {
        let before = replies(&server.driver);
        for _ in 0..10 {
            server.iterate();
        }
        let count = replies(&server.driver) - before;
        assert!((100..=10 * MOST_REPLIES).contains(&count), "{count} replies in 10 iterations");
    }
}

#[test]
fn the_end_of_a_pause_serves_5000_waiters_in_steps_and_in_order() {
    const WAITERS: usize = 5_000;
    let mut server = Server::new();
    let producer = server.fill("default", 0, WAITERS);
    server.driver.ask(producer, "pause-tube default 5\r\n");
    let waiters: [Client; WAITERS] = server.driver.clients();
    for waiter in waiters {
        assert_eq!(server.driver.ask(waiter, "reserve\r\nlist-tube-used\r\n"), "");
    }
    server.pass(Nanos::from_millis(5_001));
    server.until(6..=WAITERS, MOST_REPLIES as u64, |driver| driver.facts().ready == 0);
    server.driver.settle();
    for (id, waiter) in (1..).zip(waiters) {
        let expected = format!("RESERVED {id} 0\r\n\r\nUSING default\r\n");
        assert_eq!(server.driver.take_text(waiter), expected);
    }
}

/// At once, and at the end of a pause for which they have waited.
#[test]
fn batches_of_40_clients_share_the_iterations() {
    const CLIENTS: usize = 40;
    const MOST: u64 = MOST_OF_BATCHES + CLIENTS as u64;
    for pause in [0, 5] {
        let mut server = Server::new();
        let producer = server.fill("a", 0, CLIENTS * 1000);
        server.driver.ask(producer, format!("pause-tube a {pause}\r\n"));
        let clients: [Client; CLIENTS] = server.driver.clients();
        for client in clients {
            server.driver.ask(client, "watch a\r\nignore default\r\n");
            server.driver.receive(client, "reserve-batch 1000 100\r\n");
        }
        if pause > 0 {
            server.driver.settle();
            server.pass(Nanos::from_millis(5_001));
        }
        server.until(3..=1_000, MOST, |driver| {
            clients.iter().all(|client| !driver.received(*client).is_empty())
        });
        // Many replies that wait for their clients make batches shorter.
        assert!(server.driver.facts().reserved > MOST, "the batches were too small");
        server.driver.settle();
        for client in clients {
            let ids = numbers(&server.driver.take_text(client), "RESERVED ");
            let ids: String = ids.iter().map(|id| format!(" {id}")).collect();
            server.driver.receive(client, format!("delete-batch{ids}\r\n"));
        }
        server.until(3..=1_000, MOST, |driver| driver.facts().reserved == 0);
    }
}

/// In each tube a job waits for the slot of each key. A worker gets its jobs when all of them were offered.
#[test]
fn slots_for_which_many_tubes_wait_are_offered_in_steps() {
    const KEYS: usize = 40;
    const TUBES: usize = 257;
    for frees in ["delete-batch", "flush-tube held"] {
        let (mut server, [producer, holder, worker]) = Server::with_clients();
        let put = |tube: &str, key| format!("put-in-tube {tube} 0 0 9000 0 con:{key}\r\n\r\n");
        let put_all = |tube: &str| (0..KEYS).map(|key| put(tube, key)).collect::<String>();
        server.driver.ask(producer, put_all("held"));
        server.driver.ask(holder, format!("watch held\r\nreserve-batch {KEYS}\r\n"));
        for tube in 0..TUBES {
            server.driver.ask(producer, put_all(&format!("tube-{tube}")));
        }
        server.driver.ask(worker, format!("watch tube-{}\r\nignore default\r\n", TUBES - 1));
        let is_delete = frees == "delete-batch";
        let ids = (1..=KEYS).map(|id| format!(" {id}")).filter(|_| is_delete).collect::<String>();
        server.driver.receive(holder, format!("{frees}{ids}\r\n"));
        if is_delete {
            let reply = server.reply(holder, "\r\n", 9..=60);
            assert_eq!(reply, format!("DELETED_BATCH {KEYS} 0\r\n"));
        }
        server.driver.receive(worker, format!("reserve-batch {KEYS}\r\n"));
        let reply = server.reply(worker, "\r\n\r\n", if is_delete { 1..=3 } else { 9..=60 });
        assert!(reply.starts_with(&format!("RESERVED_BATCH {KEYS}\r\n")), "{frees}: {reply}");
    }
}

/// A put raises the limit of a key, and a client waits at each tube for which it blocked a job.
#[test]
fn blocked_jobs_of_5000_waiters_are_given_out_in_steps() {
    const JOBS: usize = 5_000;
    let (mut server, [producer]) = Server::with_clients();
    server.driver.ask(producer, "put 0 0 9000 0 con:a\r\n\r\nreserve\r\n");
    for tube in 0..JOBS {
        let waiter = server.driver.connect();
        server.driver.ask(producer, format!("put-in-tube {tube} 0 0 9000 0 con:a\r\n\r\n"));
        server.driver.receive(waiter, format!("watch {tube}\r\nreserve\r\n"));
    }
    server.driver.settle();
    server.driver.receive(producer, "put 0 0 9000 0 con:a:9000\r\n\r\n");
    server.until(JOBS / 128..=JOBS, 128, |driver| driver.facts().reserved == JOBS as u64 + 1);
}

#[test]
fn a_flush_of_200000_jobs_is_seen_at_once_and_freed_in_steps() {
    const JOBS: usize = 100_000;
    let mut server = Server::new();
    let asker = server.fill("a", 0, JOBS);
    server.fill("a", 9000, JOBS);
    server.hold("a", 20_000);
    server.driver.receive(asker, "flush-tube a\r\nlist-tube-used\r\n");
    server.driver.iterate();
    let Facts { ready, delayed, reserved, .. } = server.driver.facts();
    assert_eq!((ready, delayed, reserved), (0, 0, 0));
    server.until(2 * JOBS / 1_100..=2 * JOBS / 10, 2, |driver| {
        driver.received(asker).ends_with(b"USING a\r\n")
    });
    let reply = server.driver.take_text(asker);
    assert_eq!(reply, format!("FLUSHED {}\r\nUSING a\r\n", 2 * JOBS));
    // It goes on without its client, and soon if the server is idle.
    server.fill("a", 0, JOBS);
    server.driver.receive(asker, "flush-tube a\r\n");
    server.driver.iterate();
    server.driver.end(asker, End::HangUp);
    server.until_idle(50..=200, 1);
}

/// The jobs that a worker has reserved are freed last.
#[test]
fn deadline_soon_is_replied_during_a_flush_of_other_reserved_jobs() {
    let mut server = Server::new();
    let producer = server.fill("large", 0, 100_000);
    let worker = server.driver.connect();
    let put = "put 0 0 1 1\r\nx\r\n";
    server.driver.ask(producer, put.repeat(51) + "use small\r\n" + put);
    let reserve = (100_002..=100_052).map(|id| format!("reserve-job {id}\r\n"));
    let watch = "watch empty\r\nignore default\r\n";
    server.driver.ask(worker, reserve.collect::<String>() + watch);
    assert_eq!(server.driver.facts().reserved, 51);
    server.driver.receive(producer, "flush-tube large\r\n");
    server.driver.iterate();
    for command in ["reserve-with-timeout 0\r\n", "reserve-batch 5\r\n"] {
        server.driver.receive(worker, command);
        assert_eq!(server.reply(worker, "\n", 1..=5), "DEADLINE_SOON\r\n");
    }
    assert!(server.driver.received(producer).is_empty(), "the flush was too small");
}

#[test]
fn pages_over_60000_jobs_are_made_in_steps_and_have_each_job_once() {
    let (mut server, [asker]) = Server::with_clients();
    // The jobs of another tube lie between those of the tube, so that all jobs must be compared.
    for (tube, jobs) in [("b", 20_000), ("a", 10_000), ("b", 20_000), ("a", 10_000)] {
        server.fill(tube, 9000, jobs);
    }
    let mut listed = Vec::new();
    let before = server.driver.iterations;
    let (mut after, mut pages) = (0, 0);
    while pages == 0 || after > 0 {
        server.driver.receive(asker, format!("list-jobs a any 1000 {after}\r\n"));
        let reply = server.reply(asker, "\n\r\n", 1..=60_000 / 128);
        let ids = numbers(&reply, "- {id: ");
        assert!(ids.len() <= 1000, "{} jobs in one page", ids.len());
        listed.extend(ids);
        (after, pages) = (yaml::number(&reply, "next"), pages + 1);
        assert!(pages <= 100, "the pages do not end");
    }
    let iterations = server.driver.iterations - before;
    assert!(iterations >= pages + 60_000 / 8_192, "all pages took {iterations} iterations");
    assert!(listed.into_iter().eq((20_001..=30_000).chain(50_001..=60_000)), "not each job once");
}

/// The first page of each is as much work as an iteration has.
#[test]
fn pages_of_many_clients_leave_time_for_others() {
    for (command, clients, least) in [
        ("list-jobs a any 1000", 40, 10),
        ("peek-batch a any 1000", 40, 10),
        // A job that is reserved is searched among all.
        ("list-jobs held any 1", 40, 10),
        ("list-clients 1000", 400, 100),
    ] {
        let mut server = Server::new();
        let producer = server.fill("a", 0, 10_000);
        server.driver.ask(producer, "use held\r\nput 0 0 900 0\r\n\r\nreserve-job 10001\r\n");
        server.driver.ask(producer, "put-in-tube small 0 0 9 0\r\n\r\n".repeat(20));
        let clients: Vec<Client> = (0..clients).map(|_| server.driver.connect()).collect();
        for &client in &clients {
            server.driver.receive(client, format!("{command}\r\n"));
        }
        server.until(least..=1_000, 0, |driver| {
            clients.iter().all(|client| driver.received(*client).ends_with(b"\n"))
        });
        // A small page is made at once.
        let [page, other] = server.driver.clients();
        for tube in ["small", "a"] {
            server.driver.receive(other, "list-tube-used\r\n");
            server.driver.receive(page, format!("list-jobs {tube} any 10\r\n"));
            server.reply(page, "\n", 1..=1);
        }
    }
}

/// Even when the due jobs of all tubes are more than one tick moves.
#[test]
fn a_job_that_is_due_wins_over_a_later_timeout() {
    let (mut server, [producer, worker]) = Server::with_clients();
    let put = |tube: usize| format!("put-in-tube t{tube} 0 1 9000 0\r\n\r\n");
    server.driver.ask(producer, (0..100).map(put).collect::<String>());
    server.driver.ask(worker, "watch t99\r\nignore default\r\n");
    server.driver.receive(worker, "reserve-with-timeout 2\r\n");
    server.iterate();
    server.pass(Nanos::from_secs(20));
    server.until(2..=100, MOST_MOVES, |driver| !driver.received(worker).is_empty());
    assert_eq!(server.driver.take_text(worker), "RESERVED 100 0\r\n\r\n");
}

/// They take all the work of each iteration, and always have more commands.
#[test]
fn busy_clients_get_replies_soon_and_leave_work_for_a_command_in_steps() {
    let mut driver = Driver::new(Options::DEFAULT, START);
    let client = driver.connect();
    driver.ask(client, "put 0 99 9 0\r\n\r\n".repeat(5_000));
    let busy: [Client; 200] = driver.clients();
    busy.iter().for_each(|&it| driver.receive(it, "list-tube-used\r\n".repeat(1_000)));
    driver.receive(client, "kick 5000\r\n");
    (0..40).for_each(|_| _ = driver.iterate());
    assert_eq!(driver.take_text(client), "KICKED 5000\r\n");
    let replies = busy.map(|it| driver.take(it).len());
    assert!(replies.iter().all(|len| (1..15_000).contains(len)), "{replies:?}");
}

/// Short replies do not wait for them.
#[test]
fn long_replies_to_many_clients_are_sent_in_several_iterations() {
    const LEN: usize = 500_000;
    let mut options = Options::DEFAULT;
    options.settings.max_job_size = 1 << 20;
    let mut driver = Driver::new(options, START);
    let short = driver.connect();
    driver.ask(short, put(0, 0, 9, "x".repeat(LEN)));
    let long: [Client; 20] = driver.clients();
    long.iter().for_each(|&client| driver.receive(client, "peek 1\r\n"));
    driver.receive(short, "list-tube-used\r\n");
    driver.iterate();
    let sent: usize = long.iter().map(|&client| driver.take(client).len()).sum();
    assert!((LEN..2 * LEN + (1 << 21)).contains(&sent), "{sent} bytes in one iteration");
    assert_eq!(driver.take_text(short), "USING default\r\n");
}

/// Sends the command of each of these clients. About `most` of them are served in the next iteration: what a command
/// costs counts, so that an iteration ends in time.
#[track_caller]
fn expect_served(
    driver: &mut Driver,
    clients: &[Client],
    most: usize,
    command: &dyn Fn(usize) -> String,
) {
    for (number, &client) in clients.iter().enumerate() {
        driver.receive(client, command(number));
    }
    driver.iterate();
    let served = clients.iter().filter(|&&client| driver.unread(client) == 0).count();
    let example = command(1);
    assert!((most / 3..=most + 2).contains(&served), "{served} clients: {example:.20}");
}

#[test]
fn commands_of_many_clients_that_cost_more_than_others_take_more_iterations() {
    const TUBES: usize = 40;
    const JOBS_IN_PAGE: usize = 32;
    let mut driver = Driver::new(Options::DEFAULT, START);
    let [producer, holder] = driver.clients();
    let watch = |count| (0..count).map(|tube| format!("watch {tube}\r\n")).collect::<String>();
    let put_with_key = |tube: &str, key| format!("put-in-tube {tube} 0 0 9 0 con:{key}\r\n\r\n");
    // Jobs with keys; one with a body; and those of 60 memory pages of bodies, of which each has one left.
    driver.ask(producer, (1..=300).map(|key| put_with_key("keys", key)).collect::<String>());
    driver.ask(producer, put(0, 0, 9, "x".repeat(3_900)));
    driver.ask(producer, put(0, 0, 9, "x".repeat(4_096)).repeat(60 * JOBS_IN_PAGE));
    let in_pages = (0..60 * JOBS_IN_PAGE).filter(|job| job % JOBS_IN_PAGE > 0);
    driver
        .ask(producer, in_pages.map(|job| format!("delete {}\r\n", 302 + job)).collect::<String>());
    // Jobs that are reserved, and as many that their keys block.
    let keys = 1_000..1_000 + TUBES * 32;
    for key in keys.clone() {
        driver.ask(producer, put_with_key(&format!("held-{}", key % TUBES), key));
    }
    let tubes = (0..TUBES).map(|tube| format!("watch held-{tube}\r\n")).collect::<String>();
    driver.ask(holder, tubes + "ignore default\r\nreserve-batch 1000\r\nreserve-batch 1000\r\n");
    driver.ask(producer, keys.map(|key| put_with_key("blocked", key)).collect::<String>());
    let waiters: Vec<Client> = (0..3_000).map(|_| driver.connect()).collect();
    for waiter in waiters {
        driver.receive(waiter, "watch waited\r\nignore default\r\nreserve\r\n");
    }
    driver.ask(producer, watch(900));
    let clients: [Client; 300] = driver.clients();
    for client in clients {
        driver.receive(client, watch(100) + "ignore default\r\nreserve-with-timeout 0\r\n");
    }
    driver.settle();
    for (most, command) in [
        (256, &(|_| "list-tube-used\r\n".to_owned()) as &dyn Fn(usize) -> String),
        (100, &|_| "peek 301\r\n".to_owned()),
        (20, &|_| "list-tubes\r\n".to_owned()),
        (92, &|_| "list-tubes-watched\r\n".to_owned()),
        (15, &|_| "stats-tube waited\r\n".to_owned()),
        // It is taken from its group, and comes back.
        (195, &|number| format!("reserve-job {}\r\n", 1 + number)),
        (142, &|number| format!("release {} 0 0\r\n", 1 + number)),
        // Each frees a memory page.
        (128, &|number| format!("delete {}\r\n", 302 + number * JOBS_IN_PAGE)),
        // It compares 256 jobs.
        (28, &|_| "use blocked\r\npeek-ready\r\n".to_owned()),
        // It frees 32 slots, and offers 32 jobs.
        (16, &|number| format!("flush-tube held-{number}\r\n")),
        // 300 clients look at the tube again when they reserve.
        (44, &|number| format!("put-in-tube {number} 0 0 9 0\r\n\r\n")),
        // A part of a body that is read.
        (200, &|_| format!("put 0 0 9 60000\r\n{}", "x".repeat(16_000))),
    ] {
        expect_served(&mut driver, &clients, most, command);
        driver.advance(Nanos::from_millis(1));
    }
}

/// Each worker looks at each tube again when it reserves.
#[test]
fn pipelined_puts_that_many_workers_see_take_more_iterations() {
    const TUBES: usize = 30;
    let limits = Limits { iteration_work: 512, ..Limits::DEFAULT };
    let mut driver = Driver::new(Options { limits, ..Options::DEFAULT }, START);
    let watch = (0..TUBES).map(|tube| format!("watch {tube}\r\n")).collect::<String>();
    for _ in 0..400 {
        let worker = driver.connect();
        driver.receive(worker, format!("{watch}reserve-with-timeout 0\r\n"));
    }
    driver.settle();
    let producer = driver.connect();
    let puts = (0..TUBES).map(|tube| format!("put-in-tube {tube} 0 0 9 0\r\n\r\n"));
    driver.receive(producer, puts.collect::<String>());
    driver.iterate();
    let puts = driver.facts().ready;
    assert!((4..=7).contains(&puts), "{puts} puts in an iteration");
}

/// Bodies are read from the page cache, or many are dropped for the memory of one.
#[test]
fn peeks_of_bodies_on_disk_take_more_iterations() {
    const LARGE: usize = 3_000_000;
    let empty = put(0, 0, 9, "").repeat(9 * 2_048);
    for (most, cache, len, jobs, others) in
        [(124, 0, 10, 300, &[][..]), (27, 0, 60_000, 40, &[]), (8, 1 << 20, LARGE, 1, &empty)]
    {
        let mut options = Options::DEFAULT;
        options.settings.body_cache_bytes = Some(cache);
        options.settings.max_job_size = u32::try_from(LARGE).unwrap();
        if cache > 0 {
            options.settings.max_memory_bytes = 5 << 20;
        }
        let disk = FakeDisk::default();
        let mut driver = Driver::start(options, Some(disk.boxed()), START).expect("the disk works");
        let producer = driver.connect();
        driver.ask(producer, put(0, 0, 9, "x".repeat(len)).repeat(jobs));
        let replies = driver.ask(producer, others);
        assert!(!replies.contains("OUT_OF_MEMORY"), "{} bytes", driver.job_bytes());
        let clients: [Client; 300] = driver.clients();
        let peek = |number| format!("peek {}\r\n", 1 + if jobs == 1 { 0 } else { number });
        expect_served(&mut driver, &clients, most, &peek);
    }
}

#[test]
fn the_timeouts_of_5000_waiting_clients_end_in_steps() {
    const WAITERS: usize = 5_000;
    let mut server = Server::new();
    for _ in 0..WAITERS {
        let waiter = server.driver.connect();
        server.driver.receive(waiter, "reserve-with-timeout 5\r\n");
    }
    server.driver.settle();
    server.pass(Nanos::from_secs(6));
    // Each iteration sends few replies.
    server.until_idle(WAITERS / 700..=WAITERS, 0);
}

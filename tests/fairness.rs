//! Fairness: how much work the engine does in one iteration of the loop, whatever clients send, wake,
//! close or list, and however much comes due. Work is counted in replies, jobs and tubes, not timed.

mod harness;

use beanstalkd::testing::{Nanos, Settings};
use harness::engine::Engine;
use harness::event_loop::{ClientId, EventLoop};
use harness::fixtures::START;
use harness::reply::frame;
use harness::yaml;

/// The most replies in one iteration. A reply takes about a microsecond, and some 4 more if it is
/// sent to a client of its own.
const MOST_REPLIES: usize = 700;
/// The most jobs moved, or tubes removed, in one iteration.
const MOST_MOVES: u64 = 1_100;
/// Virtual time from one iteration to the next.
const ITERATION: Nanos = Nanos::from_nanos(100_000);
/// The most bytes that the loop reads from a connection at once.
const READ_LEN: usize = 16 * 1024;

fn new_loop() -> EventLoop {
    EventLoop::new(Engine::new(Settings::DEFAULT, START), READ_LEN, ITERATION)
}

/// What only these tests do with the loop. Clients send text.
impl EventLoop {
    fn take_text(&mut self, client: ClientId) -> String {
        String::from_utf8(self.take(client)).expect("the test sends text")
    }

    /// Sends a command and iterates until the output ends with `end`.
    fn ask_until(&mut self, client: ClientId, command: &str, end: &str) -> String {
        self.send(client, command);
        self.wait_for(client, end, |_| ())
    }

    /// Iterates until the output ends with `end`, and calls `each` after each iteration.
    fn wait_for(
        &mut self,
        client: ClientId,
        end: &str,
        mut each: impl FnMut(&mut EventLoop),
    ) -> String {
        for _ in 0..1_000_000 {
            if self.received(client).ends_with(end.as_bytes()) {
                return self.take_text(client);
            }
            self.iterate();
            each(self);
        }
        panic!("no output that ends with {end:?}: {:?}", self.take_text(client));
    }

    fn number(&mut self, client: ClientId, key: &str) -> u64 {
        yaml::number(&self.ask_until(client, "stats\r\n", "\"\n\r\n"), key)
    }

    fn ready_jobs(&self) -> u64 {
        self.server.summary().ready
    }
}

/// Makes the connection watch `count` tubes that no other connection watches.
fn watch_many(engine: &mut EventLoop, client: ClientId, count: usize) {
    let commands: String = (0..count).map(|number| format!("watch tube-{number}\r\n")).collect();
    engine.ask_until(client, &commands, &format!("WATCHING {}\r\n", count + 1));
}

#[test]
fn workers_that_wake_each_other_leave_budget_for_other_clients() {
    const WORKERS: usize = 1_500;
    let mut engine = new_loop();
    let workers: Vec<ClientId> = (0..WORKERS).map(|_| engine.connect()).collect();
    let (starter, other) = (engine.connect(), engine.connect());
    let behind = b"put 0 0 9 1\r\nx\r\nreserve\r\n".repeat(2_400);
    for &worker in &workers {
        engine.send(worker, b"reserve\r\n");
        engine.send(worker, &behind);
    }
    engine.settle();
    engine.send(starter, b"put 0 0 9 1\r\nx\r\n".repeat(100));
    let mut asked = 0;
    for _ in 0..300 {
        if engine.take_text(other).ends_with('\n') || asked == 0 {
            engine.send(other, b"list-tube-used\r\n");
            asked += 1;
        }
        let received = |engine: &EventLoop| -> usize {
            workers.iter().chain([&other]).map(|client| engine.received(*client).len()).sum()
        };
        let before = received(&engine);
        let flushed = engine.iterate();
        // The shortest reply has about 12 bytes.
        let replies = (received(&engine) - before) / 12;
        assert!(replies <= 4 * MOST_REPLIES, "{replies} replies in one iteration");
        assert!(flushed <= MOST_REPLIES, "{flushed} connections were flushed in one iteration");
    }
    assert!(asked > 10, "300 iterations ran {asked} commands of another client");
    let moved: usize = workers.iter().map(|key| engine.received(*key).len()).sum();
    assert!(moved > 100_000, "the workers received {moved} bytes");
}

#[test]
fn a_connection_with_30000_watches_closes_in_steps() {
    const WATCHES: usize = 30_000;
    let mut engine = new_loop();
    let (worker, other) = (engine.connect(), engine.connect());
    watch_many(&mut engine, worker, WATCHES);
    assert_eq!(engine.number(other, "current-tubes"), WATCHES as u64 + 1);
    let key = engine.key(worker);
    engine.disconnect(worker);
    let mut tubes = WATCHES as u64 + 1;
    for _ in 0..10_000 {
        let left = engine.number(other, "current-tubes");
        assert!(tubes - left <= MOST_MOVES, "{} tubes were removed in one iteration", tubes - left);
        tubes = left;
        if tubes == 1 {
            break;
        }
    }
    assert_eq!((tubes, engine.number(other, "current-connections")), (1, 1));
    engine.server.check();
    let next = engine.connect();
    assert_eq!(engine.key(next), key, "the key is free again");
}

#[test]
fn a_reserve_over_40000_tubes_finds_the_best_job_in_steps() {
    const WATCHES: usize = 40_000;
    let mut engine = new_loop();
    let (worker, other) = (engine.connect(), engine.connect());
    watch_many(&mut engine, worker, WATCHES);
    for (id, number) in (1..).zip([17, WATCHES - 1, 5_000]) {
        let put = format!("use tube-{number}\r\nput {number} 0 9 1\r\nx\r\n");
        engine.ask_until(other, &put, &format!("INSERTED {id}\r\n"));
    }
    let before = engine.iterations;
    engine.send(worker, b"reserve\r\n");
    let first = engine.wait_for(worker, "x\r\n", |engine| {
        engine.ask_until(other, "list-tube-used\r\n", "tube-5000\r\n");
    });
    assert_eq!(first, "RESERVED 1 1\r\nx\r\n");
    let iterations = engine.iterations - before;
    assert!(iterations >= WATCHES / 2_048, "the search took {iterations} iterations");
    assert_eq!(engine.ask_until(worker, "reserve\r\n", "x\r\n"), "RESERVED 3 1\r\nx\r\n");
    assert_eq!(engine.ask_until(worker, "reserve\r\n", "x\r\n"), "RESERVED 2 1\r\nx\r\n");
    // A job that is put while the worker is being enqueued is not missed in any tube.
    for number in [0, 20_000, WATCHES - 1] {
        engine.send(worker, b"reserve\r\n");
        engine.iterate();
        let put = format!("use tube-{number}\r\nput 0 0 9 1\r\nx\r\n");
        engine.send(other, &put);
        let reply = engine.wait_for(worker, "x\r\n", |_| ());
        assert!(reply.starts_with("RESERVED "), "{reply}");
        engine.server.check();
        engine.take(other);
    }
    assert_eq!(engine.ask_until(worker, "reserve-with-timeout 0\r\n", "\n"), "TIMED_OUT\r\n");
}

#[test]
fn the_end_of_a_pause_serves_5000_waiters_in_steps_and_in_order() {
    const WAITERS: usize = 5_000;
    let mut engine = new_loop();
    let other = engine.connect();
    engine.ask_until(other, "pause-tube default 5\r\n", "PAUSED\r\n");
    engine.send(other, b"put 0 0 9 1\r\nx\r\n".repeat(WAITERS));
    engine.wait_for(other, &format!("INSERTED {WAITERS}\r\n"), |_| ());
    let waiters: Vec<ClientId> = (0..WAITERS).map(|_| engine.connect()).collect();
    for &waiter in &waiters {
        engine.ask_until(waiter, "reserve\r\nlist-tube-used\r\n", "");
        engine.iterate();
    }
    engine.advance(Nanos::from_millis(5_001));
    let mut iterations = 0;
    while waiters.iter().any(|waiter| engine.received(*waiter).is_empty()) {
        let flushed = engine.iterate();
        assert!(flushed <= MOST_REPLIES, "{flushed} connections were flushed in one iteration");
        iterations += 1;
        assert!(iterations < WAITERS, "not all waiters are served");
        if iterations % 100 == 0 {
            engine.server.check();
        }
    }
    assert!(iterations > 5, "all waiters were served in {iterations} iterations");
    for (id, &waiter) in (1..).zip(&waiters) {
        engine.wait_for(waiter, &format!("RESERVED {id} 1\r\nx\r\nUSING default\r\n"), |_| ());
    }
    assert!(engine.ask_until(other, "stats-tube default\r\n", "\n\r\n").contains("\npause: 0\n"));
}

#[test]
fn iterations_stay_short_while_50000_jobs_come_due() {
    const JOBS: usize = 50_000;
    let mut engine = new_loop();
    let (producer, other) = (engine.connect(), engine.connect());
    engine.ask_until(producer, "use backlog\r\n", "USING backlog\r\n");
    engine.send(producer, b"put 0 1 9 0\r\n\r\n".repeat(JOBS));
    engine.wait_for(producer, &format!("INSERTED {JOBS}\r\n"), |_| ());
    engine.iterate();
    engine.advance(Nanos::from_millis(1_001));
    let mut ready = 0;
    let mut iterations = 0;
    while ready < JOBS as u64 {
        engine.ask_until(other, "list-tube-used\r\n", "USING default\r\n");
        let now_ready = engine.ready_jobs();
        // One client sends one command at a time, so that iterations have little work.
        let moved = now_ready - ready;
        assert!(moved <= MOST_MOVES / 4 || ready == 0, "{moved} jobs in an iteration");
        ready = now_ready;
        iterations += 1;
        assert!(iterations < JOBS, "{ready} jobs of {JOBS} are ready");
    }
}

#[test]
fn a_list_of_30000_tubes_is_made_in_steps_and_shared() {
    const TUBES: usize = 30_000;
    let mut engine = new_loop();
    let (holder, other) = (engine.connect(), engine.connect());
    watch_many(&mut engine, holder, TUBES);
    let askers: Vec<ClientId> = (0..20).map(|_| engine.connect()).collect();
    for &asker in &askers {
        engine.send(asker, b"list-tubes\r\nlist-tube-used\r\n");
    }
    let mut iterations = 0;
    let before = engine.iterations;
    engine.wait_for(askers[0], "USING default\r\n", |engine| {
        iterations += 1;
        // Tubes are created and removed meanwhile.
        engine.ask_until(other, &format!("use new-{iterations}\r\n"), "\n");
        let gone = TUBES - iterations;
        engine.ask_until(
            holder,
            &format!("ignore tube-{gone}\r\nignore tube-{iterations}\r\n"),
            "\n",
        );
    });
    let in_all = engine.iterations - before;
    assert!(in_all >= TUBES / 2_048, "the list took {in_all} iterations");
    let lists: Vec<String> = askers[1..]
        .iter()
        .map(|&asker| engine.wait_for(asker, "USING default\r\n", |_| ()))
        .collect();
    for list in &lists {
        assert!(*list == lists[0], "the lists differ");
        let reply = frame(list.as_bytes()).expect("the reply is whole");
        let document = std::str::from_utf8(reply.body.expect("a list has a body"));
        let names = document.expect("names are ASCII").strip_prefix("---\n").expect("it is YAML");
        let mut names: Vec<&str> = names.lines().collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "a tube is listed twice");
        let stays = |number: &usize| (2 * iterations..TUBES - 2 * iterations).contains(number);
        for number in (0..TUBES).filter(stays) {
            let line = format!("- tube-{number}");
            assert!(names.binary_search(&&*line).is_ok(), "{line} is missing");
        }
    }
    let watched =
        engine.ask_until(holder, "list-tubes-watched\r\nlist-tube-used\r\n", "USING default\r\n");
    assert!(
        watched.contains("- default\n") && watched.contains(&format!("- tube-{}\n", TUBES / 2))
    );
    engine.server.check();
}

#[test]
fn a_client_may_disconnect_while_its_list_is_made() {
    let mut engine = new_loop();
    let (holder, first, second) = (engine.connect(), engine.connect(), engine.connect());
    watch_many(&mut engine, holder, 5_000);
    engine.send(first, b"list-tubes\r\n");
    engine.send(second, b"list-tubes\r\n");
    engine.iterate();
    engine.disconnect(first);
    engine.server.check();
    assert!(engine.wait_for(second, "\n\r\n", |_| ()).starts_with("OK "));
    engine.server.check();
}

/// Puts jobs that come due at the same moment. All commands have run.
fn engine_with_due_jobs(jobs: usize) -> (EventLoop, ClientId) {
    let mut engine = new_loop();
    let producer = engine.connect();
    engine.ask_until(producer, "use backlog\r\n", "USING backlog\r\n");
    engine.send(producer, b"put 0 1 9 0\r\n\r\n".repeat(jobs));
    engine.wait_for(producer, &format!("INSERTED {jobs}\r\n"), |_| ());
    engine.settle();
    (engine, producer)
}

#[test]
fn an_idle_server_makes_100000_due_jobs_ready_soon() {
    const JOBS: usize = 100_000;
    let (mut engine, _) = engine_with_due_jobs(JOBS);
    engine.advance(Nanos::from_secs(1));
    let before = engine.iterations;
    while engine.ready_jobs() < JOBS as u64 {
        let next = engine.server.next_due().expect("more work is due");
        assert!(next <= engine.now + ITERATION, "the loop would sleep before the work is done");
        engine.iterate();
    }
    let iterations = engine.iterations - before;
    assert!((50..=JOBS / 500).contains(&iterations), "it took {iterations} iterations");
}

#[test]
fn a_backlog_of_one_tube_or_client_delays_no_other() {
    const JOBS: usize = 50_000;
    let (mut engine, holder) = engine_with_due_jobs(JOBS);
    let (other, waiter) = (engine.connect(), engine.connect());
    engine.send(waiter, b"reserve-with-timeout 6\r\n");
    engine.ask_until(
        other,
        "use small\r\nput 0 1 9 1\r\nx\r\n",
        &format!("INSERTED {}\r\n", JOBS + 1),
    );
    engine.advance(Nanos::from_secs(1));
    let before = engine.iterations;
    while !engine.ask_until(other, "peek-ready\r\n", "\r\n").starts_with("FOUND ") {
        assert!(engine.iterations - before < 20, "the job of another tube is not ready");
    }
    let ready = engine.ready_jobs();
    assert!(ready < JOBS as u64, "all {ready} are ready: the backlog was too small");
    while engine.ready_jobs() <= JOBS as u64 {
        engine.iterate();
    }
    // One client reserves all jobs, and their TTR ends together with the wait of another client.
    engine.send(holder, b"watch backlog\r\nignore default\r\n");
    engine.send(holder, b"reserve\r\n".repeat(JOBS));
    while engine.server.summary().reserved < JOBS as u64 {
        engine.iterate();
    }
    engine.take(holder);
    engine.advance(Nanos::from_secs(10));
    let before = engine.iterations;
    assert_eq!(engine.wait_for(waiter, "\n", |_| ()), "TIMED_OUT\r\n");
    let iterations = engine.iterations - before;
    assert!(iterations < 20, "another client got TIMED_OUT after {iterations} iterations");
    assert!(engine.server.summary().reserved > 0, "the backlog was too small");
    engine.server.check();
}

#[test]
fn the_end_of_50000_kept_keys_delays_no_timer() {
    const KEYS: usize = 50_000;
    let mut engine = new_loop();
    let (producer, waiter) = (engine.connect(), engine.connect());
    let puts: String = (0..KEYS).map(|key| format!("put 0 0 9 1 idp:{key}:5\r\nx\r\n")).collect();
    engine.send(producer, puts);
    engine.wait_for(producer, &format!("INSERTED {KEYS}\r\n"), |_| ());
    engine.take(producer);
    // All keys are kept until the same moment.
    engine.ask_until(producer, "flush-tube default\r\n", &format!("FLUSHED {KEYS}\r\n"));
    engine.send(waiter, b"reserve-with-timeout 6\r\n");
    engine.iterate();
    engine.advance(Nanos::from_secs(6));
    let before = engine.iterations;
    assert_eq!(engine.wait_for(waiter, "\n", |_| ()), "TIMED_OUT\r\n");
    let iterations = engine.iterations - before;
    assert!(iterations < 5, "another client got TIMED_OUT after {iterations} iterations");
    let is_due = |engine: &EventLoop| engine.server.next_due().is_some_and(|at| at <= engine.now);
    assert!(is_due(&engine), "the backlog was too small");
    while is_due(&engine) {
        engine.iterate();
    }
    engine.server.check();
}

#[test]
fn a_list_is_dropped_when_its_last_client_disconnects() {
    let mut engine = new_loop();
    let (holder, asker) = (engine.connect(), engine.connect());
    watch_many(&mut engine, holder, 5_000);
    engine.send(asker, b"list-tubes\r\n");
    engine.iterate();
    engine.iterate();
    engine.disconnect(asker);
    engine.iterate();
    assert!(engine.server.next_due().is_none_or(|due| due > engine.now), "work is due");
    let list = engine.ask_until(holder, "list-tubes\r\nlist-tube-used\r\n", "USING default\r\n");
    assert_eq!(list.matches("\n- ").count(), 5_001);
}

// ---- Flushes, pages and batches ----

/// Puts this number of jobs into a tube, and returns the client.
fn fill_tube(engine: &mut EventLoop, tube: &str, delay: u32, jobs: usize) -> ClientId {
    let producer = engine.connect();
    engine.ask_until(producer, &format!("use {tube}\r\n"), &format!("USING {tube}\r\n"));
    engine.send(producer, format!("put 0 {delay} 9000 0\r\n\r\n").repeat(jobs));
    let mut replies = 0;
    while replies < jobs {
        engine.iterate();
        replies += engine.take_text(producer).lines().count();
    }
    producer
}

/// Reserves jobs of a tube until the client holds this number.
fn hold_jobs(engine: &mut EventLoop, client: ClientId, tube: &str, jobs: u64) {
    engine.send(client, format!("watch {tube}\r\nignore default\r\n"));
    engine
        .send(client, "reserve-batch 1000\r\n".repeat(usize::try_from(jobs).expect("few") / 1000));
    while engine.server.summary().reserved < jobs {
        engine.iterate();
    }
    engine.settle();
    engine.take(client);
}

#[test]
fn a_flush_of_200000_jobs_is_seen_at_once_and_freed_in_steps() {
    const JOBS: usize = 100_000;
    let mut engine = new_loop();
    let asker = fill_tube(&mut engine, "a", 0, JOBS);
    fill_tube(&mut engine, "a", 9000, JOBS);
    let (worker, other) = (engine.connect(), engine.connect());
    hold_jobs(&mut engine, worker, "a", 20_000);
    let before = engine.iterations;
    engine.send(asker, b"flush-tube a\r\nlist-tube-used\r\n");
    engine.iterate();
    let summary = engine.server.summary();
    assert_eq!((summary.ready, summary.delayed, summary.reserved), (0, 0, 0));
    let reply = engine.wait_for(asker, "USING a\r\n", |engine| {
        // Another client puts into the tube, and is served in each iteration.
        let iterations = engine.iterations;
        engine.ask_until(other, "put-in-tube a 0 0 9 0\r\n\r\n", "\r\n");
        assert!(engine.iterations - iterations <= 2, "a command of another client has waited");
    });
    assert_eq!(reply, format!("FLUSHED {}\r\nUSING a\r\n", 2 * JOBS));
    let iterations = engine.iterations - before;
    let least = 2 * JOBS / usize::try_from(MOST_MOVES).expect("few");
    assert!(iterations >= least, "200,000 jobs were freed in {iterations} iterations");
    assert!(engine.server.summary().ready > 0, "the jobs that were put meanwhile are gone");
    assert_eq!(engine.ask_until(worker, "touch-all\r\n", "\n"), "TOUCHED_ALL 0\r\n");
    engine.server.check();
}

/// The jobs that a worker has reserved are freed last.
#[test]
fn deadline_soon_is_replied_during_a_flush_of_other_reserved_jobs() {
    let mut engine = new_loop();
    let worker = engine.connect();
    let producer = fill_tube(&mut engine, "large", 0, 100_000);
    engine.ask_until(producer, "use large\r\nput 0 0 1 1\r\nx\r\n", "INSERTED 100001\r\n");
    for id in 1..=50 {
        let reply = engine.ask_until(
            producer,
            "put 0 0 1 1\r\nx\r\n",
            &format!("INSERTED {}\r\n", 100_001 + id),
        );
        assert!(reply.starts_with("INSERTED"));
        engine.ask_until(worker, &format!("reserve-job {}\r\n", 100_001 + id), "x\r\n");
    }
    engine.ask_until(producer, "use small\r\nput 0 0 1 1\r\nx\r\n", "INSERTED 100052\r\n");
    engine.ask_until(worker, "reserve-job 100052\r\n", "x\r\n");
    engine.ask_until(worker, "watch empty\r\nignore default\r\n", "WATCHING 1\r\n");
    engine.send(producer, b"flush-tube large\r\n");
    engine.iterate();
    for command in ["reserve-with-timeout 0\r\n", "reserve-batch 5\r\n"] {
        assert_eq!(engine.ask_until(worker, command, "\r\n"), "DEADLINE_SOON\r\n");
    }
    assert!(engine.received(producer).is_empty(), "the flush was too small");
    engine.wait_for(producer, "FLUSHED 100051\r\n", |_| ());
}

/// An idle server frees the jobs soon, also when the client has gone away.
#[test]
fn a_flush_goes_on_without_its_client() {
    const JOBS: usize = 100_000;
    let mut engine = new_loop();
    let asker = fill_tube(&mut engine, "a", 0, JOBS);
    let other = engine.connect();
    engine.send(asker, b"flush-tube a\r\n");
    engine.iterate();
    engine.disconnect(asker);
    let before = engine.iterations;
    while engine.server.next_due().is_some_and(|due| due <= engine.now) {
        engine.iterate();
    }
    let iterations = engine.iterations - before;
    assert!((50..JOBS / 500).contains(&iterations), "it took {iterations} iterations");
    assert_eq!(engine.ask_until(other, "flush-tube a\r\n", "\n"), "NOT_FOUND\r\n");
    engine.server.check();
}

/// Returns the ids of a document of `list-jobs`, and where the next page begins.
fn page(reply: &str) -> (Vec<u64>, u64) {
    let ids = reply.lines().filter_map(|line| line.strip_prefix("- {id: ")?.split(',').next());
    let ids = ids.map(|id| id.parse().expect("an id is a number")).collect();
    (ids, yaml::number(reply, "next"))
}

#[test]
fn pages_over_60000_jobs_are_made_in_steps_and_have_each_job_once() {
    const JOBS: usize = 20_000;
    let mut engine = new_loop();
    let (asker, other) = (engine.connect(), engine.connect());
    // The jobs of other tubes lie between those of the tube, so that all jobs must be compared.
    for _ in 0..2 {
        fill_tube(&mut engine, "b", 0, JOBS);
        fill_tube(&mut engine, "a", 9000, JOBS / 2);
    }
    let of_tube: Vec<u64> = (0..2)
        .flat_map(|round| {
            let first = (round * 3 * JOBS / 2 + JOBS) as u64;
            first + 1..=first + JOBS as u64 / 2
        })
        .collect();
    let mut moved = Vec::new();
    let (mut seen, mut after, mut longest) = (Vec::new(), 0, 0);
    for number in 0.. {
        let before = engine.iterations;
        engine.send(asker, format!("list-jobs a any 1000 {after}\r\nlist-tube-used\r\n"));
        let reply = engine.wait_for(asker, "USING default\r\n", |engine| {
            // Jobs are put, deleted and kicked meanwhile, and their client is served in each iteration.
            let iterations = engine.iterations;
            let id = of_tube[(engine.iterations * 37) % of_tube.len()];
            moved.push(id);
            let delete = format!("kick-job {}\r\ndelete {id}\r\n", id + 1);
            engine.ask_until(other, &format!("put-in-tube a 0 0 9 0\r\n\r\n{delete}"), "\r\n");
            assert!(engine.iterations - iterations <= 3, "a command of another client has waited");
        });
        longest = longest.max(engine.iterations - before);
        let (ids, next) = page(&reply);
        assert!(ids.len() <= 1000, "{} jobs in one page", ids.len());
        seen.extend(ids);
        if next == 0 {
            break;
        }
        assert!(next > after && number < 100, "page {number} leads from {after} to {next}");
        after = next;
    }
    assert!(longest >= 60_000 / 8_192, "60,000 jobs were compared in {longest} iterations");
    assert!(seen.is_sorted_by(|a, b| a < b), "a job is listed twice");
    for id in of_tube.iter().filter(|id| !moved.contains(id)) {
        assert!(seen.binary_search(id).is_ok(), "job {id} is in no page");
    }
    engine.server.check();
}

#[test]
fn batches_of_40_clients_share_the_iterations() {
    /// An iteration of 1 ms ends after this number of jobs, and the batch that is begun is the last.
    const MOST_OF_BATCHES: u64 = 5_000;
    const CLIENTS: usize = 40;
    let mut engine = new_loop();
    let producer = fill_tube(&mut engine, "a", 0, CLIENTS * 1000);
    let clients: Vec<ClientId> = (0..CLIENTS).map(|_| engine.connect()).collect();
    for &client in &clients {
        engine.ask_until(client, "watch a\r\nignore default\r\n", "WATCHING 1\r\n");
    }
    clients.iter().for_each(|&client| engine.send(client, "reserve-batch 1000\r\n"));
    let (mut reserved, mut iterations) = (0, 0);
    while reserved < CLIENTS as u64 * 1000 {
        engine.iterate();
        let now = engine.server.summary().reserved;
        let more = now - reserved;
        assert!(more <= MOST_OF_BATCHES, "{more} jobs were reserved in one iteration");
        (reserved, iterations) = (now, iterations + 1);
        assert!(iterations < 1_000, "only {reserved} jobs are reserved");
    }
    // The same clients delete them.
    engine.settle();
    for &client in &clients {
        let reply = engine.take_text(client);
        let ids =
            reply.lines().filter_map(|line| line.strip_prefix("RESERVED ")?.split(' ').next());
        let ids: String = ids.map(|id| format!(" {id}")).collect();
        engine.send(client, format!("delete-batch{ids}\r\n"));
    }
    iterations = 0;
    while reserved > 0 {
        engine.iterate();
        let now = engine.server.summary().reserved;
        let fewer = reserved - now;
        assert!(fewer <= MOST_OF_BATCHES, "{fewer} jobs were deleted in one iteration");
        (reserved, iterations) = (now, iterations + 1);
        assert!(iterations < 1_000, "{reserved} jobs are not deleted");
    }
    engine.settle();
    for &client in &clients {
        assert_eq!(engine.take_text(client), "DELETED_BATCH 1000 0\r\n");
    }
    assert_eq!(engine.ask_until(producer, "peek-ready\r\n", "\n"), "NOT_FOUND\r\n");
    engine.server.check();
}

/// Batches of workers that wait are filled in different iterations, however many jobs come at once.
#[test]
fn the_end_of_a_pause_fills_the_batches_of_100_waiters_in_steps() {
    const WAITERS: usize = 100;
    const MOST_OF_BATCHES: u64 = 5_000 + WAITERS as u64;
    let mut engine = new_loop();
    let producer = engine.connect();
    engine.ask_until(producer, "use a\r\npause-tube a 5\r\n", "PAUSED\r\n");
    fill_tube(&mut engine, "a", 0, WAITERS * 1000);
    let waiters: Vec<ClientId> = (0..WAITERS).map(|_| engine.connect()).collect();
    for &waiter in &waiters {
        engine.send(waiter, "watch a\r\nignore default\r\nreserve-batch 1000 100\r\n");
    }
    engine.settle();
    engine.advance(Nanos::from_millis(5_001));
    let (mut reserved, mut iterations) = (0, 0);
    while reserved < WAITERS as u64 * 1000 {
        engine.iterate();
        let now = engine.server.summary().reserved;
        let more = now - reserved;
        assert!(more <= MOST_OF_BATCHES, "{more} jobs were reserved in one iteration");
        (reserved, iterations) = (now, iterations + 1);
        assert!(iterations < 1_000, "only {reserved} jobs are reserved");
    }
    engine.server.check();
}

#[test]
fn touch_all_renews_50000_jobs_in_steps() {
    const JOBS: u64 = 50_000;
    let mut engine = new_loop();
    fill_tube(&mut engine, "a", 0, 50_000);
    let (worker, other) = (engine.connect(), engine.connect());
    hold_jobs(&mut engine, worker, "a", JOBS);
    // All TTRs are over at the same moment if they are not renewed.
    engine.advance(Nanos::from_secs(8_000));
    let before = engine.iterations;
    engine.send(worker, b"touch-all\r\n");
    let reply = engine.wait_for(worker, "\n", |engine| {
        let iterations = engine.iterations;
        engine.ask_until(other, "list-tube-used\r\n", "USING default\r\n");
        assert!(engine.iterations - iterations <= 2, "a command of another client has waited");
    });
    assert_eq!(reply, format!("TOUCHED_ALL {JOBS}\r\n"));
    let iterations = engine.iterations - before;
    assert!(iterations >= 50_000 / 1_100, "50,000 jobs were touched in {iterations} iterations");
    engine.advance(Nanos::from_secs(8_000));
    engine.settle();
    assert_eq!(engine.server.summary().reserved, JOBS, "a TTR has run out");
    engine.server.check();
}

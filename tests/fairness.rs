//! Fairness: how much the engine does between two flushes, whatever clients send, whoever wakes whom,
//! and however much is due, closed or listed. Work is counted in replies, jobs and tubes, not timed.

mod made_up;

use beanstalkd::testing::ConnKey;
use beanstalkd::testing::Nanos;
use beanstalkd::testing::{Server, Settings};
use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;

const START: Nanos = Nanos::from_secs(1_000);
/// At most this many replies are made in one iteration of the loop: a reply takes about a
/// microsecond, and some 4 more when it is sent to a client of its own.
const MOST_REPLIES: usize = 700;
/// At most this many jobs are moved, or tubes removed, in one iteration.
const MOST_MOVES: u64 = 1_100;
/// Time goes on, if only a little.
const ITERATION: Nanos = Nanos::from_nanos(100_000);
/// What the loop reads at once.
const READ_LEN: usize = 16 * 1024;

/// The engine, driven as the event loop drives it.
struct Loop {
    server: Server,
    now: Nanos,
    clients: BTreeMap<ConnKey, Client>,
    ready: VecDeque<ConnKey>,
    iterations: usize,
}

#[derive(Default)]
struct Client {
    /// Sent, and not read by the server.
    sent: VecDeque<u8>,
    received: Vec<u8>,
    is_queued: bool,
}

impl Loop {
    fn new() -> Loop {
        let server = Server::new(Settings::DEFAULT, made_up::facts(START), START);
        Loop { server, now: START, clients: BTreeMap::new(), ready: VecDeque::new(), iterations: 0 }
    }

    fn connect(&mut self) -> ConnKey {
        let key = self.server.connect().expect("the test needs little memory");
        self.clients.insert(key, Client::default());
        key
    }

    fn send(&mut self, key: ConnKey, bytes: &[u8]) {
        self.client(key).sent.extend(bytes);
        self.queue(key);
    }

    fn client(&mut self, key: ConnKey) -> &mut Client {
        self.clients.get_mut(&key).expect("it is connected")
    }

    fn queue(&mut self, key: ConnKey) {
        let client = self.clients.get_mut(&key).expect("it is connected");
        if !std::mem::replace(&mut client.is_queued, true) {
            self.ready.push_back(key);
        }
    }

    /// One iteration. Returns how many connections were sent something.
    fn iterate(&mut self) -> usize {
        self.iterations += 1;
        self.now = self.now + ITERATION;
        self.server.begin_iteration(self.ready.len());
        self.server.tick(self.now);
        self.server.share_budget(self.ready.len());
        for _ in 0..self.ready.len() {
            if !self.server.has_budget() {
                break;
            }
            let Some(key) = self.ready.pop_front() else { break };
            self.serve(key);
        }
        self.server.commit(self.now).expect("there is no disk");
        self.flush()
    }

    fn serve(&mut self, key: ConnKey) {
        let client = self.clients.get_mut(&key).expect("it is connected");
        client.is_queued = false;
        let mut actions = self.server.mark_dirty(key);
        if actions.run {
            self.server.resume(key, self.now);
            actions = self.server.actions(key);
        }
        if actions.read && !client.sent.is_empty() {
            let count = client.sent.len().min(READ_LEN);
            let bytes: Vec<u8> = client.sent.drain(..count).collect();
            self.server.receive(key, &bytes, self.now);
        }
    }

    fn flush(&mut self) -> usize {
        let mut keys = Vec::new();
        self.server.take_dirty(&mut keys);
        let mut replies = 0;
        for key in keys {
            let Some(client) = self.clients.get_mut(&key) else { continue };
            let mut output_handle = self.server.output_handle(key);
            while !output_handle.is_empty() {
                let mut slices = [IoSlice::new(&[]); 16];
                let filled = output_handle.next_slices(&mut slices);
                let before = client.received.len();
                slices[..filled].iter().for_each(|slice| client.received.extend_from_slice(slice));
                let count = client.received.len() - before;
                output_handle.sent(count);
            }
            let actions = self.server.actions(key);
            if actions.run || (actions.read && !client.sent.is_empty()) {
                self.queue(key);
            }
            replies += 1;
        }
        replies
    }

    fn take(&mut self, key: ConnKey) -> String {
        let received = std::mem::take(&mut self.client(key).received);
        String::from_utf8(received).expect("the test sends text")
    }

    /// Iterates until the client has been sent something that ends in `end`.
    fn ask(&mut self, key: ConnKey, command: &str, end: &str) -> String {
        self.send(key, command.as_bytes());
        self.wait_for(key, end, |_| ())
    }

    fn wait_for(&mut self, key: ConnKey, end: &str, mut each: impl FnMut(&mut Loop)) -> String {
        for _ in 0..1_000_000 {
            if self.client(key).received.ends_with(end.as_bytes()) {
                return self.take(key);
            }
            self.iterate();
            each(self);
        }
        panic!("no reply that ends in {end:?}: {:?}", self.take(key));
    }

    fn stat(&mut self, key: ConnKey, name: &str) -> u64 {
        let text = self.ask(key, "stats\r\n", "\"\n\r\n");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.and_then(|figure| figure.parse().ok()).expect("it is in stats")
    }
}

/// Makes the connection watch `count` tubes that no other connection watches.
fn watch_many(engine: &mut Loop, key: ConnKey, count: usize) {
    let commands: String = (0..count).map(|number| format!("watch tube-{number}\r\n")).collect();
    engine.send(key, commands.as_bytes());
    engine.wait_for(key, &format!("WATCHING {}\r\n", count + 1), |_| ());
}

#[test]
fn workers_that_wake_each_other_share_the_iterations_with_others() {
    const WORKERS: usize = 1_500;
    let mut engine = Loop::new();
    let workers: Vec<ConnKey> = (0..WORKERS).map(|_| engine.connect()).collect();
    let (starter, other) = (engine.connect(), engine.connect());
    let behind = b"put 0 0 9 1\r\nx\r\nreserve\r\n".repeat(2_400);
    for &worker in &workers {
        engine.send(worker, b"reserve\r\n");
        engine.send(worker, &behind);
    }
    while !engine.ready.is_empty() {
        engine.iterate();
    }
    engine.send(starter, b"put 0 0 9 1\r\nx\r\n".repeat(100).as_slice());
    let mut asked = 0;
    for _ in 0..300 {
        if engine.take(other).ends_with('\n') || asked == 0 {
            engine.send(other, b"list-tube-used\r\n");
            asked += 1;
        }
        let before: usize = engine.clients.values().map(|client| client.received.len()).sum();
        let conns = engine.iterate();
        let after: usize = engine.clients.values().map(|client| client.received.len()).sum();
        // The shortest reply has 12 bytes or so.
        let replies = (after - before) / 12;
        assert!(replies <= 4 * MOST_REPLIES, "{replies} replies in one iteration");
        assert!(conns <= MOST_REPLIES, "{conns} connections are sent something");
    }
    assert!(asked > 10, "another client had {asked} commands run in 300 iterations");
    let moved: usize = workers.iter().map(|key| engine.clients[key].received.len()).sum();
    assert!(moved > 100_000, "the workers were told {moved} bytes");
}

#[test]
fn a_connection_with_very_many_watches_closes_in_steps() {
    const WATCHES: usize = 30_000;
    let mut engine = Loop::new();
    let (worker, other) = (engine.connect(), engine.connect());
    watch_many(&mut engine, worker, WATCHES);
    assert_eq!(engine.stat(other, "current-tubes"), WATCHES as u64 + 1);
    engine.clients.remove(&worker);
    engine.server.disconnect(worker, engine.now);
    let mut tubes = WATCHES as u64 + 1;
    for _ in 0..10_000 {
        let left = engine.stat(other, "current-tubes");
        assert!(tubes - left <= MOST_MOVES, "{} tubes went in one iteration", tubes - left);
        tubes = left;
        if tubes == 1 {
            break;
        }
    }
    assert_eq!((tubes, engine.stat(other, "current-connections")), (1, 1));
    engine.server.check();
    assert_eq!(engine.connect(), worker, "its key is free");
}

#[test]
fn a_reserve_over_very_many_tubes_finds_the_best_job_in_steps() {
    const WATCHES: usize = 40_000;
    let mut engine = Loop::new();
    let (worker, other) = (engine.connect(), engine.connect());
    watch_many(&mut engine, worker, WATCHES);
    for (id, number) in (1..).zip([17, WATCHES - 1, 5_000]) {
        let put = format!("use tube-{number}\r\nput {number} 0 9 1\r\nx\r\n");
        engine.ask(other, &put, &format!("INSERTED {id}\r\n"));
    }
    let before = engine.iterations;
    engine.send(worker, b"reserve\r\n");
    let first = engine.wait_for(worker, "x\r\n", |engine| {
        engine.ask(other, "list-tube-used\r\n", "tube-5000\r\n");
    });
    assert_eq!(first, "RESERVED 1 1\r\nx\r\n");
    let iterations = engine.iterations - before;
    assert!(iterations >= WATCHES / 2_048, "all were looked at in {iterations} iterations");
    assert_eq!(engine.ask(worker, "reserve\r\n", "x\r\n"), "RESERVED 3 1\r\nx\r\n");
    assert_eq!(engine.ask(worker, "reserve\r\n", "x\r\n"), "RESERVED 2 1\r\nx\r\n");
    // A job that comes while it joins the lines is not missed, whichever tube it is in.
    for number in [0, 20_000, WATCHES - 1] {
        engine.send(worker, b"reserve\r\n");
        engine.iterate();
        let put = format!("use tube-{number}\r\nput 0 0 9 1\r\nx\r\n");
        engine.send(other, put.as_bytes());
        let reply = engine.wait_for(worker, "x\r\n", |_| ());
        assert!(reply.starts_with("RESERVED "), "{reply}");
        engine.server.check();
        engine.take(other);
    }
    assert_eq!(engine.ask(worker, "reserve-with-timeout 0\r\n", "\n"), "TIMED_OUT\r\n");
}

#[test]
fn a_pause_that_ends_serves_very_many_waiters_in_steps_and_in_order() {
    const WAITERS: usize = 5_000;
    let mut engine = Loop::new();
    let other = engine.connect();
    engine.ask(other, "pause-tube default 5\r\n", "PAUSED\r\n");
    engine.send(other, &b"put 0 0 9 1\r\nx\r\n".repeat(WAITERS));
    engine.wait_for(other, &format!("INSERTED {WAITERS}\r\n"), |_| ());
    let waiters: Vec<ConnKey> = (0..WAITERS).map(|_| engine.connect()).collect();
    for &waiter in &waiters {
        engine.ask(waiter, "reserve\r\nlist-tube-used\r\n", "");
        engine.iterate();
    }
    engine.now = engine.now + Nanos::from_millis(5_001);
    let mut iterations = 0;
    while waiters.iter().any(|waiter| engine.clients[waiter].received.is_empty()) {
        let sent_to = engine.iterate();
        assert!(sent_to <= MOST_REPLIES, "{sent_to} connections were served in one iteration");
        iterations += 1;
        assert!(iterations < WAITERS, "not all are served");
        if iterations % 100 == 0 {
            engine.server.check();
        }
    }
    assert!(iterations > 5, "all were served in {iterations} iterations");
    for (id, &waiter) in (1..).zip(&waiters) {
        engine.wait_for(waiter, &format!("RESERVED {id} 1\r\nx\r\nUSING default\r\n"), |_| ());
    }
    assert!(engine.ask(other, "stats-tube default\r\n", "\n\r\n").contains("\npause: 0\n"));
}

#[test]
fn very_many_jobs_that_come_due_leave_others_short_iterations() {
    const JOBS: usize = 50_000;
    let mut engine = Loop::new();
    let (producer, other) = (engine.connect(), engine.connect());
    engine.ask(producer, "use backlog\r\n", "USING backlog\r\n");
    engine.send(producer, &b"put 0 1 9 0\r\n\r\n".repeat(JOBS));
    engine.wait_for(producer, &format!("INSERTED {JOBS}\r\n"), |_| ());
    engine.iterate();
    engine.now = engine.now + Nanos::from_millis(1_001);
    let mut ready = 0;
    let mut iterations = 0;
    while ready < JOBS as u64 {
        engine.ask(other, "list-tube-used\r\n", "USING default\r\n");
        let now_ready = engine.server.summary().ready;
        // One client sends one command at a time: then little is done in each iteration.
        let moved = now_ready - ready;
        assert!(moved <= MOST_MOVES / 4 || ready == 0, "{moved} jobs in an iteration");
        ready = now_ready;
        iterations += 1;
        assert!(iterations < JOBS, "{ready} jobs of {JOBS} are ready");
    }
}

#[test]
fn lists_of_very_many_tubes_are_made_in_steps_and_shared() {
    const TUBES: usize = 30_000;
    let mut engine = Loop::new();
    let (holder, other) = (engine.connect(), engine.connect());
    watch_many(&mut engine, holder, TUBES);
    let askers: Vec<ConnKey> = (0..20).map(|_| engine.connect()).collect();
    for &asker in &askers {
        engine.send(asker, b"list-tubes\r\nlist-tube-used\r\n");
    }
    let mut iterations = 0;
    let before = engine.iterations;
    engine.wait_for(askers[0], "USING default\r\n", |engine| {
        iterations += 1;
        // Tubes come and go meanwhile.
        engine.ask(other, &format!("use new-{iterations}\r\n"), "\n");
        let gone = TUBES - iterations;
        engine.ask(holder, &format!("ignore tube-{gone}\r\nignore tube-{iterations}\r\n"), "\n");
    });
    let in_all = engine.iterations - before;
    assert!(in_all >= TUBES / 2_048, "it was made in {in_all} iterations");
    let lists: Vec<String> = askers[1..]
        .iter()
        .map(|&asker| engine.wait_for(asker, "USING default\r\n", |_| ()))
        .collect();
    for list in &lists {
        assert!(*list == lists[0], "all are sent the same list");
        let (head, names) = list.split_once("\r\n---\n").expect("it is a document");
        let (names, _) = names.split_once("\r\n").expect("the reply ends");
        let len: usize =
            head.strip_prefix("OK ").and_then(|len| len.parse().ok()).expect("a length");
        assert_eq!(len, names.len() + "---\n".len());
        let mut names: Vec<&str> = names.lines().collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "no tube is listed twice");
        let stays = |number: &usize| (2 * iterations..TUBES - 2 * iterations).contains(number);
        for number in (0..TUBES).filter(stays) {
            let line = format!("- tube-{number}");
            assert!(names.binary_search(&&*line).is_ok(), "{line} is missing");
        }
    }
    let watched =
        engine.ask(holder, "list-tubes-watched\r\nlist-tube-used\r\n", "USING default\r\n");
    assert!(
        watched.contains("- default\n") && watched.contains(&format!("- tube-{}\n", TUBES / 2))
    );
    engine.server.check();
}

#[test]
fn a_client_that_leaves_while_its_list_is_made_is_not_missed() {
    let mut engine = Loop::new();
    let (holder, first, second) = (engine.connect(), engine.connect(), engine.connect());
    watch_many(&mut engine, holder, 5_000);
    engine.send(first, b"list-tubes\r\n");
    engine.send(second, b"list-tubes\r\n");
    engine.iterate();
    engine.clients.remove(&first);
    engine.server.disconnect(first, engine.now);
    engine.server.check();
    assert!(engine.wait_for(second, "\n\r\n", |_| ()).starts_with("OK "));
    engine.server.check();
}

/// Many jobs come due at the same moment while no client asks for anything.
fn engine_with_due_jobs(jobs: usize) -> (Loop, ConnKey) {
    let mut engine = Loop::new();
    let producer = engine.connect();
    engine.ask(producer, "use backlog\r\n", "USING backlog\r\n");
    engine.send(producer, &b"put 0 1 9 0\r\n\r\n".repeat(jobs));
    engine.wait_for(producer, &format!("INSERTED {jobs}\r\n"), |_| ());
    while !engine.ready.is_empty() {
        engine.iterate();
    }
    (engine, producer)
}

#[test]
fn very_many_jobs_that_come_due_are_ready_soon_on_an_idle_server() {
    const JOBS: usize = 100_000;
    let (mut engine, _) = engine_with_due_jobs(JOBS);
    engine.now = engine.now + Nanos::from_secs(1);
    let before = engine.iterations;
    while engine.server.summary().ready < JOBS as u64 {
        let next = engine.server.next_due().expect("there is more to be done");
        assert!(next <= engine.now + ITERATION, "the loop would sleep before all is done");
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
    engine.ask(other, "use small\r\nput 0 1 9 1\r\nx\r\n", &format!("INSERTED {}\r\n", JOBS + 1));
    engine.now = engine.now + Nanos::from_secs(1);
    let before = engine.iterations;
    while !engine.ask(other, "peek-ready\r\n", "\r\n").starts_with("FOUND ") {
        assert!(engine.iterations - before < 20, "the job of another tube is not ready");
    }
    let ready = engine.server.summary().ready;
    assert!(ready < JOBS as u64, "all {ready} are ready: the backlog was too small");
    while engine.server.summary().ready <= JOBS as u64 {
        engine.iterate();
    }
    // Now one client holds them all, and their time runs out with the other's wait.
    engine.send(holder, b"watch backlog\r\nignore default\r\n");
    engine.send(holder, &b"reserve\r\n".repeat(JOBS));
    while engine.server.summary().reserved < JOBS as u64 {
        engine.iterate();
    }
    engine.take(holder);
    engine.now = engine.now + Nanos::from_secs(10);
    let before = engine.iterations;
    assert_eq!(engine.wait_for(waiter, "\n", |_| ()), "TIMED_OUT\r\n");
    let iterations = engine.iterations - before;
    assert!(iterations < 20, "the wait of another client ended after {iterations} iterations");
    assert!(engine.server.summary().reserved > 0, "the backlog was too small");
    engine.server.check();
}

#[test]
fn a_list_that_nobody_wants_any_more_is_given_up() {
    let mut engine = Loop::new();
    let (holder, asker) = (engine.connect(), engine.connect());
    watch_many(&mut engine, holder, 5_000);
    engine.send(asker, b"list-tubes\r\n");
    engine.iterate();
    engine.iterate();
    engine.clients.remove(&asker);
    engine.server.disconnect(asker, engine.now);
    engine.iterate();
    assert!(engine.server.next_due().is_none_or(|due| due > engine.now), "nothing is to be done");
    let list = engine.ask(holder, "list-tubes\r\nlist-tube-used\r\n", "USING default\r\n");
    assert_eq!(list.matches("\n- ").count(), 5_001);
}

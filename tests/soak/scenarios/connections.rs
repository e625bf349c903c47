//! Very many clients: all at once, and for moments only.

use super::{Outcome, Run, open_files_limit};
use crate::harness::client::Client;
use crate::harness::process::Daemon;
use crate::harness::reply::Reply;
use crate::harness::request::put;
use crate::harness::wait_until;
use fastrand::Rng;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

// ---- All at once ----

/// Opens connections, sends a command on each, lets them idle and wait, and closes them.
pub fn at_once(run: &Run) -> Outcome {
    /// Standard streams, what the server has open beside clients.
    const OTHERS: usize = 200;
    let wanted = run.size(500, 10_000);
    let count = wanted.min(open_files_limit().saturating_sub(OTHERS));
    let (daemon, address) = Daemon::on_own_port(&[]);
    let mut crowd = Crowd::begin(run, &daemon, address, count);
    let mut line = format!("{count} connections");
    if count < wanted {
        write!(line, " (not {wanted}: only so many files may be open)").expect("it is text");
    }
    crowd.play();
    let Crowd { idle_bytes, waiting_bytes, before_kib, .. } = crowd;
    let (taken, first) = (waiting_bytes * count as u64 / 1024, crowd.left_kib());
    let mut rounds = 1;
    while run.has_time() {
        crowd.play();
        rounds += 1;
    }
    let last = crowd.left_kib();
    write!(
        line,
        " {rounds} times: {idle_bytes} bytes for an idle one, {waiting_bytes} for one that waits; \
         {before_kib} KiB before, {taken} more with all of them, {first} more when they had gone \
         the first time, {last} the last"
    )
    .expect("it is text");
    if run.is_whole() {
        // The allocator keeps what is small for the next crowd, but nothing for each crowd.
        assert!(last <= taken + 1024, "each round leaves something: {line}");
    }
    Ok(line)
}

struct Crowd<'a> {
    run: &'a Run,
    daemon: &'a Daemon,
    address: SocketAddr,
    count: usize,
    observer: Client,
    files_before: usize,
    before_kib: u64,
    idle_bytes: u64,
    waiting_bytes: u64,
}

impl<'a> Crowd<'a> {
    fn begin(run: &'a Run, daemon: &'a Daemon, address: SocketAddr, count: usize) -> Crowd<'a> {
        let mut observer = Client::connect(address);
        observer.expect("use default\r\n", "USING default");
        let (files_before, before_kib) = (daemon.open_files(), daemon.rss_kib());
        let (idle_bytes, waiting_bytes) = (0, 0);
        Crowd {
            run,
            daemon,
            address,
            count,
            observer,
            files_before,
            before_kib,
            idle_bytes,
            waiting_bytes,
        }
    }

    fn play(&mut self) {
        let mut clients: Vec<Client> =
            (0..self.count).map(|_| Client::connect(self.address)).collect();
        self.ask_all(&mut clients, "list-tube-used\r\n", "USING default");
        assert_eq!(self.observer.stat("current-connections"), self.count as u64 + 1);
        assert_eq!(self.daemon.open_files(), self.files_before + self.count);
        self.idle_bytes = self.bytes_for_each();
        self.check_rest();
        self.ask_all(&mut clients, "watch crowd\r\n", "WATCHING 2");
        for client in &mut clients {
            client.send("reserve\r\n");
        }
        let count = self.count as u64;
        wait_until("all wait", || self.observer.stat("current-waiting") == count);
        self.waiting_bytes = self.bytes_for_each();
        self.check_rest();
        for (index, client) in clients.into_iter().enumerate() {
            if index.is_multiple_of(2) {
                client.reset();
            }
        }
        wait_until("all are gone", || self.observer.stat("current-connections") == 1);
        assert_eq!(self.daemon.open_files(), self.files_before, "descriptors are left");
        assert_eq!(self.observer.stat("current-waiting"), 0);
        assert_eq!(self.observer.stat("current-tubes"), 1);
    }

    fn ask_all(&self, clients: &mut [Client], request: &str, line: &str) {
        for client in &mut *clients {
            client.send(request);
        }
        for client in clients {
            assert_eq!(client.reply().line, line);
        }
    }

    fn left_kib(&self) -> u64 {
        self.daemon.rss_kib().saturating_sub(self.before_kib)
    }

    fn bytes_for_each(&self) -> u64 {
        self.left_kib() * 1024 / self.count as u64
    }

    /// Idle clients cost no processor time.
    fn check_rest(&self) {
        if !self.run.is_whole() {
            return;
        }
        let before = self.daemon.processor_time();
        thread::sleep(Duration::from_millis(500));
        let used = self.daemon.processor_time() - before;
        assert!(used <= Duration::from_millis(20), "{used:?} of processor time for idle clients");
    }
}

// ---- For moments ----

/// Clients connect, send a command or half of one, and disconnect, while one client works steadily.
pub fn storms(run: &Run) -> Outcome {
    let (daemon, address) = Daemon::on_own_port(&[]);
    let mut observer = Client::connect(address);
    observer.expect("watch storm\r\n", "WATCHING 2");
    let files_before = daemon.open_files();
    let storm = Storm::new(address);
    let steady = thread::scope(|scope| {
        let threads = 0..3_u64;
        let storms: Vec<_> = threads
            .map(|index| {
                scope.spawn({
                    let storm = &storm;
                    move || storm.rage(run, run.seed + index)
                })
            })
            .collect();
        let steady = scope.spawn(|| storm.work_steadily());
        // In both cases the other thread must end.
        let outcomes: Vec<_> = storms.into_iter().map(thread::ScopedJoinHandle::join).collect();
        storm.is_over.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(Result::is_ok), "a client of the storm was served badly");
        steady.join().expect("the steady client was served well")
    });
    wait_until("all are gone", || observer.stat("current-connections") == 1);
    assert_eq!(daemon.open_files(), files_before, "descriptors are left");
    for key in ["current-waiting", "current-workers", "current-producers", "current-jobs-reserved"]
    {
        assert_eq!(observer.stat(key), 0, "{key}");
    }
    storm.check_jobs(&mut observer);
    let Steady { cycles, worst } = steady;
    Ok(format!(
        "{} clients; {cycles} jobs of a steady client meanwhile, whose longest wait was {:.1} ms; \
         {} KiB at the end",
        storm.visits.load(Ordering::Relaxed),
        worst.as_secs_f64() * 1e3,
        daemon.rss_kib()
    ))
}

struct Storm {
    address: SocketAddr,
    is_over: AtomicBool,
    visits: AtomicU64,
    /// Jobs whose put was answered, and those that were sent whole.
    acknowledged: AtomicU64,
    sent: AtomicU64,
    /// Jobs that were taken out again.
    taken: AtomicU64,
}

/// What came of the client that works all the time.
struct Steady {
    cycles: u64,
    worst: Duration,
}

impl Storm {
    fn new(address: SocketAddr) -> Storm {
        let (visits, acknowledged, sent, taken) = Default::default();
        Storm { address, is_over: AtomicBool::new(false), visits, acknowledged, sent, taken }
    }

    fn rage(&self, run: &Run, seed: u64) {
        /// The number of clients that connect before their jobs are reserved.
        const SOME: usize = 200;
        let mut random = Rng::with_seed(seed);
        let mut worker = Client::connect(self.address);
        worker.expect("watch storm\r\n", "WATCHING 2");
        for visits in 0.. {
            if visits >= run.size(100, usize::MAX) || (run.is_whole() && !run.has_time()) {
                return;
            }
            self.visit(&mut random);
            if visits % SOME == 0 {
                self.take_jobs(&mut worker);
            }
            self.visits.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One client, from its coming to its going.
    fn visit(&self, random: &mut Rng) {
        let mut client = Client::connect(self.address);
        match random.u32(..9) {
            0 => {}
            1 => client.send("list-tube-us"),
            2 => client.send("put 0 0 60 10\r\nhalf"),
            3 => {
                client.expect("use storm\r\n", "USING storm");
                self.sent.fetch_add(1, Ordering::Relaxed);
                client.put(b"whole");
                self.acknowledged.fetch_add(1, Ordering::Relaxed);
            }
            4 => {
                self.sent.fetch_add(1, Ordering::Relaxed);
                client.send("use storm\r\nput 0 0 60 6\r\nunread\r\n");
            }
            5 => self.half_close(&mut client),
            6 => client.send("reserve\r\n"),
            7 => {
                client.send("reserve\r\n");
                client.half_close();
                assert_eq!(client.reply().line, "TIMED_OUT");
                assert!(client.is_at_end());
            }
            _ => {
                client.send("list-tube-used\r\nquit\r\n");
                assert_eq!(client.reply().line, "USING default");
                assert!(client.is_at_end());
            }
        }
        if random.bool() {
            client.reset();
        }
    }

    /// Everything that was sent before is answered.
    fn half_close(&self, client: &mut Client) {
        const PUTS: u64 = 20;
        client.send("use storm\r\n");
        self.sent.fetch_add(PUTS, Ordering::Relaxed);
        for _ in 0..PUTS {
            client.send(put(0, 0, 60, b"before the end"));
        }
        client.half_close();
        assert_eq!(client.reply().line, "USING storm");
        for _ in 0..PUTS {
            assert!(client.reply().number("INSERTED").is_some());
        }
        assert!(client.is_at_end());
        self.acknowledged.fetch_add(PUTS, Ordering::Relaxed);
    }

    fn work_steadily(&self) -> Steady {
        let mut client = Client::connect(self.address);
        client.expect("use steady\r\n", "USING steady");
        client.expect("watch steady\r\n", "WATCHING 2");
        client.expect("ignore default\r\n", "WATCHING 1");
        let mut steady = Steady { cycles: 0, worst: Duration::ZERO };
        while !self.is_over.load(Ordering::Relaxed) {
            let mut ask = |request: &[u8]| {
                let start = Instant::now();
                let reply = client.ask(request);
                steady.worst = steady.worst.max(start.elapsed());
                reply
            };
            let id = ask(&put(0, 0, 60, b"steady")).number("INSERTED").expect("there is room");
            assert_eq!(ask(b"reserve\r\n").number("RESERVED"), Some(id));
            assert_eq!(ask(format!("delete {id}\r\n").as_bytes()).line, "DELETED");
            steady.cycles += 1;
        }
        steady
    }

    /// Takes out what is there, many jobs at a time.
    fn take_jobs(&self, worker: &mut Client) {
        const BATCH: usize = 100;
        loop {
            worker.send("reserve-with-timeout 0\r\n".repeat(BATCH));
            let replies: Vec<Reply> = (0..BATCH).map(|_| worker.reply()).collect();
            let ids: Vec<u64> =
                replies.iter().filter_map(|reply| reply.number("RESERVED")).collect();
            let deletes: String = ids.iter().map(|id| format!("delete {id}\r\n")).collect();
            worker.send(deletes);
            for _ in &ids {
                assert_eq!(worker.reply().line, "DELETED");
            }
            self.taken.fetch_add(ids.len() as u64, Ordering::Relaxed);
            if ids.len() < BATCH {
                return;
            }
        }
    }

    /// Acknowledged jobs exist, and only jobs that were sent.
    fn check_jobs(&self, observer: &mut Client) {
        self.take_jobs(observer);
        let count = |jobs: &AtomicU64| jobs.load(Ordering::Relaxed);
        let (sent, acknowledged) = (count(&self.sent), count(&self.acknowledged));
        let taken = count(&self.taken);
        assert!(
            (acknowledged..=sent).contains(&taken),
            "{taken} jobs, of {sent} that were sent and {acknowledged} acknowledged"
        );
    }
}

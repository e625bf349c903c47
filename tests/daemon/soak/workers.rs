//! Clients that put and reserve at random, and come and go: every job is accounted for in the
//! ledger. Scenarios differ in their [`Plan`]: clients crash at any point, the server is stopped
//! or killed, or all goes well for a long time, while memory and disk must stay as they are.

use super::ledger::Ledger;
use super::session::Session;
use super::{Run, with_client_beside};
use crate::harness::client::Client;
use crate::harness::process::{self, BEANSTALKD, Daemon, path_text};
use crate::harness::{PATIENCE, wait_until};
use fastrand::Rng;
use std::io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, UnexpectedEof};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, RwLock};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What clients do, and what befalls them. Pairs are for the short and the whole form.
pub struct Plan {
    /// Clients by the percentage of puts in their steps.
    clients: &'static [(u32, [usize; 2])],
    /// The average number of steps of a connection.
    pub steps: u32,
    /// The last command of a connection is one whose reply is not read, or it is half-closed.
    pub crashes: bool,
    pub tubes: u32,
    pub largest_body: usize,
    most_jobs: [usize; 2],
    trouble: Trouble,
    /// The size of the files of the binlog, if there is one.
    file_size: Option<u64>,
}

#[derive(PartialEq)]
enum Trouble {
    None,
    /// The server is stopped for moments.
    Stops,
    /// The server is killed and starts from its binlog.
    Kills,
}

pub const CRASH: Plan = Plan {
    clients: &[(0, [10, 50]), (100, [2, 5])],
    steps: 30,
    crashes: true,
    tubes: 3,
    largest_body: 2_000,
    most_jobs: [3_000, 3_000],
    trouble: Trouble::Stops,
    file_size: None,
};
pub const KILLED: Plan = Plan { trouble: Trouble::Kills, file_size: Some(1 << 16), ..CRASH };
/// Connections of a step or two, next to a client that works steadily.
pub const STORMS: Plan =
    Plan { clients: &[(40, [3, 6])], steps: 2, trouble: Trouble::None, ..CRASH };
pub const CHURN: Plan = Plan {
    clients: &[(40, [20, 20])],
    steps: 100,
    crashes: false,
    tubes: 500,
    largest_body: 65_535,
    most_jobs: [200, 2_000],
    trouble: Trouble::None,
    file_size: None,
};
pub const CHURN_FILES: Plan = Plan { file_size: Some(1 << 20), ..CHURN };

pub(super) fn play(run: &Run, plan: &Plan) -> String {
    let mut server = Server::new(plan);
    let field = Field {
        plan,
        address: server.listener.local_addr().expect("a bound socket has an address"),
        most_jobs: run.size(plan.most_jobs),
        // A long run asks for a part of what the server could do.
        pace: Duration::from_millis(if run.is_whole && !plan.crashes { 10 } else { 0 }),
        ledger: Mutex::default(),
        gate: RwLock::default(),
        is_over: AtomicBool::new(false),
        connections: AtomicU64::new(0),
        open: AtomicU64::new(0),
    };
    // The server has opened its own files once it serves a client.
    Client::connect(field.address).expect_service();
    let files_before = server.daemon.open_files();
    let mut load = || {
        thread::scope(|scope| {
            let mut random = run.random();
            let mut clients = Vec::new();
            for &(put_share, count) in plan.clients {
                for _ in 0..run.size(count) {
                    let (field, seed) = (&field, random.u64(..));
                    clients.push(scope.spawn(move || field.live(put_share, seed)));
                }
            }
            // A client that finds an error ends the run, and so does the watch.
            let _end = EndOnDrop(&field);
            let is_any_finished = || clients.iter().any(ScopedJoinHandle::is_finished);
            field.watch_over(run, &mut server, random, is_any_finished)
        })
    };
    let is_storm = plan.crashes && plan.trouble == Trouble::None;
    let (figures, beside) =
        if is_storm { with_client_beside(field.address, load) } else { (load(), String::new()) };
    field.drain();
    if plan.trouble != Trouble::Kills {
        field.check_nothing_is_left(&server, files_before);
    }
    let rss_kib = server.daemon.rss_kib();
    server.check_binlog_is_empty();
    let connections = field.connections.load(Ordering::Relaxed);
    let ledger = field.ledger();
    let (deleted, perhaps) = ledger.check_none_is_lost();
    let Ledger { inserted, reserved, .. } = *ledger;
    format!(
        "{inserted} jobs put, {reserved} times reserved, {deleted} deleted, {perhaps} perhaps; \
         {connections} connections; {rss_kib} KiB at the end; {figures}{beside}"
    )
}

struct Server {
    /// Kept open, so that connections between two servers wait for the next.
    listener: TcpListener,
    /// The directory of the binlog, and the size of a file.
    binlog: Option<(TempDir, u64)>,
    daemon: Daemon,
}

impl Server {
    fn new(plan: &Plan) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        // Below the directory of cargo's, which is on a real disk.
        let new_directory = || tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("is new");
        let binlog = plan.file_size.map(|size| (new_directory(), size));
        let daemon = start(&listener, binlog.as_ref(), "-f0");
        Server { listener, binlog, daemon }
    }

    /// Deleted jobs stay deleted, and their files are removed.
    fn check_binlog_is_empty(&mut self) {
        let Some((directory, file_size)) = &self.binlog else { return };
        wait_until("one file is left", || disk_bytes(directory.path()) <= file_size + 4096);
        self.daemon.kill();
        let check = process::run(&["-b", path_text(directory.path()), "--check"]);
        let report = process::text(&check.stdout);
        assert!(check.status.success(), "the binlog is not sound: {report}");
        assert!(report.contains(" 0 jobs: sound"), "there are jobs again: {report}");
        assert!(!report.contains("damaged"), "{report}");
    }
}

fn start(listener: &TcpListener, binlog: Option<&(TempDir, u64)>, syncing: &str) -> Daemon {
    let listener = listener.try_clone().expect("a descriptor is free");
    let size = binlog.map_or_else(String::new, |(_, size)| size.to_string());
    let flags =
        binlog.map(|(directory, _)| ["-b", path_text(directory.path()), "-s", &size, syncing]);
    Daemon::with_inherited(
        Path::new(BEANSTALKD),
        flags.as_ref().map_or(&[], |flags| &flags[..]),
        listener,
    )
}

/// Returns the bytes that the files of a directory take on the disk.
fn disk_bytes(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory).expect("the directory exists");
    // A file may be removed meanwhile. Blocks are of 512 bytes on every file system.
    files.filter_map(|file| Some(file.ok()?.metadata().ok()?.blocks() * 512)).sum()
}

/// What all clients share.
pub struct Field<'p> {
    pub plan: &'p Plan,
    pub address: SocketAddr,
    pub most_jobs: usize,
    /// The pause between two steps.
    pace: Duration,
    ledger: Mutex<Ledger>,
    /// Read while a client works; written to look at a server that has nothing to do.
    gate: RwLock<()>,
    is_over: AtomicBool,
    pub connections: AtomicU64,
    /// The connections to the present server.
    pub open: AtomicU64,
}

struct EndOnDrop<'f, 'p>(&'f Field<'p>);

impl Drop for EndOnDrop<'_, '_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

impl Field<'_> {
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("no client has found an error")
    }

    /// Connects, works until it crashes, and connects again.
    fn live(&self, put_share: u32, seed: u64) {
        let mut random = Rng::with_seed(seed);
        while !self.is_over.load(Ordering::Relaxed) {
            if let Err(error) = self.connect_and_work(put_share, random.fork()) {
                // Only a server that is killed may leave a client alone.
                let is_cut_off = matches!(
                    error.kind(),
                    UnexpectedEof | ConnectionReset | BrokenPipe | NotConnected
                );
                let may_be = is_cut_off && self.plan.trouble == Trouble::Kills;
                assert!(may_be, "a client is left alone: {error} (patience is {PATIENCE:?})");
            }
        }
    }

    fn connect_and_work(&self, put_share: u32, random: Rng) -> std::io::Result<()> {
        let quiet = || self.gate.read().expect("no client has found an error");
        let guard = quiet();
        let mut session = Session::open(self, random)?;
        drop(guard);
        while session.goes_on() && !self.is_over.load(Ordering::Relaxed) {
            let guard = quiet();
            session.step(put_share)?;
            drop(guard);
            thread::sleep(self.pace);
        }
        let _guard = quiet();
        session.end()
    }

    /// Watches the clients until their time is over, and makes trouble. Returns memory and disk use, if
    /// they must not grow.
    fn watch_over(
        &self,
        run: &Run,
        server: &mut Server,
        mut random: Rng,
        is_any_finished: impl Fn() -> bool,
    ) -> String {
        /// The short form ends after this number of puts.
        const ENOUGH: u64 = 1_500;
        const TROUBLES: u64 = 8;
        let mut observer = Client::connect(self.address);
        let (mut next_trouble, mut troubles) = (Instant::now(), 0);
        let mut last = (0, Instant::now());
        let mut samples = Samples::new(run.lasts);
        let mut most_disk = 0;
        while !is_any_finished() {
            thread::sleep(Duration::from_millis(2));
            let inserted = self.ledger().inserted;
            if if run.is_whole { !run.has_time() } else { inserted >= ENOUGH } {
                break;
            }
            if inserted > last.0 {
                last = (inserted, Instant::now());
            }
            assert!(last.1.elapsed() < PATIENCE, "no job is put any more: are clients not served?");
            if !self.plan.crashes {
                let _quiet = self.gate.write().expect("no client has found an error");
                self.check_counts(&mut observer);
                most_disk = self.check_disk(server).max(most_disk);
                samples.take(&server.daemon, self.ledger().live_bytes);
                continue;
            }
            let is_due = match run.is_whole {
                _ if self.plan.trouble == Trouble::None => false,
                true => next_trouble <= Instant::now(),
                false => inserted * (TROUBLES + 1) >= ENOUGH * (troubles + 1),
            };
            if is_due {
                self.make_trouble(server, &mut random);
                troubles += 1;
                next_trouble = Instant::now() + Duration::from_millis(random.u64(50..1_500));
            }
        }
        match (self.plan.crashes, run.is_whole) {
            (true, _) => format!("{troubles} troubles; "),
            (false, false) => String::new(),
            (false, true) => format!("{}; {} KiB of files; ", samples.check(), most_disk >> 10),
        }
    }

    fn make_trouble(&self, server: &mut Server, random: &mut Rng) {
        match self.plan.trouble {
            Trouble::None => {}
            Trouble::Stops => {
                let span = Duration::from_millis(random.u64(1..50));
                server.daemon.while_stopped(|| thread::sleep(span));
            }
            Trouble::Kills => {
                // Under load, or when all replies have been read.
                let quiet = random.bool().then(|| self.gate.write());
                server.daemon.kill();
                drop(quiet);
                let is_noted = || self.open.load(Ordering::Relaxed) == 0;
                wait_until("all clients have seen the end of the server", is_noted);
                let syncing = ["-f0", "-f50", "-f1000", "-F"][random.usize(..4)];
                server.daemon = start(&server.listener, server.binlog.as_ref(), syncing);
            }
        }
    }

    /// All that was asked has been answered: counts are those of the ledger.
    fn check_counts(&self, observer: &mut Client) {
        let open = self.open.load(Ordering::Relaxed) + 1;
        wait_until("the server has closed all connections that clients have closed", || {
            observer.stat("current-connections") == open
        });
        let ledger = self.ledger();
        assert_eq!(observer.jobs(), ledger.len() as u64, "jobs are missing, or too many");
        assert_eq!(observer.stat("current-jobs-reserved"), ledger.held() as u64);
    }

    /// Returns the bytes of the binlog, of which there are not too many.
    fn check_disk(&self, server: &Server) -> u64 {
        let Some((directory, file_size)) = &server.binlog else { return 0 };
        let (used, limit) =
            (disk_bytes(directory.path()), 3 * self.ledger().live_bytes + 2 * file_size);
        assert!(used <= limit, "{used} bytes of files where {limit} are allowed");
        used
    }

    /// Reserves and deletes what is left.
    fn drain(&self) {
        let mut session = Session::open(self, Rng::with_seed(0)).expect("the server runs");
        wait_until("all jobs are gone", || session.drain_once().expect("the server runs"));
    }

    /// Nothing may be left of clients and jobs that are gone.
    fn check_nothing_is_left(&self, server: &Server, files_before: usize) {
        let mut observer = Client::connect(self.address);
        wait_until("all are gone", || observer.stat("current-connections") == 1);
        for key in ["current-waiting", "current-workers", "current-producers"] {
            assert_eq!(observer.stat(key), 0, "{key}");
        }
        // A connection that watches many tubes is closed in steps.
        wait_until("one tube is left", || observer.stat("current-tubes") == 1);
        drop(observer);
        wait_until("no descriptor is left", || server.daemon.open_files() <= files_before);
    }
}

/// Memory over time.
struct Samples {
    every: Duration,
    next: Instant,
    /// RSS, and the bytes of live jobs, in KiB.
    taken: Vec<(u64, u64)>,
}

impl Samples {
    fn new(lasts: Duration) -> Samples {
        Samples { every: lasts / 24, next: Instant::now(), taken: Vec::new() }
    }

    fn take(&mut self, daemon: &Daemon, live_bytes: u64) {
        if Instant::now() >= self.next {
            self.next += self.every;
            self.taken.push((daemon.rss_kib(), live_bytes >> 10));
        }
    }

    /// What is beyond the live bytes in the last quarter may not be much more than in the second;
    /// the first is there to warm up. A leak of four bytes for each operation would show within
    /// an hour.
    fn check(&self) -> String {
        /// Bodies that come and go leave holes of all sizes: this much varies by chance.
        const MARGIN_KIB: u64 = 8 * 1024;
        let beyond = |&(rss, live): &(u64, u64)| rss.saturating_sub(live);
        let quarter = self.taken.len() / 4;
        let most = |from| self.taken[from..from + quarter].iter().map(beyond).max();
        let (earlier, later) = (most(quarter), most(self.taken.len() - quarter));
        let line = format!("memory beyond live bytes {earlier:?} KiB earlier, {later:?} later");
        let may_be = earlier.map(|earlier| earlier + MARGIN_KIB);
        assert!(later <= may_be, "memory grows: {line} (memory, live: {:?})", self.taken);
        line
    }
}

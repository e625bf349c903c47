//! Timers while the time of day is set, and while the server is stopped: nothing comes early, all
//! comes, and all that was sent meanwhile has replies.
//!
//! The machine's clock is left alone: libfaketime, preloaded into the server, gives it another
//! time of day, as much ahead as a file says, and leaves the monotonic clock as it is.

use super::Run;
use crate::harness::client::Client;
use crate::harness::process::{BEANSTALKD, Daemon, ON_LOOPBACK, command, path_text};
use crate::harness::request::{numbered_body, put};
use crate::harness::skip;
use crate::serve;
use rustix::process::Signal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SPAN: Duration = Duration::from_secs(1);

/// Lets clients wait for all that can be due, while `meanwhile` runs: it is due when [`SPAN`] is over.
/// Returns the delay of the latest.
fn wait_for_all_that_is_due(address: SocketAddr, meanwhile: impl FnOnce()) -> Duration {
    let client = |tube| Client::in_tube(address, tube);
    let (mut delayed, mut paused, mut soon) = (client("a"), client("b"), client("c"));
    let (mut holder, next, timed) = (client("d"), client("d"), client("e"));
    let put_job =
        |client: &mut Client, delay_s, ttr_s| client.ask(put(0, delay_s, ttr_s, "job")).inserted();
    let paused_id = put_job(&mut paused, 0, 60);
    let soon_id = put_job(&mut soon, 0, 2);
    let held_id = put_job(&mut holder, 0, 1);
    let reserved = |id| format!("RESERVED {id} 3");
    let since = Instant::now();
    paused.expect("pause-tube b 1\r\n", "PAUSED");
    soon.expect("reserve\r\n", &reserved(soon_id));
    holder.expect("reserve\r\n", &reserved(held_id));
    let delayed_id = put_job(&mut delayed, 1, 60);
    // Each waits for its job, or until the time of the request is over.
    let waits = [
        (delayed, Some(delayed_id)),
        (paused, Some(paused_id)),
        (next, Some(held_id)),
        (soon, Some(soon_id)),
        (timed, None),
    ];
    let receive = |mut client: Client, id: Option<u64>| {
        let line = client.reply().line;
        let took = since.elapsed();
        // Its TTR may be over, too, when a server continues.
        let is_soon = line == "DEADLINE_SOON" && id == Some(soon_id);
        let is_due = line == id.map_or("TIMED_OUT".to_owned(), reserved);
        assert!(is_due || is_soon, "{line} comes to the client that waits for {id:?}");
        assert!(took >= SPAN, "{line} comes after {took:?}");
        (took - SPAN, client, id)
    };
    let received = thread::scope(|scope| {
        let threads = waits.map(|(mut client, id)| {
            let timeout = if id.is_some() { "" } else { "-with-timeout 1" };
            client.send(format!("reserve{timeout}\r\n"));
            scope.spawn(move || receive(client, id))
        });
        meanwhile();
        threads.map(|thread| thread.join().expect("it is in time"))
    });
    holder.expect(format!("touch {held_id}\r\n"), "NOT_FOUND");
    // Its next holder may have lost it, too.
    let stats = holder.ask(format!("stats-job {held_id}\r\n"));
    assert!(stats.value("timeouts") >= Some(1), "{}", stats.text());
    let delays = received.map(|(delay, mut client, id)| {
        id.into_iter().for_each(|id| client.delete_all(&[id]));
        delay
    });
    delays.into_iter().max().expect("there are some")
}

// ---- A server that is stopped ----

pub(super) fn server_is_stopped(run: &Run) -> String {
    let (daemon, client) = serve(&[]);
    let address = client.socket().peer_addr().unwrap().as_socket().unwrap();
    let mut random = run.random();
    let puts = run.size([20, 200]);
    let rounds = run.rounds(|| {
        let more = Duration::from_millis(random.u64(..run.size([1, 2_000]) as u64));
        stop_once(&daemon, address, puts, SPAN + more);
    });
    format!("{rounds} rounds, {} puts answered", 10 * rounds * puts)
}

/// Stops the server for this span, while ten clients write this number of puts each.
fn stop_once(daemon: &Daemon, address: SocketAddr, puts: usize, span: Duration) {
    let mut writers: Vec<Client> = (0..10).map(|_| Client::in_tube(address, "written")).collect();
    let mut newcomers = Vec::new();
    wait_for_all_that_is_due(address, || {
        daemon.signal(Signal::STOP);
        let stopped_at = Instant::now();
        for client in &mut writers {
            for number in 0..puts as u64 {
                client.send(put(0, 0, 60, numbered_body(number, 100)));
            }
        }
        // New connections find room in the backlog.
        newcomers.extend((0..20).map(|_| Client::connect(address)));
        newcomers.iter_mut().for_each(|client| client.send("list-tube-used\r\n"));
        thread::sleep(span.saturating_sub(stopped_at.elapsed()));
        daemon.signal(Signal::CONT);
    });
    for client in &mut newcomers {
        assert_eq!(client.reply().line, "USING default");
    }
    for client in &mut writers {
        let ids: Vec<u64> = (0..puts).map(|_| client.reply().inserted()).collect();
        assert!(ids.is_sorted(), "replies are out of order");
        client.delete_all(&ids);
    }
    assert_eq!(writers[0].jobs(), 0);
}

// ---- A clock that is set ----

pub(super) fn clock_is_set(run: &Run) -> String {
    let Some(library) = library() else {
        skip("libfaketime is not installed (the Debian package is faketime)");
        return String::new();
    };
    let mut latest = Duration::ZERO;
    let rounds = run.rounds(|| {
        let clock = FakeClock::new(library.clone());
        let (_daemon, address) = clock.start();
        let late = wait_for_all_that_is_due(address, || {
            for hours in [3, -5, 48, -1, 0, 24 * 365, -7, 0] {
                clock.set_ahead(hours * HOUR_S);
                // The server reads the clock.
                assert!(Client::connect(address).ask("stats\r\n").line.starts_with("OK "));
                thread::sleep(SPAN / 10);
            }
        });
        latest = latest.max(late);
        restart(&FakeClock::new(library.clone()));
    });
    format!("{rounds} rounds; nothing came early, nor more than {latest:.0?} late")
}

/// Returns the library, where Linux distributions put it.
fn library() -> Option<PathBuf> {
    let below = std::fs::read_dir("/usr/lib").ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let directories = ["/usr/lib64", "/usr/lib", "/usr/local/lib"].map(PathBuf::from);
    let mut paths =
        directories.into_iter().chain(below).map(|path| path.join("faketime/libfaketime.so.1"));
    paths.find(|path| path.is_file())
}

const HOUR_S: i64 = 3600;

struct FakeClock {
    library: PathBuf,
    /// The binlog and the file that says how much ahead the clock is.
    directory: TempDir,
}

impl FakeClock {
    fn new(library: PathBuf) -> FakeClock {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        let clock = FakeClock { library, directory: directory.expect("it is new") };
        clock.set_ahead(0);
        clock
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("clock")
    }

    /// Sets the clock ahead of the real time, or behind it.
    fn set_ahead(&self, seconds: i64) {
        // The server reads the file at any moment, so it is put in place whole.
        let new = self.directory.path().join("new-clock");
        std::fs::write(&new, format!("{seconds:+}\n")).expect("there is space");
        std::fs::rename(new, self.file()).expect("it is the same directory");
    }

    fn start(&self) -> (Daemon, SocketAddr) {
        let flags = [&ON_LOOPBACK[..], &["-b", path_text(self.directory.path())]].concat();
        let mut command = command(BEANSTALKD, flags);
        command.env("LD_PRELOAD", &self.library).env("FAKETIME_TIMESTAMP_FILE", self.file());
        command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        command.env("DONT_FAKE_MONOTONIC", "1");
        Daemon::spawn(command).with_address()
    }
}

/// A delayed job is due when it was to be, although the clock was set before the server was
/// killed; and never later than its whole delay from then.
fn restart(clock: &FakeClock) {
    const DELAY_S: u32 = 1_000;
    let (mut daemon, address) = clock.start();
    let mut client = Client::connect(address);
    let before = client.ask(put(0, DELAY_S, 60, "job")).inserted();
    clock.set_ahead(2 * HOUR_S);
    let after = client.ask(put(0, DELAY_S, 60, "job")).inserted();
    daemon.kill();
    let about_all = u64::from(DELAY_S) - 60..=DELAY_S.into();
    for (ahead_s, id, state, left_s) in [
        (2 * HOUR_S, after, "delayed", about_all.clone()),
        // By the wall clock it is over: so the library works.
        (2 * HOUR_S, before, "ready", 0..=0),
        // By the wall clock they are due in hours, longer than any delay of the test.
        (-5 * HOUR_S, before, "delayed", about_all.clone()),
        (-5 * HOUR_S, after, "delayed", about_all),
    ] {
        clock.set_ahead(ahead_s);
        let (mut daemon, address) = clock.start();
        let stats = Client::connect(address).ask(format!("stats-job {id}\r\n"));
        daemon.kill();
        assert_eq!(stats.field("state"), Some(state), "job {id}, {ahead_s} s ahead");
        let left = stats.value("time-left").expect("the job is there");
        assert!(left_s.contains(&left), "{left} s of {DELAY_S} are left, {ahead_s} s ahead");
    }
}

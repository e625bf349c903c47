//! Timers while the time of day is set, and while the server is stopped: nothing comes early, all
//! comes, and all that was sent meanwhile has replies.
//!
//! The machine's clock is left alone: libfaketime, preloaded into the server, gives it another
//! time of day, as much ahead as a file says, and leaves the monotonic clock as it is.

use crate::harness::client::Client;
use crate::harness::process::{self, BEANSTALKD, Daemon, ON_LOOPBACK, command, path_text, text};
use crate::harness::request::{numbered_body, put};
use crate::harness::skip;
use crate::run::{Outcome, Run};
use rustix::process::Signal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;

// ---- What is due ----

const SPAN: Duration = Duration::from_secs(1);

/// Clients for which something is due when [`SPAN`] is over.
struct Due {
    since: Instant,
    /// Holds a job of this id until its TTR is over.
    holder: (Client, u64),
    waits: Vec<Wait>,
}

/// A client that will wait for one of these lines, and then may delete a job.
struct Wait {
    client: Client,
    request: &'static str,
    lines: Vec<String>,
    id: Option<u64>,
}

impl Due {
    fn begin(address: SocketAddr) -> Due {
        let client = |tube| Client::in_tube(address, tube);
        let (mut delayed, mut paused, mut soon) = (client("a"), client("b"), client("c"));
        let (mut holder, next, timed) = (client("d"), client("d"), client("e"));
        let paused_id = paused.put("job");
        let soon_id = soon.ask(put(0, 0, 2, "job")).inserted();
        let held_id = holder.ask(put(0, 0, 1, "job")).inserted();
        let reserved = |id| format!("RESERVED {id} 3");

        let since = Instant::now();
        paused.expect("pause-tube b 1\r\n", "PAUSED");
        soon.expect("reserve\r\n", &reserved(soon_id));
        holder.expect("reserve\r\n", &reserved(held_id));
        let delayed_id = delayed.ask(put(0, 1, 60, "job")).inserted();
        let wait = |client, id| Wait {
            client,
            request: "reserve\r\n",
            lines: vec![reserved(id)],
            id: Some(id),
        };
        let mut soon = wait(soon, soon_id);
        // Its TTR may be over, too, when a server continues.
        soon.lines.push("DEADLINE_SOON".to_owned());
        let request = "reserve-with-timeout 1\r\n";
        let timed = Wait { client: timed, request, lines: vec!["TIMED_OUT".to_owned()], id: None };
        let waits = vec![
            wait(delayed, delayed_id),
            wait(paused, paused_id),
            wait(next, held_id),
            soon,
            timed,
        ];
        Due { since, holder: (holder, held_id), waits }
    }

    /// Sends what waits, and receives all replies while `meanwhile` runs. Returns the delay of the
    /// latest.
    fn wait(mut self, meanwhile: impl FnOnce()) -> Duration {
        for Wait { client, request, .. } in &mut self.waits {
            client.send(request);
        }
        let since = self.since;
        let receive = |Wait { client, lines, .. }: &mut Wait| {
            let line = client.reply().line;
            let took = since.elapsed();
            assert!(lines.contains(&line), "{line} comes instead of {lines:?}");
            assert!(took >= SPAN, "{line} comes after {took:?}");
            took - SPAN
        };
        let late = thread::scope(|scope| {
            let waits = self.waits.iter_mut();
            let threads: Vec<_> = waits.map(|wait| scope.spawn(|| receive(wait))).collect();
            meanwhile();
            let late = threads.into_iter().map(|thread| thread.join().expect("it is in time"));
            late.max().unwrap_or_default()
        });
        let (mut holder, id) = self.holder;
        holder.expect(format!("touch {id}\r\n"), "NOT_FOUND");
        // Its next holder may have lost it, too.
        let stats = holder.ask(format!("stats-job {id}\r\n"));
        assert!(stats.value("timeouts") >= Some(1), "{}", stats.text());
        for Wait { mut client, id, .. } in self.waits {
            id.into_iter().for_each(|id| client.delete_all(&[id]));
        }
        late
    }
}

// ---- A server that is stopped ----

pub fn server_is_stopped(run: &Run) -> Outcome {
    let (daemon, address) = Daemon::on_loopback(&[]);
    let mut random = run.random();
    let mut answered = 0;
    let rounds = run.rounds(|_| {
        let more = Duration::from_millis(random.u64(..run.size(1, 2_000) as u64));
        answered += stop_once(&daemon, address, run.size(20, 200), SPAN + more);
    });
    Some(format!("{rounds} rounds, {answered} puts answered"))
}

/// Stops the server for this span, while clients write; returns the number of puts.
fn stop_once(daemon: &Daemon, address: SocketAddr, puts: usize, span: Duration) -> usize {
    let due = Due::begin(address);
    let mut writers: Vec<Client> = (0..10).map(|_| Client::in_tube(address, "written")).collect();
    daemon.signal(Signal::STOP);
    let stopped_at = Instant::now();
    for (client, index) in writers.iter_mut().zip(0..) {
        for number in 0..puts as u64 {
            client.send(put(0, 0, 60, numbered_body(number * 10 + index, 100)));
        }
    }
    // New connections find room in the backlog.
    let mut newcomers: Vec<Client> = (0..20).map(|_| Client::connect(address)).collect();
    for client in &mut newcomers {
        client.send("list-tube-used\r\n");
    }
    due.wait(|| {
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
    puts * writers.len()
}

// ---- A clock that is set ----

pub fn clock_is_set(run: &Run) -> Outcome {
    let Some(library) = library() else {
        skip("libfaketime is not installed (the Debian package is faketime)");
        return None;
    };
    let mut latest = Duration::ZERO;
    let rounds = run.rounds(|_| {
        let clock = FakeClock::new(library.clone());
        let (_daemon, address) = clock.start();
        let late = Due::begin(address).wait(|| {
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
    Some(format!("{rounds} rounds; nothing came early, nor more than {latest:.0?} late"))
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

/// The time of day of a server.
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
        let mut daemon = Daemon::spawn(command);
        let address = daemon.address();
        (daemon, address)
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
    check_that_clock_was_set(clock, after);
    let about_all = u64::from(DELAY_S) - 60..=DELAY_S.into();
    for (ahead_s, id, state, left_s) in [
        (2 * HOUR_S, after, "delayed", about_all.clone()),
        // By the wall clock it is over.
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

/// Without the library all of this would be easy.
fn check_that_clock_was_set(clock: &FakeClock, id: u64) {
    let output = process::run(&["--dump", "-b", path_text(clock.directory.path())]);
    let mut lines = text(&output.stdout).lines();
    let job = lines.find(|job| job.starts_with(&format!("{{\"id\":{id},")));
    let job: serde_json::Value =
        serde_json::from_str(job.expect("the job is there")).expect("it is JSON");
    let created_s = job["created_at_ns"].as_u64().expect("it is a number") / 1_000_000_000;
    let now_s = SystemTime::UNIX_EPOCH.elapsed().expect("it is later than 1970").as_secs();
    assert!(created_s > now_s + 3_600, "the server had the time of this machine: {created_s}");
}

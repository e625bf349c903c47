//! The time of day is set hours forth and back: nothing that counts time may notice.
//!
//! The machine's clock is left alone: libfaketime, preloaded into the server, gives it another
//! time of day, as much ahead as a file says, and leaves the monotonic clock as it is. Where it is
//! not installed (the Debian package is `faketime`) there is nothing to play.

use super::{Outcome, Run, Skipped};
use crate::harness::client::Client;
use crate::harness::process::{
    BEANSTALKD, Daemon, ON_LOOPBACK, command, path_text, run as run_to_its_end, text,
};
use crate::harness::request::put;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;

pub fn is_set(run: &Run) -> Outcome {
    let Some(library) = library() else {
        return Err(Skipped("libfaketime is not installed".to_owned()));
    };
    let mut rounds = 0;
    let mut latest = Duration::ZERO;
    loop {
        let clock = FakeClock::new(&library);
        latest = latest.max(time_passes(&clock));
        restarts(&clock);
        rounds += 1;
        if !run.has_time() {
            let latest_ms = latest.as_millis();
            return Ok(format!(
                "{rounds} rounds; nothing came early, nor more than {latest_ms} ms late"
            ));
        }
    }
}

/// Where Linux distributions put it.
fn library() -> Option<PathBuf> {
    const NAME: &str = "faketime/libfaketime.so.1";
    let mut directories: Vec<PathBuf> =
        ["/usr/lib64", "/usr/lib", "/usr/local/lib"].iter().map(PathBuf::from).collect();
    let below = std::fs::read_dir("/usr/lib").ok()?;
    directories.extend(below.filter_map(|entry| Some(entry.ok()?.path())));
    directories.into_iter().map(|path| path.join(NAME)).find(|path| path.is_file())
}

const HOUR_S: i64 = 3600;

/// The time of day of a server.
struct FakeClock<'a> {
    library: &'a Path,
    directory: TempDir,
}

impl FakeClock<'_> {
    fn new(library: &Path) -> FakeClock<'_> {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        let clock = FakeClock { library, directory: directory.expect("it can be made") };
        clock.set_ahead(0);
        std::fs::create_dir(clock.jobs()).expect("it can be made");
        clock
    }

    fn jobs(&self) -> PathBuf {
        self.directory.path().join("jobs")
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("clock")
    }

    /// Ahead of the real time, or behind it.
    fn set_ahead(&self, seconds: i64) {
        // Put in place whole: it is read at any moment.
        let new = self.directory.path().join("new-clock");
        std::fs::write(&new, format!("{seconds:+}\n")).expect("there is space");
        std::fs::rename(new, self.file()).expect("it is the same directory");
    }

    fn start(&self) -> (Daemon, SocketAddr) {
        let jobs = self.jobs();
        let flags = [&ON_LOOPBACK[..], &["-b", path_text(&jobs)]].concat();
        let mut command = command(BEANSTALKD, flags);
        command.env("LD_PRELOAD", self.library).env("FAKETIME_TIMESTAMP_FILE", self.file());
        command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        command.env("DONT_FAKE_MONOTONIC", "1");
        let mut daemon = Daemon::spawn(command);
        let address = daemon.address();
        (daemon, address)
    }
}

/// Runs all waits of two seconds while the clock jumps; returns the greatest delay.
fn time_passes(clock: &FakeClock<'_>) -> Duration {
    const SPAN: Duration = Duration::from_secs(2);
    let (_daemon, address) = clock.start();
    let client = |tube: &str| {
        let mut client = Client::connect(address);
        client.expect(format!("use {tube}\r\n"), &format!("USING {tube}"));
        client.expect(format!("watch {tube}\r\n"), "WATCHING 2");
        client.expect("ignore default\r\n", "WATCHING 1");
        client
    };
    let (mut delayed, mut paused, mut waiting) = (client("a"), client("b"), client("c"));
    let (mut silent, mut next) = (client("d"), client("d"));
    let in_pause = paused.put(b"job");
    let held = silent.ask(put(0, 0, 2, b"job")).number("INSERTED").expect("there is room");

    let start = Instant::now();
    delayed.send(put(0, 2, 60, b"job"));
    let put_delayed = delayed.reply().number("INSERTED").expect("there is room");
    delayed.send("reserve\r\n");
    paused.expect("pause-tube b 2\r\n", "PAUSED");
    paused.send("reserve\r\n");
    waiting.send("reserve-with-timeout 2\r\n");
    silent.expect("reserve\r\n", &format!("RESERVED {held} 3"));
    next.send("reserve\r\n");
    let expected = [
        (delayed, format!("RESERVED {put_delayed} 3")),
        (paused, format!("RESERVED {in_pause} 3")),
        (waiting, "TIMED_OUT".to_owned()),
        (next, format!("RESERVED {held} 3")),
    ];
    thread::scope(|scope| {
        let receive = |(mut client, line): (Client, String)| {
            scope.spawn(move || {
                assert_eq!(client.reply().line, line);
                let took = start.elapsed();
                assert!(took >= SPAN, "{line} comes after {took:?}");
                took - SPAN
            })
        };
        let received = expected.map(receive);
        for hours in [3, -5, 48, -1, 0, 24 * 365, -7, 0] {
            clock.set_ahead(hours * HOUR_S);
            // So that it is looked at.
            assert!(Client::connect(address).ask("stats\r\n").line.starts_with("OK "));
            thread::sleep(Duration::from_millis(200));
        }
        let late = received.map(|thread| thread.join().expect("the client is served"));
        late.into_iter().max().unwrap_or_default()
    })
}

/// A delayed job is due when it was to be, although the clock was set before the server was
/// killed; and never later than its whole delay from then.
fn restarts(clock: &FakeClock<'_>) {
    const DELAY_S: u64 = 1_000;
    clock.set_ahead(0);
    let (mut daemon, address) = clock.start();
    let mut client = Client::connect(address);
    let mut put_delayed = |ahead_s| {
        clock.set_ahead(ahead_s);
        let seconds = u32::try_from(DELAY_S).expect("it is small");
        let reply = client.ask(put(0, seconds, 60, b"job"));
        reply.number("INSERTED").expect("there is room")
    };
    let before = put_delayed(0);
    let after = put_delayed(2 * HOUR_S);
    daemon.kill();
    check_it_was_set(clock, after);
    let time_left = |ahead_s, id: u64| {
        clock.set_ahead(ahead_s);
        let (mut daemon, address) = clock.start();
        let stats = Client::connect(address).ask(format!("stats-job {id}\r\n"));
        daemon.kill();
        let state = stats.field("state").map(str::to_owned);
        (state.expect("the job is there"), stats.value("time-left").expect("it has one"))
    };
    let about_all = DELAY_S - 60..=DELAY_S;
    let (state, left_s) = time_left(2 * HOUR_S, after);
    assert_eq!(state, "delayed");
    assert!(about_all.contains(&left_s), "{left_s} s are left of {DELAY_S}");
    // By the clock on the wall it is over.
    assert_eq!(time_left(2 * HOUR_S, before), ("ready".to_owned(), 0));
    // By the wall clock it is due in hours, longer than any delay of the test.
    for id in [before, after] {
        let (state, left_s) = time_left(-5 * HOUR_S, id);
        assert_eq!(state, "delayed");
        assert!(about_all.contains(&left_s), "{left_s} s are left of {DELAY_S}");
    }
}

/// Had the library not worked, all of this would have been easy.
fn check_it_was_set(clock: &FakeClock<'_>, id: u64) {
    let path = clock.jobs();
    let output = run_to_its_end(&["--dump", "-b", path_text(&path)]);
    let line = format!("{{\"id\":{id},");
    let job = text(&output.stdout).lines().find(|job| job.starts_with(&line));
    let job: serde_json::Value =
        serde_json::from_str(job.expect("the job is there")).expect("it is JSON");
    let created_s = job["created_at_ns"].as_u64().expect("it is a number") / 1_000_000_000;
    let now_s = SystemTime::UNIX_EPOCH.elapsed().expect("it is later than 1970").as_secs();
    assert!(created_s > now_s + 3_600, "the server had the time of this machine: {created_s}");
}

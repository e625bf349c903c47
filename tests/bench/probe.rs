//! Clients next to the load, each on a thread of its own: a probe that measures how long other
//! clients wait, and a scraper of metrics.

use crate::client::{Outcome, TooSlow};
use crate::harness::client::Client;
use crate::harness::reply::Reply;
use crate::load::Run;
use crate::machine::Waits;
use crate::report::Figures;
use crate::server::{Measured, Server};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Asks a question every millisecond or so.
pub struct Probe {
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<()>>,
}

/// What a probe has noted.
#[derive(Default)]
struct Seen {
    is_over: bool,
    is_waiting: bool,
    last: Option<(Reply, Instant)>,
    /// The longest that a question had to wait.
    worst: Duration,
    /// The longest of all questions, each less the time in which server or client waited for
    /// a core. The stall is at least this, and at most `worst`.
    worst_of_server: Duration,
}

impl Probe {
    /// The question is a command that costs a server next to nothing. A job that is put is deleted
    /// the next time.
    pub fn start(server: &Server, question: &'static str) -> Probe {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (address, pid, for_thread) = (server.address, server.pid(), Arc::clone(&seen));
        let thread = thread::spawn(move || ask_all(&for_thread, question, address, pid));
        Probe { seen, thread: Some(thread) }
    }

    /// Waits for a reply of which this holds; returns when it came.
    pub fn wait_for(&self, patience: Duration, holds: impl Fn(&Reply) -> bool) -> Outcome<Instant> {
        self.wait(patience, |seen| {
            seen.last.as_ref().filter(|(reply, _)| holds(reply)).map(|&(_, at)| at)
        })
    }

    /// Measures work beside a probe.
    pub fn beside(
        server: &Server,
        question: &'static str,
        work: impl FnOnce() -> Outcome<Run>,
    ) -> Outcome<Measured> {
        let probe = Probe::start(server, question);
        let mut measured = server.measure(work)?;
        measured.stalls = probe.take_stalls()?;
        Ok(measured)
    }

    /// The longest waits since this was last called. A reply that is under way is waited for.
    pub fn take_stalls(&self) -> Outcome<Figures> {
        /// Longer than the client of the probe waits for a reply.
        const PATIENCE: Duration = Duration::from_secs(90);
        let taken = |seen: &mut Seen| (!seen.is_waiting).then(|| std::mem::take(seen));
        let seen = self.wait(PATIENCE, taken)?;
        Ok(Figures::of([
            ("stall_ms", seen.worst_of_server.as_secs_f64() * 1e3),
            ("stall_with_noise_ms", seen.worst.as_secs_f64() * 1e3),
        ]))
    }

    fn wait<T>(&self, patience: Duration, take: impl Fn(&mut Seen) -> Option<T>) -> Outcome<T> {
        /// Short compared with the period of the probe.
        const PAUSE: Duration = Duration::from_micros(200);
        let end = Instant::now() + patience;
        while Instant::now() < end {
            if let Some(taken) = take(&mut lock(&self.seen)) {
                return Ok(taken);
            }
            thread::sleep(PAUSE);
        }
        Err(TooSlow)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        lock(&self.seen).is_over = true;
        let joined = self.thread.take().map(JoinHandle::join);
        assert!(thread::panicking() || matches!(joined, Some(Ok(()))), "the probe has failed");
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().expect("the probe does not panic")
}

fn ask_all(seen: &Mutex<Seen>, question: &str, address: SocketAddr, pid: u32) {
    const PERIOD: Duration = Duration::from_millis(1);
    let mut client = Client::connect(address);
    if question.starts_with("put") {
        // So that no other client reserves its jobs.
        client.expect("use probe\r\n", "USING probe");
    }
    let (waits, mut request) = (Waits::of(pid), format!("{question}\r\n"));
    while !lock(seen).is_over {
        lock(seen).is_waiting = true;
        let (waited_before, asked_at) = (waits.total(), Instant::now());
        // A server that does not reply within the patience of the client stalls at least so long.
        let reply = client.try_ask(request);
        let now = Instant::now();
        let (latency, waited) = (now - asked_at, waits.total() - waited_before);
        let mut seen = lock(seen);
        seen.is_waiting = false;
        seen.worst = seen.worst.max(latency);
        seen.worst_of_server = seen.worst_of_server.max(latency.saturating_sub(waited));
        let Ok(reply) = reply else { return };
        let delete = reply.number("INSERTED").map(|id| format!("delete {id}\r\n"));
        request = delete.unwrap_or_else(|| format!("{question}\r\n"));
        seen.last = Some((reply, now));
        drop(seen);
        thread::sleep((asked_at + PERIOD).saturating_duration_since(now));
    }
}

/// What came of scrapes without pause: the number of pages, their bytes, and their time.
#[derive(Default)]
pub struct Scrapes {
    pub pages: u32,
    pub bytes: usize,
    pub time: Duration,
}

/// Asks for the next page as soon as the last one has come, until it is over.
pub fn scrape(address: SocketAddr, is_over: &AtomicBool) -> Scrapes {
    let mut scrapes = Scrapes::default();
    while !is_over.load(Ordering::Relaxed) {
        let (start, mut client) = (Instant::now(), Client::connect(address));
        client.send("GET /metrics HTTP/1.1\r\nHost: bench\r\n\r\n");
        let page = client.rest();
        assert!(page.starts_with(b"HTTP/1.1 200 "), "the page is not served");
        scrapes.pages += 1;
        scrapes.bytes += page.len();
        scrapes.time += start.elapsed();
    }
    scrapes
}

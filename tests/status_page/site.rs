//! A server as an HTTP client sees it, for the tests of the metrics and of the status page.
#![allow(dead_code, reason = "each of the two test programs uses a part of it")]

use crate::harness::driver::{Client, Driver, Http, Nanos, Options, Settings, Subject};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::request::put;
use serde_json::Value;

pub const START: Nanos = Nanos::from_secs(1_000);
/// The most bytes that the work of one loop iteration makes: a slice takes no more samples from
/// 16 KiB on, the longest sample has 4 KiB, and a head or a chunk's frame comes in addition.
const MOST_BYTES: usize = 21 * 1024;
/// A page that is not complete after this many pieces never is.
const MOST_PIECES: usize = 100_000;

/// The command that puts a job which is ready at once.
pub const PUT: &str = "put 0 0 9000 1\r\nx\r\n";

pub const HTML: &str = "text/html";
pub const TEXT: &str = "text/plain";
pub const JSON: &str = "application/json";

/// A server, and a client of the queue.
pub struct Site {
    pub driver: Driver,
    pub client: Client,
}

pub struct Response {
    pub status: u16,
    /// All lines up to the empty one, each with its CR LF.
    pub head: String,
    pub body: String,
    /// The number of pieces, with those that only scanned.
    pub pieces: usize,
}

impl Site {
    pub const SETTINGS: Settings =
        Settings { max_memory_bytes: 1_000_000_000, ..Settings::DEFAULT };

    pub fn new() -> Site {
        Site::start(Site::SETTINGS, None)
    }

    /// Returns a site on whose page at most this many tubes have metrics of their own.
    pub fn listing(metrics_tubes: usize, settings: Settings, disk: Option<&FakeDisk>) -> Site {
        let settings = Settings { metrics_tubes: Some(metrics_tubes), ..settings };
        Site::start_with(Options { settings, ..Options::DEFAULT }, disk)
    }

    pub fn start(settings: Settings, disk: Option<&FakeDisk>) -> Site {
        Site::start_with(Options { settings, ..Options::DEFAULT }, disk)
    }

    /// Starts a server that takes samples for its pages.
    pub fn start_with(mut options: Options, disk: Option<&FakeDisk>) -> Site {
        options.settings.metrics_tubes.get_or_insert(1000);
        let mut driver = Driver::start(options, disk.map(FakeDisk::boxed), START).unwrap();
        let client = driver.connect();
        Site { driver, client }
    }

    /// Returns a server with jobs in all states, a pause, a timeout, a waiter and half a command, 12.75
    /// s after its start.
    pub fn busy(metrics_tubes: usize) -> Site {
        let mut site = Site::listing(metrics_tubes, Site::SETTINGS, None);
        let [producer, worker, waiter] = [(); 3].map(|()| site.driver.connect());
        let puts = [(5, 0), (5000, 0), (7, 0), (5, 100), (9, 0)];
        let puts = puts.map(|(pri, delay)| put(pri, delay, 60, "<secret>!")).concat();
        site.driver.ask(producer, [b"use mail\r\n", &*puts].concat());
        site.driver.ask(producer, "use print\r\nput 0 0 60 1\r\nx\r\npause-tube print 90\r\n");
        let reserve = "watch mail\r\nwatch print\r\nreserve\r\nbury 1 7\r\nreserve\r\n";
        site.driver.ask(worker, reserve);
        // A TTR runs out, and the job is deleted.
        site.driver.ask(producer, "use quick\r\nput 0 0 1 0\r\n\r\n");
        site.driver.ask(worker, "watch quick\r\nreserve\r\nignore quick\r\n");
        site.driver.advance(Nanos::from_secs(2));
        site.driver.ask(producer, "watch quick\r\ndelete 7\r\nuse print\r\nput 0 0 1");
        site.driver.ask(waiter, "watch rare\r\nreserve\r\n");
        site.driver.advance(Nanos::from_millis(10_750));
        site
    }

    /// Makes the client watch `count` tubes: `tube0` and so on, with this many digits.
    pub fn watch_tubes(&mut self, count: usize, digits: usize) {
        let watch = |tube| format!("watch tube{tube:0>digits$}\r\n");
        self.ask((0..count).map(watch).collect::<String>());
    }

    pub fn ask(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.driver.ask(self.client, commands)
    }

    // ---- Requests ----

    pub fn request(&mut self, request: impl AsRef<[u8]>) -> Response {
        self.request_while(request, |_| {})
    }

    /// Reads the response to a request, and calls `between` after each piece.
    pub fn request_while(
        &mut self,
        request: impl AsRef<[u8]>,
        mut between: impl FnMut(&mut Site),
    ) -> Response {
        let mut http = Http::open(self.driver.now);
        http.receive(Subject::Serving(&self.driver), request);
        let mut pieces = Vec::new();
        while !http.is_done() {
            pieces.push(http.next_piece(Subject::Serving(&self.driver)));
            assert!(pieces.len() < MOST_PIECES, "the page does not end");
            between(self);
        }
        Response::of(&pieces)
    }

    pub fn get(&mut self, path: &str, accept: &str) -> Response {
        self.request(get(path, accept))
    }

    /// Returns the body of a page that must have the accepted type.
    pub fn body(&mut self, path: &str, accept: &str) -> String {
        let Response { status, head, body, .. } = self.get(path, accept);
        assert_eq!(status, 200, "{path}");
        assert!(head.contains(&format!("\r\nContent-Type: {accept}")), "{head}");
        body
    }

    pub fn json(&mut self, path: &str) -> Value {
        serde_json::from_str(&self.body(path, JSON)).unwrap()
    }

    /// Replaces what differs from version to version in a page: their names, the memory of a job, and
    /// decimals from the second one on, because the virtual time that a command takes is not defined.
    pub fn redacted(&mut self, page: &str) -> String {
        let metrics = self.body("/metrics", TEXT);
        let (_, memory) = metrics.split_once("\nbeanstalkd_job_memory_bytes ").unwrap();
        let memory = memory.lines().next().unwrap();
        let page = page.replace(env!("CARGO_PKG_VERSION"), "VERSION").replace(memory, "MEMORY");
        let mut decimals = None;
        let is_kept = |symbol: &char| {
            decimals = match (symbol, decimals) {
                ('.', _) => Some(0),
                ('0'..='9', Some(count)) => Some(count + 1),
                _ => None,
            };
            decimals.is_none_or(|count| count < 2)
        };
        page.replace("1.13", "PROTOCOL").chars().filter(is_kept).collect()
    }
}

impl Response {
    fn of(pieces: &[Vec<u8>]) -> Response {
        let longest = pieces.iter().map(Vec::len).max().unwrap();
        assert!(longest < MOST_BYTES, "{longest} bytes were made at once");
        let response = Response::parse(pieces.concat());
        Response { pieces: pieces.len(), ..response }
    }

    pub fn parse(bytes: Vec<u8>) -> Response {
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Response { status, head: format!("{head}\r\n"), body: body.to_owned(), pieces: 0 }
    }
}

/// Returns a request whose response has no chunks.
pub fn get(path: &str, accept: &str) -> String {
    format!("GET {path} HTTP/1.0\r\nAccept: {accept}\r\n\r\n")
}

/// Returns the response of a server that serves no clients.
pub fn idle_response(subject: Subject<'_>, request: &str) -> Response {
    let mut http = Http::open(START);
    http.receive(subject, request);
    let piece = http.next_piece(subject);
    assert!(http.is_done());
    Response::of(&[piece])
}

//! A scraper that asks for metrics again and again, on the thread of the load generator, a little at a
//! time. The time that this takes is noted and not counted as the server's.

use crate::figures::Figures;
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Asks for the next page as soon as the last one has come.
pub struct Scraper {
    registry: Registry,
    token: Token,
    address: SocketAddr,
    stream: TcpStream,
    began_at: Instant,
    /// Of the present page.
    len: u64,
    /// There may be something to read.
    pub is_ready: bool,
    /// For which the thread did nothing else.
    pub time: Duration,
    scrapes: Scrapes,
}

/// What came of it.
#[derive(Default)]
pub struct Scrapes {
    /// Bytes of all pages, that of the last one so far too.
    bytes: u64,
    /// The length of each whole page, and how long it took.
    pages: Vec<(u64, Duration)>,
}

impl Scraper {
    /// Begins with the first page; what happens to it comes under this token.
    pub fn start(registry: Registry, token: Token, address: SocketAddr) -> Scraper {
        let stream = Scraper::ask(&registry, token, address);
        let (began_at, scrapes) = (Instant::now(), Scrapes::default());
        let (len, is_ready, time) = (0, false, Duration::ZERO);
        Scraper { registry, token, address, stream, began_at, len, is_ready, time, scrapes }
    }

    fn ask(registry: &Registry, token: Token, address: SocketAddr) -> TcpStream {
        let mut stream = std::net::TcpStream::connect(address).expect("the server listens");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: bench\r\n\r\n").expect("it is short");
        stream.set_nonblocking(true).expect("the option can be set");
        let mut stream = TcpStream::from_std(stream);
        registry.register(&mut stream, token, Interest::READABLE).expect("epoll takes it");
        stream
    }

    /// Takes some of the page.
    pub fn go_on(&mut self, buffer: &mut [u8]) {
        /// Less than the server makes in one go takes no longer than an operation.
        const READ_LEN: usize = 16 << 10;
        const GOOD: &[u8] = b"HTTP/1.1 200 ";
        let start = Instant::now();
        match self.stream.read(&mut buffer[..READ_LEN]) {
            Ok(0) => self.begin_again(),
            Ok(count) => {
                assert!(
                    self.len > 0 || buffer.starts_with(GOOD),
                    "the page of metrics is not served"
                );
                self.len += count as u64;
                self.scrapes.bytes += count as u64;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_ready = false,
            Err(error) => panic!("scraping the server: {error}"),
        }
        self.time += start.elapsed();
    }

    fn begin_again(&mut self) {
        self.scrapes.pages.push((self.len, self.began_at.elapsed()));
        self.len = 0;
        self.began_at = Instant::now();
        self.stream = Scraper::ask(&self.registry, self.token, self.address);
    }

    /// Asks for nothing more.
    pub fn end(self) -> Scrapes {
        self.scrapes
    }
}

impl Scrapes {
    /// The figures; `cpu_us` is the processor time that all of it has cost the server.
    pub fn figures(&self, cpu_us: f64) -> Figures {
        let mut figures = Figures::default();
        let whole = self.pages.len() as f64;
        if whole > 0.0 {
            let bytes: u64 = self.pages.iter().map(|(len, _)| len).sum();
            let time: Duration = self.pages.iter().map(|(_, time)| *time).sum();
            let page_bytes = bytes as f64 / whole;
            figures.add("page_kib", page_bytes / 1024.0);
            figures.add("ms_per_scrape", time.as_secs_f64() * 1e3 / whole);
            figures.add("cpu_ms_per_scrape", cpu_us / 1e3 * page_bytes / self.bytes as f64);
        }
        figures
    }
}

//! A client that blocks, over TCP or a Unix socket.
//!
//! Where the server may be killed meanwhile, errors are values (`try_...`); elsewhere none may come.

use super::PATIENCE;
use super::reply::{Reply, body_len, without_end};
use super::request::{delete_all, put};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::path::Path;
use std::time::Duration;

pub fn unix(path: &Path) -> SockAddr {
    SockAddr::unix(path).expect("the path is short enough for a socket")
}

/// Opens a connection whose reads and writes fail when [`PATIENCE`] is over.
pub fn connect(address: impl Into<SockAddr>) -> Socket {
    try_connect(address).expect("the server listens")
}

/// Opens the same, or returns the error if the server does not listen.
pub fn try_connect(address: impl Into<SockAddr>) -> io::Result<Socket> {
    open(&address.into(), None)
}

fn open(address: &SockAddr, window_bytes: Option<usize>) -> io::Result<Socket> {
    let socket = Socket::new(address.domain(), Type::STREAM, None)?;
    if let Some(bytes) = window_bytes {
        socket.set_recv_buffer_size(bytes)?;
    }
    socket.set_read_timeout(Some(PATIENCE))?;
    // The timeout ends a connect too, for which a full backlog has no room.
    socket.set_write_timeout(Some(PATIENCE))?;
    if address.domain() != Domain::UNIX {
        socket.set_tcp_nodelay(true)?;
    }
    socket.connect(address)?;
    Ok(socket)
}

/// A connection to the server.
pub struct Client {
    stream: BufReader<Socket>,
}

impl Client {
    pub fn connect(address: impl Into<SockAddr>) -> Client {
        Client::over(connect(address))
    }

    pub fn over(socket: Socket) -> Client {
        Client { stream: BufReader::new(socket) }
    }

    /// Connects, uses a tube, and watches it alone.
    pub fn in_tube(address: impl Into<SockAddr>, tube: &str) -> Client {
        let mut client = Client::connect(address);
        client.expect(format!("use {tube}\r\n"), &format!("USING {tube}"));
        client.expect(format!("watch {tube}\r\n"), "WATCHING 2");
        client.expect("ignore default\r\n", "WATCHING 1");
        client
    }

    /// Connects with a receive window of about `bytes`, more than which the server cannot send ahead.
    pub fn connect_with_window(address: impl Into<SockAddr>, bytes: usize) -> Client {
        Client::over(open(&address.into(), Some(bytes)).expect("the server listens"))
    }

    pub fn try_send(&mut self, request: impl AsRef<[u8]>) -> io::Result<()> {
        self.stream.get_mut().write_all(request.as_ref())
    }

    pub fn try_reply(&mut self) -> io::Result<Reply> {
        let line = self.try_line()?;
        let mut body = Vec::new();
        if let Some(len) = body_len(line.as_bytes()) {
            body.resize(len + 2, 0);
            self.stream.read_exact(&mut body)?;
            body.truncate(without_end(&body).len());
        }
        Ok(Reply { line, body })
    }

    /// Reads a line and returns it without its CR LF.
    pub fn try_line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let line = line.strip_suffix("\r\n").ok_or(ErrorKind::UnexpectedEof)?;
        Ok(line.to_owned())
    }

    pub fn try_ask(&mut self, request: impl AsRef<[u8]>) -> io::Result<Reply> {
        self.try_send(request)?;
        self.try_reply()
    }

    pub fn send(&mut self, request: impl AsRef<[u8]>) {
        self.try_send(request).expect("the server reads");
    }

    pub fn reply(&mut self) -> Reply {
        self.try_reply().expect("the server replies")
    }

    pub fn line(&mut self) -> String {
        self.try_line().expect("the server replies")
    }

    /// Waits until a part of a reply has come, and reads no more than that.
    pub fn wait_for_reply(&mut self) {
        let part = self.stream.fill_buf().expect("the server replies");
        assert!(!part.is_empty(), "the server closes the connection");
    }

    pub fn ask(&mut self, request: impl AsRef<[u8]>) -> Reply {
        self.send(request);
        self.reply()
    }

    /// Asks, and asserts the line of the reply.
    #[track_caller]
    pub fn expect(&mut self, request: impl AsRef<[u8]>, line: &str) {
        let request = request.as_ref();
        let reply = self.ask(request);
        let head = &request[..request.len().min(80)];
        assert_eq!(reply.line, line, "to {}", head.escape_ascii());
    }

    /// Asserts that the server serves this connection.
    #[track_caller]
    pub fn expect_service(&mut self) {
        self.expect("use a\r\n", "USING a");
    }

    /// Puts a job that is ready at once, with a TTR of an hour; returns its id.
    pub fn put(&mut self, body: impl AsRef<[u8]>) -> u64 {
        self.ask(put(0, 0, 3600, body)).inserted()
    }

    /// Deletes these jobs, many at a time.
    #[track_caller]
    pub fn delete_all(&mut self, ids: &[u64]) {
        for ids in ids.chunks(500) {
            self.send(delete_all(ids.iter().copied()));
            for id in ids {
                assert_eq!(self.line(), "DELETED", "to the delete of job {id}");
            }
        }
    }

    pub fn stat(&mut self, key: &str) -> u64 {
        let reply = self.ask("stats\r\n");
        reply.value(key).unwrap_or_else(|| panic!("stats has no number {key}: {}", reply.line))
    }

    pub fn jobs(&mut self) -> u64 {
        let stats = self.ask("stats\r\n");
        let states = ["ready", "reserved", "delayed", "buried"];
        let count = |state| stats.value(&format!("current-jobs-{state}"));
        states.map(|state| count(state).expect("stats counts each state")).iter().sum()
    }

    pub fn half_close(&self) {
        self.socket().shutdown(Shutdown::Write).expect("the connection is open");
    }

    /// Waits until the server closes the connection; `false` if more bytes come.
    pub fn is_at_end(&mut self) -> bool {
        let read = self.stream.read_exact(&mut [0]);
        read.is_err_and(|error| error.kind() == ErrorKind::UnexpectedEof)
    }

    /// Reads until the server closes or resets the connection.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        if let Err(error) = self.stream.read_to_end(&mut rest) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "the server does not close");
        }
        rest
    }

    /// Closes with a reset, which discards what is under way.
    pub fn reset(self) {
        self.socket().set_linger(Some(Duration::ZERO)).expect("the option can be set");
    }

    pub fn socket(&self) -> &Socket {
        self.stream.get_ref()
    }
}

//! A client that blocks, and bodies that can be told from one another.
//!
//! What it says is as wild as a scenario likes; what it hears is cut into replies. Where the
//! server may be killed under it, errors are values (`try_...`); elsewhere none may come.

use crate::support;
use socket2::{Domain, SockRef, Socket, Type};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// A connection to the server.
pub struct Client {
    stream: BufReader<TcpStream>,
}

/// What the server has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Without its CR LF.
    pub line: String,
    /// A body or a document, without its CR LF; empty where none follows.
    pub body: Vec<u8>,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Client {
        Client { stream: BufReader::new(support::connect(address)) }
    }

    pub fn try_connect(address: SocketAddr) -> io::Result<Client> {
        Ok(Client { stream: BufReader::new(support::try_connect(address)?) })
    }

    /// Over a connection that there is already, with the patience that all have.
    pub fn over(stream: TcpStream) -> Client {
        stream.set_read_timeout(Some(support::PATIENCE)).expect("a timeout can be set");
        Client { stream: BufReader::new(stream) }
    }

    /// With a window of about so many bytes: the server cannot send more ahead.
    pub fn connect_with_window(address: SocketAddr, bytes: usize) -> Client {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None);
        let socket = socket.expect("a descriptor is free");
        socket.set_recv_buffer_size(bytes).expect("the option can be set");
        for set_timeout in [Socket::set_read_timeout, Socket::set_write_timeout] {
            set_timeout(&socket, Some(support::PATIENCE)).expect("a timeout can be set");
        }
        socket.connect(&address.into()).expect("the server listens");
        let stream = TcpStream::from(socket);
        Client { stream: BufReader::new(stream) }
    }

    pub fn try_send(&mut self, request: impl AsRef<[u8]>) -> io::Result<()> {
        self.stream.get_mut().write_all(request.as_ref())
    }

    pub fn try_reply(&mut self) -> io::Result<Reply> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 || !line.ends_with("\r\n") {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.truncate(line.len() - "\r\n".len());
        let words: Vec<&str> = line.split(' ').collect();
        let (["RESERVED" | "FOUND", _, len] | ["OK", len]) = words.as_slice() else {
            return Ok(Reply { line, body: Vec::new() });
        };
        let len: usize = len.parse().expect("a length is a number");
        let mut body = vec![0; len + "\r\n".len()];
        self.stream.read_exact(&mut body)?;
        assert!(body.ends_with(b"\r\n"), "the body of {line} does not end as it must");
        body.truncate(len);
        Ok(Reply { line, body })
    }

    pub fn try_ask(&mut self, request: impl AsRef<[u8]>) -> io::Result<Reply> {
        self.try_send(request)?;
        self.try_reply()
    }

    pub fn send(&mut self, request: impl AsRef<[u8]>) {
        self.try_send(request).expect("the server reads");
    }

    pub fn reply(&mut self) -> Reply {
        self.try_reply().expect("the server answers")
    }

    pub fn ask(&mut self, request: impl AsRef<[u8]>) -> Reply {
        self.send(request);
        self.reply()
    }

    /// Asks, and insists on the answer.
    pub fn expect(&mut self, request: &str, line: &str) {
        let reply = self.ask(request);
        assert_eq!(reply.line, line, "to {request:?}");
    }

    /// Puts a job that is ready at once and has an hour for its worker; says its id.
    pub fn put(&mut self, body: &[u8]) -> u64 {
        let reply = self.ask(put(0, 0, 3600, body));
        reply.number("INSERTED").unwrap_or_else(|| panic!("a put is answered {}", reply.line))
    }

    /// The value of a line of `stats`.
    pub fn stat(&mut self, key: &str) -> u64 {
        let reply = self.ask("stats\r\n");
        reply.value(key).unwrap_or_else(|| panic!("stats has no number {key}: {}", reply.line))
    }

    /// Sends no more, but listens.
    pub fn half_close(&self) {
        self.stream.get_ref().shutdown(Shutdown::Write).expect("the connection is open");
    }

    /// Nothing more comes: the server has closed.
    pub fn is_at_end(&mut self) -> bool {
        self.stream.fill_buf().is_ok_and(<[u8]>::is_empty)
    }

    /// Closes with a reset, and forgets what is under way.
    pub fn reset(self) {
        let stream = self.stream.get_ref();
        SockRef::from(stream).set_linger(Some(Duration::ZERO)).expect("the option can be set");
    }

    /// The bare connection.
    pub fn stream(&self) -> &TcpStream {
        self.stream.get_ref()
    }
}

impl Reply {
    /// The first number behind this word, if that is what was said.
    pub fn number(&self, word: &str) -> Option<u64> {
        let rest = self.line.strip_prefix(word)?.strip_prefix(' ')?;
        rest.split(' ').next()?.parse().ok()
    }

    /// A number in a document.
    pub fn value(&self, key: &str) -> Option<u64> {
        support::field(support::text(&self.body), key)?.parse().ok()
    }
}

/// A put as it is sent.
pub fn put(pri: u32, delay_s: u32, ttr_s: u32, body: &[u8]) -> Vec<u8> {
    let line = format!("put {pri} {delay_s} {ttr_s} {}\r\n", body.len());
    [line.as_bytes(), body, b"\r\n"].concat()
}

/// The body with this number: as long as is asked for, and unlike that of any other number if it
/// is long enough for it. It has bytes of all kinds.
pub fn body(number: u64, len: usize) -> Vec<u8> {
    let mut body = format!("{number} ").into_bytes();
    body.resize(len.max(body.len()), 0);
    let start = body.iter().position(|&byte| byte == b' ').map_or(0, |space| space + 1);
    fastrand::Rng::with_seed(number).fill(&mut body[start..]);
    body.truncate(len);
    body
}

/// The number of a body, if it is whole.
pub fn number_of(bytes: &[u8]) -> Option<u64> {
    let digits = bytes.split(|&byte| byte == b' ').next()?;
    let number = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (body(number, bytes.len()) == bytes).then_some(number)
}

//! The connection to a server: requests, replies, and the documents in them. It must not know a command
//! of the tool.

use super::Result;
use super::print::{escaped, json_string};
use crate::engine::text::CR_LF;
use crate::engine::time::Nanos;
use crate::flags::is_digits;
use crate::os::failure::Failure;
use crate::os::sys::clock;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use socket2::{Domain, SockAddr, Socket, Type};
use std::fmt::{self, Display};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The exit codes without a connection or a reply, and if the server refused a request.
pub const EXIT_NO_SERVER: u8 = 3;
pub const EXIT_REFUSED: u8 = 4;

/// The requests that are sent before their replies are read: their replies fit in the buffers of a
/// server, and other clients are served between two windows.
pub const WINDOW: usize = 100;

/// The most bytes in the line of a reply. The longest one has a name of 200 bytes; what sends more is no
/// server.
const LINE_MAX: u64 = 1024;

/// A connection, which is opened when the first request is sent.
pub struct Conn {
    /// `HOST:PORT` or `unix:PATH`.
    address: String,
    /// The time to connect, and for each reply.
    timeout: Nanos,
    stream: Option<BufReader<Timed>>,
    /// The address of this end, as the server sees it.
    pub own_address: String,
    /// The tube that is used for puts and peeks.
    pub used: String,
    /// Whether the server has more than C beanstalkd, once that is known.
    has_more: Option<bool>,
}

/// A socket from which reads end at a time: that at which the whole reply must be there.
struct Timed {
    socket: UnixStream,
    ends_at: Nanos,
}

impl Read for Timed {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.ends_at.since(clock::monotonic()).as_nanos();
        if left == 0 {
            return Err(ErrorKind::TimedOut.into());
        }
        self.socket.set_read_timeout(Some(Duration::from_nanos(left)))?;
        self.socket.read(bytes)
    }
}

/// A reply: its line, and the bytes after it, both without CR LF.
pub struct Reply {
    pub line: String,
    pub body: Vec<u8>,
}

/// The keys and values of a document, of one of its entries, or of a row; displayed as a JSON object. The
/// values are JSON.
#[derive(Clone, Default)]
pub struct Fields(pub Vec<(String, String)>);

impl Conn {
    /// Returns a connection to the server at `address`.
    pub fn to(address: String, timeout: Nanos) -> Conn {
        let (own_address, used) = (String::new(), "default".into());
        Conn { address, timeout, stream: None, own_address, used, has_more: None }
    }

    /// Returns another connection to the same server.
    pub fn another(&self) -> Conn {
        Conn::to(self.address.clone(), self.timeout)
    }

    /// Sends one request, and returns its reply.
    pub fn ask(&mut self, request: &str) -> Result<Reply> {
        self.send(&[request.as_bytes(), CR_LF].concat())
    }

    /// Sends a request for each item, a window of them at a time, and returns their replies.
    pub fn ask_each<T>(&mut self, of: &[T], line: impl Fn(&T) -> String) -> Result<Vec<Reply>> {
        let mut replies = Vec::with_capacity(of.len());
        for window in of.chunks(WINDOW) {
            let requests: String = window.iter().map(|item| line(item) + "\r\n").collect();
            replies.push(self.send(requests.as_bytes())?);
            for _ in &window[1..] {
                replies.push(self.send(b"")?);
            }
        }
        Ok(replies)
    }

    /// Makes `tube` the one for puts and peeks.
    pub fn use_tube(&mut self, tube: &str) -> Result {
        if self.used != tube {
            self.ask(&format!("use {tube}"))?.expect("USING")?;
            tube.clone_into(&mut self.used);
        }
        Ok(())
    }

    /// Puts a job with a priority, a delay and a TTR. The reply has its id, or if another job has its key, id and
    /// state of that one.
    pub fn put(&mut self, tube: &str, numbers: [u64; 3], tags: &str, body: &[u8]) -> Result<Reply> {
        self.use_tube(tube)?;
        let ([pri, delay, ttr], len) = (numbers, body.len());
        let line = format!("put {pri} {delay} {ttr} {len}{tags}\r\n");
        self.send(&[line.as_bytes(), body, CR_LF].concat())?.expect("INSERTED")
    }

    /// Returns whether the server has lists and keys of jobs. The line that finds out is short: C beanstalkd never ends
    /// one that is longer than 224 bytes, as `list-jobs` with a long name can be, and after a put with a key it takes
    /// the body for a command.
    pub fn has_more(&mut self) -> Result<bool> {
        if self.has_more.is_none() {
            let reply = self.ask("list-jobs default any 1")?;
            self.has_more = Some(reply.line != "UNKNOWN_COMMAND");
        }
        Ok(self.has_more == Some(true))
    }

    /// Fails if the server lacks them.
    pub fn must_have(&mut self, what: &str) -> Result {
        if self.has_more()? { Ok(()) } else { Err(lacks(what)) }
    }

    /// Sends bytes, and returns the next reply.
    fn send(&mut self, bytes: &[u8]) -> Result<Reply> {
        self.exchange(bytes).map_err(|error| {
            let is_late = [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind());
            let Conn { address, timeout, stream, .. } = self;
            let message = match (is_late, stream) {
                (true, _) => format!("no reply from {address} within {} s", timeout.whole_secs()),
                (false, None) => format!("cannot connect to {address}: {error}"),
                (false, Some(_)) => format!("the connection to {address} is lost: {error}"),
            };
            Failure::new(EXIT_NO_SERVER, message)
        })
    }

    fn exchange(&mut self, bytes: &[u8]) -> io::Result<Reply> {
        if self.stream.is_none() {
            self.open()?;
        }
        let stream = self.stream.as_mut().expect("it was opened");
        stream.get_mut().socket.write_all(bytes)?;
        stream.get_mut().ends_at = clock::monotonic() + self.timeout;
        read_reply(stream)
    }

    /// Connects. For reading and writing, a descriptor of either kind of socket does.
    fn open(&mut self) -> io::Result<()> {
        let timeout = Duration::from_nanos(self.timeout.as_nanos());
        let socket: UnixStream = if let Some(path) = self.address.strip_prefix("unix:") {
            self.own_address = "unix".into();
            // With a full queue, the kernel waits as long as for a write.
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
            socket.set_write_timeout(Some(timeout))?;
            socket.connect(&SockAddr::unix(path)?)?;
            OwnedFd::from(socket).into()
        } else {
            let addresses = self.address.to_socket_addrs()?;
            let none = Err(io::Error::other("the host has no address"));
            let stream = addresses.fold(none, |stream: io::Result<TcpStream>, address| {
                stream.or_else(|_| TcpStream::connect_timeout(&address, timeout))
            })?;
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(timeout))?;
            self.own_address = stream.local_addr()?.to_string();
            OwnedFd::from(stream).into()
        };
        self.stream = Some(BufReader::new(Timed { socket, ends_at: Nanos::ZERO }));
        Ok(())
    }
}

fn read_reply(stream: &mut BufReader<Timed>) -> io::Result<Reply> {
    let mut line = Vec::new();
    if stream.take(LINE_MAX).read_until(b'\n', &mut line)? as u64 == LINE_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    let line = line.strip_suffix(CR_LF).ok_or(ErrorKind::UnexpectedEof)?;
    let line = String::from_utf8_lossy(line).into_owned();
    let mut words = line.split(' ');
    let len = match words.next() {
        Some("OK") => words.next(),
        Some("FOUND" | "RESERVED") => words.nth(1),
        _ => return Ok(Reply { line, body: Vec::new() }),
    };
    let len: u32 = len.and_then(|len| len.parse().ok()).ok_or(ErrorKind::InvalidData)?;
    let mut body = Vec::new();
    stream.take(u64::from(len) + 2).read_to_end(&mut body)?;
    if !body.ends_with(CR_LF) {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    body.truncate(len as usize);
    Ok(Reply { line, body })
}

impl Reply {
    /// Returns a word of the line; nothing if it has fewer.
    pub fn word(&self, index: usize) -> &str {
        self.line.split(' ').nth(index).unwrap_or_default()
    }

    /// Returns the reply if `word` is its first one; otherwise the server has refused the request.
    pub fn expect(self, word: &str) -> Result<Reply> {
        if self.word(0) == word { Ok(self) } else { Err(self.refusal()) }
    }

    /// Returns the failure for an unexpected reply.
    fn refusal(&self) -> Failure {
        Failure::new(EXIT_REFUSED, format!("the server answered {}", escaped(self.line.as_bytes())))
    }

    /// Returns a document, or the body of a job; `None` for NOT_FOUND. `command` names what the server may
    /// lack.
    pub fn content(self, command: &str) -> Result<Option<Vec<u8>>> {
        match self.word(0) {
            "NOT_FOUND" => Ok(None),
            "UNKNOWN_COMMAND" => Err(lacks(command)),
            "OK" | "FOUND" | "RESERVED" => Ok(Some(self.body)),
            _ => Err(self.refusal()),
        }
    }

    /// Returns a document as text.
    pub fn document(self, command: &str) -> Result<Option<String>> {
        let text = |document: Vec<u8>| String::from_utf8_lossy(&document).into_owned();
        Ok(self.content(command)?.map(text))
    }

    /// Returns the keys and values of the document of a stats command.
    pub fn fields(self, command: &str) -> Result<Option<Fields>> {
        Ok(self.document(command)?.map(|text| Fields::parse(text.lines())))
    }

    /// Returns the entries of a list.
    pub fn entries(self, command: &str) -> Result<Option<Vec<Fields>>> {
        let entry = |line: &str| {
            let inner = line.strip_prefix("- {")?.strip_suffix('}')?;
            Some(Fields::parse(inner.split(", ")))
        };
        Ok(self.document(command)?.map(|text| text.lines().filter_map(entry).collect()))
    }
}

/// Returns the failure on a server without a command.
fn lacks(command: &str) -> Failure {
    Failure::new(EXIT_REFUSED, format!("this server has no {command}"))
}

impl Fields {
    /// Returns the keys and values, which are JSON.
    pub fn of<const N: usize>(pairs: [(&str, String); N]) -> Fields {
        Fields(pairs.map(|(key, value)| (key.to_owned(), value)).into())
    }

    /// Parses keys and values. A value is a number, a string in quotes, or a word; a name may consist of digits.
    pub fn parse<'l>(pairs: impl Iterator<Item = &'l str>) -> Fields {
        let pair = |text: &str| {
            let (key, value) = text.split_once(": ")?;
            let is_number = is_digits(value) && !["tube", "name"].contains(&key);
            let is_json = is_number || value.starts_with('"');
            Some((key.to_owned(), if is_json { value.to_owned() } else { json_string(value) }))
        };
        Fields(pairs.filter_map(pair).collect())
    }

    /// Adds a value, which is JSON.
    pub fn push(&mut self, key: &str, value: impl ToString) {
        self.0.push((key.to_owned(), value.to_string()));
    }

    /// Adds the body of a job, as `--dump` prints it.
    pub fn push_body(&mut self, body: &[u8]) {
        match str::from_utf8(body) {
            Ok(text) => self.push("body", json_string(text)),
            Err(_) => self.push("body_base64", json_string(&STANDARD.encode(body))),
        }
    }

    /// Returns a value as text, a string without its quotes; nothing if it is missing.
    pub fn text(&self, key: &str) -> &str {
        let value = self.0.iter().find(|(own, _)| own == key);
        value.map_or("", |(_, value)| value.trim_matches('"'))
    }

    /// Returns a number; 0 if it is missing.
    pub fn number(&self, key: &str) -> u64 {
        self.text(key).parse().unwrap_or(0)
    }
}

impl Display for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs = self.0.iter().map(|(key, value)| format!("\"{key}\":{value}"));
        write!(f, "{{{}}}", pairs.collect::<Vec<_>>().join(","))
    }
}

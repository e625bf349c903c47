//! The connection to a server: requests, replies, and the documents in them. It must not know a command
//! of the tool.

use crate::engine::text::CR_LF;
use crate::os::failure::Failure;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The exit code without a connection or a reply.
pub const EXIT_NO_SERVER: u8 = 3;

/// The exit code if the server refused a request.
pub const EXIT_REFUSED: u8 = 4;

/// The requests that are sent before their replies are read: their replies fit in the buffers of a
/// server, and other clients are served between two windows.
pub const WINDOW: usize = 100;

/// A stream of bytes, over TCP or a Unix socket.
trait Stream: Read + Write + Send {}
impl Stream for TcpStream {}
impl Stream for UnixStream {}

/// A server, and how long to wait for it.
#[derive(Clone, Debug)]
pub struct Place {
    /// `HOST:PORT` or `unix:PATH`.
    pub address: String,
    /// The time to connect, and for each reply.
    pub timeout: Duration,
}

/// A connection.
pub struct Conn {
    stream: BufReader<Box<dyn Stream>>,
    place: Place,
    /// The address of this end, as the server sees it.
    pub own_address: String,
    /// The tube that is used for puts.
    used: String,
}

/// A reply: its line, and the bytes after it.
#[derive(Debug)]
pub struct Reply {
    /// Without CR LF.
    pub line: String,
    /// Without CR LF; empty if the reply has none.
    pub body: Vec<u8>,
}

/// The keys and values of a document, or of one of its entries. Strings keep their quotes.
#[derive(Clone, Debug, Default)]
pub struct Fields(pub Vec<(String, String)>);

impl Conn {
    /// Connects to the server.
    pub fn open(place: &Place) -> Result<Conn, Failure> {
        let cannot = |error: io::Error| {
            let message = format!("cannot connect to {}: {error}", place.address);
            Failure::new(EXIT_NO_SERVER, message)
        };
        let (stream, own_address) = connect(place).map_err(cannot)?;
        let stream = BufReader::new(stream);
        Ok(Conn { stream, place: place.clone(), own_address, used: "default".into() })
    }

    /// Sends one request, and returns its reply.
    pub fn ask(&mut self, request: &str) -> Result<Reply, Failure> {
        self.send(&[request.as_bytes(), CR_LF].concat())?;
        self.reply()
    }

    /// Sends requests, a window of them at a time, and returns their replies.
    pub fn ask_all(&mut self, requests: &[String]) -> Result<Vec<Reply>, Failure> {
        let mut replies = Vec::with_capacity(requests.len());
        for window in requests.chunks(WINDOW) {
            self.send((window.join("\r\n") + "\r\n").as_bytes())?;
            for _ in window {
                replies.push(self.reply()?);
            }
        }
        Ok(replies)
    }

    /// Makes `tube` the one for puts and peeks.
    pub fn use_tube(&mut self, tube: &str) -> Result<(), Failure> {
        if self.used != tube {
            self.ask(&format!("use {tube}"))?.expect("USING")?;
            tube.clone_into(&mut self.used);
        }
        Ok(())
    }

    /// Puts a job, and returns the line of the reply, which begins with INSERTED. `arguments` are those
    /// after the word, except the number of bytes.
    pub fn put(&mut self, arguments: &str, key: &str, body: &[u8]) -> Result<String, Failure> {
        let line = format!("put {arguments} {}{key}\r\n", body.len());
        self.send(&[line.as_bytes(), body, CR_LF].concat())?;
        self.reply()?.expect("INSERTED")
    }

    /// Returns whether a put may have a key. A server that does not know keys would take the body for a
    /// command. A command that changes nothing here, and is as new as keys, finds out.
    pub fn has_keys(&mut self) -> Result<bool, Failure> {
        Ok(!self.ask("touch-all")?.is("UNKNOWN_COMMAND"))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.stream.get_mut().write_all(bytes).map_err(|error| self.lost(&error))
    }

    fn reply(&mut self) -> Result<Reply, Failure> {
        self.read_reply().map_err(|error| self.lost(&error))
    }

    fn read_reply(&mut self) -> io::Result<Reply> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line)?;
        let Some(line) = line.strip_suffix(CR_LF) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let line = String::from_utf8_lossy(line).into_owned();
        let mut words = line.split(' ');
        let len = match words.next() {
            Some("OK") => words.next(),
            Some("FOUND" | "RESERVED") => words.nth(1),
            _ => return Ok(Reply { line, body: Vec::new() }),
        };
        let len = len.and_then(|len| len.parse::<u32>().ok()).ok_or(io::ErrorKind::InvalidData)?;
        let mut body = Vec::new();
        self.stream.by_ref().take(u64::from(len) + 2).read_to_end(&mut body)?;
        if !body.ends_with(CR_LF) || body.len() != len as usize + 2 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        body.truncate(len as usize);
        Ok(Reply { line, body })
    }

    fn lost(&self, error: &io::Error) -> Failure {
        let Place { address, timeout } = &self.place;
        let is = |kind| error.kind() == kind;
        let message = if is(io::ErrorKind::WouldBlock) || is(io::ErrorKind::TimedOut) {
            format!("no reply from {address} within {} s", timeout.as_secs())
        } else if is(io::ErrorKind::UnexpectedEof) {
            format!("{address} has closed the connection")
        } else if is(io::ErrorKind::InvalidData) {
            format!("{address} does not speak beanstalkd's protocol")
        } else {
            format!("the connection to {address} is lost: {error}")
        };
        Failure::new(EXIT_NO_SERVER, message)
    }
}

/// Returns a stream to the server, and the address of this end.
fn connect(place: &Place) -> io::Result<(Box<dyn Stream>, String)> {
    let Place { address, timeout } = place;
    let timeout = Some(*timeout);
    if let Some(path) = address.strip_prefix("unix:") {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(timeout)?;
        stream.set_write_timeout(timeout)?;
        return Ok((Box::new(stream), "unix".into()));
    }
    let mut refused = io::Error::other("the host has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, place.timeout) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(timeout)?;
                stream.set_write_timeout(timeout)?;
                let own = stream.local_addr()?.to_string();
                return Ok((Box::new(stream), own));
            }
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

impl Reply {
    /// Returns whether the reply's line is this word.
    pub fn is(&self, word: &str) -> bool {
        self.line == word
    }

    /// Returns the line if `word` is its first one; otherwise the server has refused the request.
    pub fn expect(self, word: &str) -> Result<String, Failure> {
        if self.line.split(' ').next() == Some(word) { Ok(self.line) } else { Err(self.refusal()) }
    }

    /// Returns the body of a job.
    pub fn found(self) -> Result<Vec<u8>, Failure> {
        let is_job = self.line.starts_with("FOUND ") || self.line.starts_with("RESERVED ");
        if is_job { Ok(self.body) } else { Err(self.refusal()) }
    }

    /// Returns the failure for an unexpected reply.
    pub fn refusal(&self) -> Failure {
        Failure::new(EXIT_REFUSED, format!("the server answered {}", self.line))
    }

    /// Returns the document, `None` for NOT_FOUND. `command` names what the server may lack.
    pub fn document(self, command: &str) -> Result<Option<String>, Failure> {
        match self.line.as_str() {
            "NOT_FOUND" => Ok(None),
            "UNKNOWN_COMMAND" => Err(lacks(command)),
            line if line.starts_with("OK ") => {
                Ok(Some(String::from_utf8_lossy(&self.body).into_owned()))
            }
            _ => Err(self.refusal()),
        }
    }
}

/// Returns the failure on a server without a command.
pub fn lacks(command: &str) -> Failure {
    Failure::new(EXIT_REFUSED, format!("this server has no {command}"))
}

/// Returns the names in a document of `list-tubes`.
pub fn names(document: &str) -> Vec<String> {
    document.lines().filter_map(|line| line.strip_prefix("- ")).map(str::to_owned).collect()
}

impl Fields {
    /// Parses the document of a stats command.
    pub fn of_document(document: &str) -> Fields {
        Fields(document.lines().filter_map(pair).collect())
    }

    /// Parses the entries of a list, and returns them with the number for the next page.
    pub fn of_entries(document: &str) -> (Vec<Fields>, u64) {
        let entry = |line: &str| {
            let inner = line.strip_prefix("- {")?.strip_suffix('}')?;
            Some(Fields(inner.split(", ").filter_map(pair).collect()))
        };
        let next = Fields::of_document(document).number("next");
        (document.lines().filter_map(entry).collect(), next)
    }

    /// Returns a value without its quotes; nothing if it is missing.
    pub fn text(&self, key: &str) -> &str {
        self.raw(key).trim_matches('"')
    }

    /// Returns a value with its quotes; nothing if it is missing.
    pub fn raw(&self, key: &str) -> &str {
        self.0.iter().find(|(own, _)| own == key).map_or("", |(_, value)| value)
    }

    /// Returns a number; 0 if it is missing.
    pub fn number(&self, key: &str) -> u64 {
        self.text(key).parse().unwrap_or(0)
    }
}

fn pair(line: &str) -> Option<(String, String)> {
    let (key, value) = line.split_once(": ")?;
    Some((key.to_owned(), value.to_owned()))
}

//! The ceiling: a server that does what no server can do without, and nothing more.
//!
//! One thread, edge-triggered epoll, one read and one write for each time a connection is
//! ready, replies that are always the same. It finds the ends of lines and steps over
//! bodies, all of one size; it looks at the first letters of a line only, and keeps no
//! jobs. What a real server costs beyond this is its own doing. A large body is read into a buffer
//! of its connection and sent from there, without a copy: a server that keeps jobs cannot read all
//! bodies to one place, which would stay in the cache of the processor.

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;

/// Serves until it is killed.
pub fn serve(address: SocketAddr, body_size: usize) -> ! {
    let mut poll = Poll::new().expect("there is epoll");
    let mut listener = TcpListener::bind(address).expect("the port is free");
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE).expect("epoll works");
    let replies = Replies::new(body_size);
    let mut clients: Vec<Option<Client>> = Vec::new();
    let mut events = Events::with_capacity(1024);
    let mut shared = vec![0; READ_LEN];
    loop {
        match poll.poll(&mut events, None) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            result => result.expect("epoll works"),
        }
        for event in &events {
            if event.token() == LISTENER {
                accept_all(&listener, &poll, &mut clients, &replies);
                continue;
            }
            let Token(index) = event.token();
            let Some(client) = &mut clients[index] else { continue };
            client.is_readable |= event.is_readable();
            let mut own = std::mem::take(&mut client.own_buffer);
            let buffer = if own.is_empty() { &mut shared } else { &mut own };
            let goes_on = client.serve(buffer, &replies);
            client.own_buffer = own;
            if !goes_on {
                clients[index] = None;
            }
        }
    }
}

const LISTENER: Token = Token(usize::MAX - 1);
const READ_LEN: usize = 256 << 10;

fn accept_all(
    listener: &TcpListener,
    poll: &Poll,
    clients: &mut Vec<Option<Client>>,
    replies: &Replies,
) {
    while let Ok((mut stream, _)) = listener.accept() {
        let free = clients.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            clients.push(None);
            clients.len() - 1
        });
        let interest = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut stream, Token(index), interest).expect("epoll works");
        stream.set_nodelay(true).expect("the option can be set");
        clients[index] = Some(Client {
            stream,
            is_readable: false,
            line: Vec::new(),
            body_left: 0,
            large_left: 0,
            output: Vec::new(),
            own_buffer: replies.large_buffer(),
        });
    }
}

struct Client {
    stream: TcpStream,
    /// A read may return something.
    is_readable: bool,
    /// The beginning of a line whose end has not come yet.
    line: Vec<u8>,
    /// Bytes of a body to step over.
    body_left: usize,
    /// The number of bytes at the end of a large reply that are still to be sent, before `output`.
    large_left: usize,
    output: Vec<u8>,
    /// Where large bodies are read to and sent from; nothing if bodies are small.
    own_buffer: Vec<u8>,
}

impl Client {
    /// Reads and writes as long as the socket allows both; false when the connection is to be
    /// closed.
    fn serve(&mut self, buffer: &mut [u8], replies: &Replies) -> bool {
        loop {
            if !self.flush(buffer, replies) {
                return false;
            }
            let has_output = self.large_left > 0 || !self.output.is_empty();
            if has_output || !self.is_readable {
                return true;
            }
            if !self.answer(buffer, replies) {
                return false;
            }
        }
    }

    /// Reads once and answers what has come; false when the connection is to be closed.
    fn answer(&mut self, buffer: &mut [u8], replies: &Replies) -> bool {
        let mut bytes = match self.stream.read(buffer) {
            Ok(0) => return false,
            Ok(count) => {
                // A short read has taken all: what comes later is a new event.
                self.is_readable = count == buffer.len();
                &buffer[..count]
            }
            Err(error) => {
                self.is_readable = false;
                return error.kind() == ErrorKind::WouldBlock;
            }
        };
        loop {
            let skipped = self.body_left.min(bytes.len());
            self.body_left -= skipped;
            bytes = &bytes[skipped..];
            let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
                self.line.extend_from_slice(bytes);
                return true;
            };
            let reply = if self.line.is_empty() {
                replies.to(bytes)
            } else {
                self.line.extend_from_slice(&bytes[..=end]);
                let reply = replies.to(&self.line);
                self.line.clear();
                reply
            };
            bytes = &bytes[end + 1..];
            let Some((reply, body_size)) = reply else { return false };
            self.reply(reply);
            self.body_left = body_size;
        }
    }

    /// Only a large reply behind others is copied, which needs a client that pipelines.
    fn reply(&mut self, reply: &[u8]) {
        if reply.len() >= LARGE && self.output.is_empty() && self.large_left == 0 {
            self.large_left = reply.len();
        } else {
            self.output.extend_from_slice(reply);
        }
    }

    /// Writes what the socket takes; false when the connection is to be closed.
    fn flush(&mut self, buffer: &mut [u8], replies: &Replies) -> bool {
        while self.large_left > 0 {
            let len = replies.reserved.len();
            let sent = len - self.large_left;
            if sent == 0 {
                replies.write_ends(&mut buffer[..len]);
            }
            match self.stream.write(&buffer[sent..len]) {
                Ok(count) => self.large_left -= count,
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
        if self.output.is_empty() {
            return true;
        }
        match self.stream.write(&self.output) {
            Ok(count) if count == self.output.len() => self.output.clear(),
            Ok(count) => drop(self.output.drain(..count)),
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
        true
    }
}

/// The only large reply is that to `reserve`.
const LARGE: usize = 4096;

/// What is answered.
struct Replies {
    reserved: Vec<u8>,
    /// What follows the line of a put.
    body_size: usize,
}

impl Replies {
    fn new(body_size: usize) -> Replies {
        let mut reserved = format!("RESERVED 123456 {body_size}\r\n").into_bytes();
        reserved.resize(reserved.len() + body_size, b'x');
        reserved.extend_from_slice(b"\r\n");
        Replies { reserved, body_size: body_size + b"\r\n".len() }
    }

    /// A buffer for the bodies of one connection, if they are large.
    fn large_buffer(&self) -> Vec<u8> {
        let len = self.reserved.len();
        if len < LARGE { Vec::new() } else { vec![0; len.max(READ_LEN)] }
    }

    /// Makes the reply to `reserve` of a buffer that has some body in it.
    fn write_ends(&self, buffer: &mut [u8]) {
        let head_len = self.reserved.len() - self.body_size;
        buffer[..head_len].copy_from_slice(&self.reserved[..head_len]);
        let end = buffer.len() - b"\r\n".len();
        buffer[end..].copy_from_slice(b"\r\n");
    }

    /// The reply to a line, and how many bytes to step over; none if it was `quit`.
    fn to(&self, line: &[u8]) -> Option<(&[u8], usize)> {
        let reply: &[u8] = match line {
            [b'p', ..] => return Some((b"INSERTED 123456\r\n", self.body_size)),
            [b'r', ..] => &self.reserved,
            [b'd', ..] => b"DELETED\r\n",
            [b'u', ..] => b"USING default\r\n",
            [b'w' | b'i', ..] => b"WATCHING 1\r\n",
            _ => return None,
        };
        Some((reply, 0))
    }
}

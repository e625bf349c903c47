//! The ceiling: a server that does what no server can do without, and nothing more.
//!
//! One thread, edge-triggered epoll, one read and one write for each time a connection is ready,
//! replies that are always the same. It finds the ends of lines and steps over bodies, all of one
//! size; it looks at the first letter of a line only, and keeps no jobs. A large body is read into
//! the buffer of its connection and sent from there, without a copy: a server that keeps jobs
//! cannot read all bodies to one place, which would stay in the cache of the processor.

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::SocketAddr;

/// Bodies from this length on are sent from the buffer.
const LARGE: usize = 4096;
const LISTENER: Token = Token(usize::MAX - 1);

pub fn serve(address: SocketAddr, body_len: usize) -> ! {
    let mut poll = Poll::new().expect("there is epoll");
    let mut listener = TcpListener::bind(address).expect("the port is free");
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE).expect("epoll works");
    let mut clients: Vec<Option<Client>> = Vec::new();
    let mut events = Events::with_capacity(1024);
    loop {
        match poll.poll(&mut events, None) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            result => result.expect("epoll works"),
        }
        for event in &events {
            if event.token() == LISTENER {
                while let Ok((mut stream, _)) = listener.accept() {
                    let free = clients.iter().position(Option::is_none);
                    let index = free.unwrap_or(clients.len());
                    clients.resize_with(clients.len().max(index + 1), || None);
                    let interest = Interest::READABLE | Interest::WRITABLE;
                    let registered = poll.registry().register(&mut stream, Token(index), interest);
                    registered.expect("epoll works");
                    clients[index] = Some(Client::new(stream, body_len));
                }
                continue;
            }
            let Token(index) = event.token();
            let Some(client) = &mut clients[index] else { continue };
            client.is_readable |= event.is_readable();
            if client.serve().is_none() {
                clients[index] = None;
            }
        }
    }
}

struct Client {
    stream: TcpStream,
    /// A read may return something.
    is_readable: bool,
    /// Where bytes are read to, and large bodies are sent from.
    buffer: Vec<u8>,
    /// The length of a body, without its CR LF.
    body_len: usize,
    /// The first letter of a line whose end has not come yet.
    verb: Option<u8>,
    /// Bytes of a body to step over.
    skipped: usize,
    /// Replies that are still to be sent, and after them this number of bytes of the buffer.
    output: Vec<u8>,
    large_left: usize,
}

impl Client {
    fn new(stream: TcpStream, body_len: usize) -> Client {
        const READ_LEN: usize = 64 << 10;
        stream.set_nodelay(true).expect("the option can be set");
        let buffer = vec![b'x'; READ_LEN.max(body_len + 2)];
        let (verb, output) = (None, Vec::new());
        let (is_readable, skipped, large_left) = (false, 0, 0);
        Client { stream, is_readable, buffer, body_len, verb, skipped, output, large_left }
    }

    /// Reads and writes as long as the socket allows both; `None` when the connection is to be
    /// closed.
    fn serve(&mut self) -> Option<()> {
        loop {
            if self.large_left == self.body_len + 2 {
                self.buffer[self.body_len..self.large_left].copy_from_slice(b"\r\n");
            }
            while !self.output.is_empty() || self.large_left > 0 {
                let len = self.body_len + 2;
                // Empty unless a large body is under way.
                let body = &self.buffer[len - self.large_left..len];
                match self.stream.write_vectored(&[IoSlice::new(&self.output), IoSlice::new(body)])
                {
                    Ok(count) => {
                        let of_output = count.min(self.output.len());
                        self.output.drain(..of_output);
                        self.large_left -= count - of_output;
                    }
                    Err(error) => return (error.kind() == ErrorKind::WouldBlock).then_some(()),
                }
            }
            if !self.is_readable {
                return Some(());
            }
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return None,
                Ok(count) => {
                    // A short read has taken all: what comes later is a new event.
                    self.is_readable = count == self.buffer.len();
                    self.answer(count)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_readable = false,
                Err(_) => return None,
            }
        }
    }

    /// Answers the first bytes of the buffer; `None` after `quit`.
    fn answer(&mut self, count: usize) -> Option<()> {
        let mut bytes = &self.buffer[..count];
        while !bytes.is_empty() {
            let skipped = self.skipped.min(bytes.len());
            self.skipped -= skipped;
            bytes = &bytes[skipped..];
            let Some(&first) = bytes.first() else { return Some(()) };
            let verb = *self.verb.get_or_insert(first);
            let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else { return Some(()) };
            bytes = &bytes[end + 1..];
            self.verb = None;
            match verb {
                b'p' => {
                    self.skipped = self.body_len + 2;
                    self.output.extend_from_slice(b"INSERTED 123456\r\n");
                }
                b'r' => {
                    write!(self.output, "RESERVED 123456 {}\r\n", self.body_len).ok()?;
                    // The client of a large body does not pipeline, and looks at its end only.
                    if self.body_len >= LARGE {
                        self.large_left = self.body_len + 2;
                    } else {
                        self.output.resize(self.output.len() + self.body_len, b'x');
                        self.output.extend_from_slice(b"\r\n");
                    }
                }
                b'd' => self.output.extend_from_slice(b"DELETED\r\n"),
                b'u' => self.output.extend_from_slice(b"USING default\r\n"),
                b'w' | b'i' => self.output.extend_from_slice(b"WATCHING 1\r\n"),
                _ => return None,
            }
        }
        Some(())
    }
}

//! One accepted socket, TCP or Unix: bytes in, bytes out.

use mio::event::Source;
use mio::net::{TcpStream, UnixStream};
use mio::{Interest, Registry, Token};
use std::io::{self, IoSlice, Read, Write};

/// A connected socket.
#[derive(Debug)]
#[expect(missing_docs, reason = "each is named after its family")]
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Reads what has arrived.
    ///
    /// # Errors
    /// As the system says; `WouldBlock` when nothing has arrived.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(buffer),
            Stream::Unix(stream) => stream.read(buffer),
        }
    }

    /// Sends as much of `slices` as the system takes.
    ///
    /// # Errors
    /// As the system says; `WouldBlock` when it takes nothing at present.
    pub fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match (self, slices) {
            // One slice is by far the most frequent, and the plain call is cheaper.
            (Stream::Tcp(stream), [slice]) => stream.write(slice),
            (Stream::Unix(stream), [slice]) => stream.write(slice),
            (Stream::Tcp(stream), slices) => stream.write_vectored(slices),
            (Stream::Unix(stream), slices) => stream.write_vectored(slices),
        }
    }

    fn source(&mut self) -> &mut dyn Source {
        match self {
            Stream::Tcp(stream) => stream,
            Stream::Unix(stream) => stream,
        }
    }
}

impl Source for Stream {
    fn register(
        &mut self,
        registry: &Registry,
        token: Token,
        interests: Interest,
    ) -> io::Result<()> {
        self.source().register(registry, token, interests)
    }

    fn reregister(
        &mut self,
        registry: &Registry,
        token: Token,
        interests: Interest,
    ) -> io::Result<()> {
        self.source().reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.source().deregister(registry)
    }
}

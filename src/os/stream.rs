//! One accepted socket, TCP or Unix: bytes in, bytes out.

use mio::net::{TcpStream, UnixStream};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};

/// A connected socket.
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Reads bytes that have arrived; the error is `WouldBlock` if there are none.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(buffer),
            Stream::Unix(stream) => stream.read(buffer),
        }
    }

    /// Reads bytes that have arrived into `slices`, one after the other.
    pub fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read_vectored(slices),
            Stream::Unix(stream) => stream.read_vectored(slices),
        }
    }

    /// Shuts the sending side down.
    pub fn end_output(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }

    /// Writes as much of `slices` as the kernel takes; the error is `WouldBlock` if it takes nothing.
    #[inline]
    pub fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match (self, slices) {
            // One slice is by far the most frequent case, and the plain call is cheaper.
            (Stream::Tcp(stream), [slice]) => stream.write(slice),
            (Stream::Unix(stream), [slice]) => stream.write(slice),
            (Stream::Tcp(stream), slices) => stream.write_vectored(slices),
            (Stream::Unix(stream), slices) => stream.write_vectored(slices),
        }
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Stream::Tcp(stream) => stream.as_raw_fd(),
            Stream::Unix(stream) => stream.as_raw_fd(),
        }
    }
}

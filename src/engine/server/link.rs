//! A connection with its stream: bytes in and out.

use crate::engine::conn::{Conn, Doing};
use crate::engine::limits::Limits;
use crate::engine::store::Store;
use crate::engine::time::Nanos;
use log::debug;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};

/// A connection with its stream, and what is known of the stream: an edge is reported once.
pub struct Link<S> {
    /// `None` once the connection is closed.
    pub stream: Option<S>,
    pub conn: Conn,
    pub seen: Readiness,
    /// It is in the list of connections to visit.
    pub is_queued: bool,
    /// Iterations since replies were last sent.
    pub delayed_sends: u8,
    /// It is in the list of connections for which there was no memory for replies.
    pub is_postponed: bool,
}

/// What is known of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct Readiness {
    /// Reading may return bytes.
    pub is_readable: bool,
    /// Writing may accept bytes.
    pub is_writable: bool,
    /// The client has shut down its sending side.
    pub is_half_closed: bool,
    /// The connection is gone: the client takes no reply.
    pub is_hung_up: bool,
    /// Reading continues after a short read, until `WouldBlock`: a half-close causes no new event, and a
    /// read ends at urgent data and at descriptors sent over a Unix socket.
    pub reads_to_the_end: bool,
}

/// Reading this many bytes takes as long as one unit of work.
const READ_PER_WORK: usize = 2048;
/// Enough for eight replies with large bodies.
const SLICES_PER_WRITE: usize = 16;

impl<S> Link<S> {
    /// Closes the connection, which has jobs and watches to give back.
    #[cold]
    pub fn close(&mut self, s: &mut Store, why: Option<&io::Error>) {
        let Conn { client, .. } = &self.conn;
        match why {
            Some(error) => debug!("connection {} lost: {error}", client.key.id()),
            None => debug!("connection {} closed", client.key.id()),
        }
        self.stream = None;
        self.conn.cancel(s);
        let release_order = s.queue.disconnect(&mut self.conn.client);
        self.conn.doing = Doing::Leaving(release_order);
        s.connections -= 1;
    }

    /// Returns whether there is more to do in the next iteration.
    // Each send asks: the call would cost as much as the answer.
    #[inline(always)]
    pub fn has_more(&self, s: &Store) -> bool {
        let c = &self.conn;
        (self.seen.is_writable && c.output.sendable_len() > 0)
            || (self.seen.is_readable && c.can_read(s))
            || (c.has_backlog && c.can_run(s))
    }
}

impl<S: Read + Write> Link<S> {
    /// Reads once, and once more into a large body, and runs what has come.
    pub fn read(
        &mut self,
        s: &mut Store,
        scratch: &mut [u8],
        most: usize,
        clock: &mut dyn FnMut() -> Nanos,
    ) -> io::Result<()> {
        let is_large = self.conn.sends_large_bodies;
        if is_large && self.read_body(s, scratch, clock)? {
            return Ok(());
        }
        // Only the beginning of a large body passes through the scratch buffer.
        let most = if is_large { s.queue.limits.head_read_bytes.min(most) } else { most };
        let Some(stream) = &mut self.stream else { return Ok(()) };
        let read = stream.read(&mut scratch[..most]);
        if let Some(count) = self.on_read(s, read, most, clock)? {
            self.conn.receive(s, &scratch[..count]);
        }
        if is_large {
            self.read_body(s, scratch, clock)?;
        }
        Ok(())
    }

    /// Reads into the large body that is arriving, and the bytes after it into the scratch buffer.
    /// Returns `false` if no large body is arriving, or the stream is not readable.
    fn read_body(
        &mut self,
        s: &mut Store,
        scratch: &mut [u8],
        clock: &mut dyn FnMut() -> Nanos,
    ) -> io::Result<bool> {
        let Limits { body_read_bytes, head_read_bytes, .. } = s.queue.limits;
        if !self.seen.is_readable {
            return Ok(false);
        }
        let (Some(space), Some(stream)) =
            (self.conn.body_space(s, body_read_bytes), &mut self.stream)
        else {
            return Ok(false);
        };
        let (in_body, behind) = (space.len(), &mut scratch[..head_read_bytes]);
        let mut slices = [IoSliceMut::new(space), IoSliceMut::new(behind)];
        let read = stream.read_vectored(&mut slices);
        let Some(count) = self.on_read(s, read, in_body + head_read_bytes, clock)? else {
            return Ok(true);
        };
        self.conn.receive_body(s, count.min(in_body));
        if count > in_body {
            self.conn.receive(s, &scratch[..count - in_body]);
        }
        Ok(true)
    }

    /// Handles the result of a read of up to `most` bytes. Returns how many bytes have arrived.
    #[inline(always)]
    fn on_read(
        &mut self,
        s: &mut Store,
        read: io::Result<usize>,
        most: usize,
        clock: &mut dyn FnMut() -> Nanos,
    ) -> io::Result<Option<usize>> {
        match read {
            Ok(0) => {
                s.advance(clock());
                self.seen.is_readable = false;
                self.conn.input_ended = true;
                self.conn.half_close(s);
            }
            Ok(count) => {
                s.advance(clock());
                self.seen.is_readable = count == most || self.seen.reads_to_the_end;
                s.queue.work.spend_outside(count, READ_PER_WORK);
                return Ok(Some(count));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.seen.is_readable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// Writes what the kernel takes without waiting; drops it if the client is gone. Returns the number of bytes that
    /// were written.
    pub fn send(&mut self, s: &mut Store) -> io::Result<usize> {
        if !self.seen.is_writable {
            return Ok(0);
        }
        let Some(stream) = &mut self.stream else { return Ok(0) };
        let written = match self.conn.output.text() {
            Some([]) => return Ok(0),
            // Most replies are text alone. The plain call is cheaper, and no slices have to be cleared.
            Some(text) => stream.write(text),
            None => {
                let mut slices = [IoSlice::new(&[]); SLICES_PER_WRITE];
                match self.conn.output.next_slices(&mut slices, &s.queue.bodies) {
                    0 => return Ok(0),
                    filled => stream.write_vectored(&slices[..filled]),
                }
            }
        };
        match written {
            Ok(count) => {
                self.conn.sent(s, count);
                return Ok(count);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.seen.is_writable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if is_gone(&error) => {
                let unsent = self.conn.output.sendable_len();
                self.conn.sent(s, unsent);
                self.seen.is_readable = true;
            }
            Err(error) => return Err(error),
        }
        Ok(0)
    }
}

/// Returns whether the client has closed the connection, and takes no reply. What it has sent before can still be
/// read and run.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

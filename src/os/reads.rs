//! Reads files of the binlog on a thread, so that the event loop does not wait for the disk.
//!
//! A thread, and not io_uring, which the kernels and the sandboxes of many machines refuse. Requests are
//! carried out in their order. Nothing here knows what the bytes mean.

use crate::engine::binlog::disk::{FinishedRead, ReadToken};
use crate::os::sys::files;
use mio::Waker;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;

/// The thread, and what it has read.
#[derive(Debug)]
pub struct ReadThread {
    requests: Sender<Request>,
    finished: Receiver<FinishedRead>,
}

/// Wakes the event loop when something was read.
#[derive(Clone, Debug, Default)]
pub struct ReadWaker(Arc<OnceLock<Waker>>);

#[derive(Debug)]
enum Request {
    Read { token: ReadToken, file: io::Result<Arc<File>>, offset: u64, len: u32 },
    Prepare { file: Arc<File>, offset: u64, len: u64 },
}

impl ReadWaker {
    /// Sets what wakes the event loop. Only the first call has an effect.
    pub fn set(&self, waker: Waker) {
        let _ = self.0.set(waker);
    }

    fn wake(&self) {
        if let Some(waker) = self.0.get() {
            // It fails only if the event loop is gone.
            let _ = waker.wake();
        }
    }
}

impl ReadThread {
    /// Starts the thread, which ends with this value.
    pub fn start(waker: ReadWaker) -> io::Result<ReadThread> {
        let (requests, received) = channel();
        let (send, finished) = channel();
        thread::Builder::new().name("reads".to_owned()).spawn(move || {
            for request in received {
                match request {
                    Request::Read { token, file, offset, len } => {
                        let bytes = file.and_then(|file| read(&file, offset, len as usize));
                        if send.send(FinishedRead { token, bytes }).is_err() {
                            return;
                        }
                        waker.wake();
                    }
                    Request::Prepare { file, offset, len } => {
                        files::begin_reading_in(&file, offset, len);
                    }
                }
            }
        })?;
        Ok(ReadThread { requests, finished })
    }

    /// Begins to read, or to return why the file cannot be opened.
    pub fn read(&self, token: ReadToken, file: io::Result<Arc<File>>, offset: u64, len: u32) {
        self.request(Request::Read { token, file, offset, len });
    }

    /// Asks the kernel to read a part of a file into the page cache.
    pub fn prepare(&self, file: Arc<File>, offset: u64, len: u64) {
        self.request(Request::Prepare { file, offset, len });
    }

    fn request(&self, request: Request) {
        let sent = self.requests.send(request);
        assert!(sent.is_ok(), "the thread ends only after its last request");
    }

    /// Returns what was read, once.
    pub fn finished(&self) -> Option<FinishedRead> {
        self.finished.try_recv().ok()
    }
}

fn read(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

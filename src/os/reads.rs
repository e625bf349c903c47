//! Reads files of the binlog on a thread, so that the event loop does not wait for the disk.
//!
//! A thread, and not io_uring, which the kernels and the sandboxes of many machines refuse. Requests are
//! carried out in their order. Nothing here knows what the bytes mean.

use crate::engine::binlog::disk::{FinishedRead, ReadToken};
use crate::engine::headroom::{self, Headroom};
use crate::os::sys::files;
use mio::Waker;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

/// The thread, and what it has read. The thread ends with this value.
#[derive(Debug)]
pub struct ReadThread(Arc<Shared>);

/// Wakes the event loop when something was read.
#[derive(Clone, Debug, Default)]
pub struct ReadWaker(Arc<OnceLock<Waker>>);

/// What both threads see.
#[derive(Debug, Default)]
struct Shared {
    work: Mutex<Work>,
    /// There is a request, or the thread is to end.
    is_wanted: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    requests: VecDeque<Request>,
    finished: VecDeque<FinishedRead>,
    is_over: bool,
}

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
    /// Starts the thread.
    pub fn start(waker: ReadWaker) -> io::Result<ReadThread> {
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        thread::Builder::new().name("reads".to_owned()).spawn(move || {
            while let Some(request) = of_thread.next_request() {
                of_thread.carry_out(request, &waker);
            }
        })?;
        Ok(ReadThread(shared))
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
        self.0.lock().requests.push_back(request);
        self.0.is_wanted.notify_one();
    }

    /// Returns what was read, once.
    pub fn finished(&self) -> Option<FinishedRead> {
        self.0.lock().finished.pop_front()
    }
}

impl Drop for ReadThread {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.is_wanted.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a request. Returns `None` if the thread is to end.
    fn next_request(&self) -> Option<Request> {
        let mut work = self.lock();
        while work.requests.is_empty() && !work.is_over {
            work = self.is_wanted.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
        if work.is_over { None } else { work.requests.pop_front() }
    }

    fn carry_out(&self, request: Request, waker: &ReadWaker) {
        match request {
            Request::Read { token, file, offset, len } => {
                let bytes = file.and_then(|file| read(&file, offset, len as usize));
                self.lock().finished.push_back(FinishedRead { token, bytes });
                waker.wake();
            }
            Request::Prepare { file, offset, len } => {
                files::begin_reading_in(&file, offset, len);
            }
        }
    }
}

fn read(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    headroom::leave(Headroom::Quarter, || bytes.try_reserve_exact(len))
        .map_err(|_| ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

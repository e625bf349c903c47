//! Waits for the disk on a thread, so that the event loop does not: reads bodies, syncs files and frees
//! the space of removed ones.
//!
//! A thread, and not io_uring, which the kernels and the sandboxes of many machines refuse. Reads and
//! syncs are carried out in their order, and space is freed when there is nothing else to do. A record is
//! verified here too, which takes milliseconds if it is large.

use crate::engine::binlog::disk::{FileNumber, SyncError};
use crate::engine::binlog::reads::RecordRead;
use crate::engine::headroom::{self, Headroom};
use crate::engine::time::Nanos;
use crate::os::sys::clock::monotonic;
use crate::os::sys::files;
use mio::Waker;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

/// A thread that waits for the disk. When this value is dropped, the thread ends after the request that it is
/// carrying out, and closes all files. A read is not waited for.
#[derive(Debug)]
pub struct DiskThread {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

/// Wakes the event loop when something was read or synced.
#[derive(Clone, Debug, Default)]
pub struct DiskWaker(Arc<OnceLock<Waker>>);

/// A sync that has ended.
#[derive(Debug)]
pub struct FinishedSync {
    pub result: Result<(), SyncError>,
    pub took: Nanos,
}

/// The state that the event loop and this thread share.
#[derive(Debug, Default)]
struct Shared {
    work: Mutex<Work>,
    /// There is a request or a removed file, or `must_end` is set.
    has_work: Condvar,
    /// A sync has ended.
    has_synced: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    requests: VecDeque<Request>,
    /// Removed files whose space is freed step by step, and their lengths.
    removed: VecDeque<(Arc<File>, u64)>,
    reads: VecDeque<io::Result<Vec<u8>>>,
    /// The thread reads, which may take any time.
    is_reading: bool,
    syncs: VecDeque<FinishedSync>,
    must_end: bool,
}

#[derive(Debug)]
enum Request {
    Read { file: io::Result<Arc<File>>, read: RecordRead },
    ReadAhead { file: Arc<File>, offset: u64, len: u32 },
    Sync { directory: Option<Arc<File>>, files: Vec<(FileNumber, Arc<File>)> },
    Truncate { file: Arc<File>, len: u64 },
}

/// A removed file is truncated by this much at once. It takes a few milliseconds, for which a sync waits.
const TRUNCATE_STEP: u64 = 4 * 1024 * 1024;
/// If there are more removed files whose space is not freed, the caller frees the first one at once.
pub const MAX_REMOVED: usize = 4;
/// With this many requests, nothing is read ahead.
const MAX_QUEUED: usize = 8;

impl DiskWaker {
    /// Sets what wakes the event loop, and wakes it: something may have ended before. Only the first call
    /// has an effect.
    pub fn set(&self, waker: Waker) {
        let _ = self.0.set(waker);
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = self.0.get() {
            // It fails only if the event loop is gone.
            let _ = waker.wake();
        }
    }
}

impl DiskThread {
    /// Starts the thread, with this name.
    pub fn start(name: &str, waker: DiskWaker) -> io::Result<DiskThread> {
        let shared = Arc::new(Shared::default());
        let thread_shared = Arc::clone(&shared);
        let handle = thread::Builder::new().name(name.to_owned()).spawn(move || {
            while let Some(request) = thread_shared.next_request() {
                thread_shared.carry_out(request, &waker);
            }
        })?;
        Ok(DiskThread { shared, handle: Some(handle) })
    }

    /// Queues a read. If `file` is an error, [`DiskThread::finished_read`] returns it.
    pub fn read(&self, file: io::Result<Arc<File>>, read: RecordRead) {
        self.request(Request::Read { file, read });
    }

    /// Asks the kernel to read a part of a file into the page cache, unless the thread has much to do.
    pub fn read_ahead(&self, file: Arc<File>, offset: u64, len: u32) {
        if self.shared.lock().requests.len() < MAX_QUEUED {
            self.request(Request::ReadAhead { file, offset, len });
        }
    }

    /// Begins to sync a directory, and then these files.
    pub fn sync(&self, directory: Option<Arc<File>>, files: Vec<(FileNumber, Arc<File>)>) {
        self.request(Request::Sync { directory, files });
    }

    /// Begins to free the space of a removed file of this length.
    pub fn free(&self, file: File, len: u64) {
        let mut work = self.shared.lock();
        work.removed.push_back((Arc::new(file), len));
        let first = if work.removed.len() > MAX_REMOVED { work.removed.pop_front() } else { None };
        drop(work);
        if let Some((file, _)) = first {
            truncate(&file, 0);
        }
        self.shared.has_work.notify_one();
    }

    /// Frees the space of all removed files now. A step that the thread has already taken may run after
    /// it, and takes no space.
    pub fn free_all(&self) {
        let removed = std::mem::take(&mut self.shared.lock().removed);
        for (file, _) in removed {
            truncate(&file, 0);
        }
    }

    fn request(&self, request: Request) {
        self.shared.lock().requests.push_back(request);
        self.shared.has_work.notify_one();
    }

    /// Returns the record of the oldest read, once.
    pub fn finished_read(&self) -> Option<io::Result<Vec<u8>>> {
        self.shared.lock().reads.pop_front()
    }

    /// Returns a sync that has ended, once. Waits for it if it `must_wait`: one must have begun.
    pub fn finished_sync(&self, must_wait: bool) -> Option<FinishedSync> {
        let mut work = self.shared.lock();
        while must_wait && work.syncs.is_empty() {
            work = self.shared.has_synced.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
        work.syncs.pop_front()
    }
}

impl Drop for DiskThread {
    fn drop(&mut self) {
        let mut work = self.shared.lock();
        work.must_end = true;
        self.shared.has_work.notify_one();
        let is_reading = work.is_reading;
        drop(work);
        if let Some(handle) = self.handle.take().filter(|_| !is_reading) {
            // A panic of the thread has been printed.
            let _ = handle.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to do. Returns `None` if the thread is to end.
    fn next_request(&self) -> Option<Request> {
        let mut work = self.lock();
        loop {
            if work.must_end {
                return None;
            }
            if let Some(request) = work.requests.pop_front().or_else(|| work.next_truncation()) {
                work.is_reading =
                    matches!(request, Request::Read { .. } | Request::ReadAhead { .. });
                return Some(request);
            }
            work = self.has_work.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn carry_out(&self, request: Request, waker: &DiskWaker) {
        match request {
            Request::Read { file, read } => {
                let record = file.and_then(|file| read_record(&file, read));
                self.lock().reads.push_back(record);
                waker.wake();
            }
            Request::ReadAhead { file, offset, len } => {
                files::begin_reading_in(&file, offset, len.into());
            }
            Request::Sync { directory, files } => {
                let begun_at = monotonic();
                let result = sync(directory, &files);
                let took = monotonic().since(begun_at);
                self.lock().syncs.push_back(FinishedSync { result, took });
                self.has_synced.notify_one();
                waker.wake();
            }
            Request::Truncate { file, len } => {
                truncate(&file, len);
                let mut work = self.lock();
                work.removed.pop_front_if(|(first, _)| len == 0 && Arc::ptr_eq(first, &file));
            }
        }
    }
}

impl Work {
    /// Returns the next step of freeing the space of a removed file.
    fn next_truncation(&mut self) -> Option<Request> {
        let (file, len) = self.removed.front_mut()?;
        *len = len.saturating_sub(TRUNCATE_STEP);
        Some(Request::Truncate { file: Arc::clone(file), len: *len })
    }
}

fn sync(
    directory: Option<Arc<File>>,
    written: &[(FileNumber, Arc<File>)],
) -> Result<(), SyncError> {
    // That a file system cannot sync a directory was logged at the start.
    if let Some(Err(error)) = directory.map(|directory| directory.sync_all())
        && !files::is_unsyncable(&error)
    {
        return Err(SyncError { file: None, error });
    }
    written.iter().try_for_each(|(number, file)| {
        file.sync_data().map_err(|error| SyncError { file: Some(*number), error })
    })
}

/// Shortens a removed file. If that fails, closing it frees its space.
fn truncate(file: &File, len: u64) {
    let _ = file.set_len(len);
}

fn read_record(file: &File, read: RecordRead) -> io::Result<Vec<u8>> {
    let len = read.place.len as usize;
    let mut bytes = Vec::new();
    headroom::leave(Headroom::Quarter, || bytes.try_reserve_exact(len))
        .map_err(|_| ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    file.read_exact_at(&mut bytes, read.place.offset.into()).map_err(files::name_loss)?;
    read.verify(&bytes)?;
    Ok(bytes)
}

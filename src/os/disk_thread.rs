//! Waits for the disk on a thread, so that the event loop does not: reads bodies, and syncs files.
//!
//! A thread, and not io_uring, which the kernels and the sandboxes of many machines refuse. Tasks are carried
//! out in their order.

use crate::engine::binlog::disk::FileNumber;
use crate::engine::binlog::error::BinlogError;
use crate::engine::binlog::reads::RecordRead;
use crate::engine::time::Nanos;
use crate::os::sys::clock::monotonic;
use crate::os::sys::files;
use log::warn;
use mio::Waker;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Once};
use std::thread;

/// A thread that waits for the disk. When this value is dropped, the thread ends after its tasks.
pub struct DiskThread<T> {
    tasks: Sender<Task>,
    results: (Sender<T>, Receiver<T>),
    /// Wakes the event loop when something was read or synced.
    waker: Arc<Waker>,
    /// The number of tasks that have not ended.
    waiting: Arc<AtomicUsize>,
}

type Task = Box<dyn FnOnce() + Send>;

/// A sync that has ended.
pub struct FinishedSync {
    pub result: Result<(), BinlogError>,
    pub took: Nanos,
}

/// Files to be synced. Those that cannot be opened are errors of the sync.
pub type Unsynced = Vec<(FileNumber, io::Result<Arc<File>>)>;

/// The directory of the files, open to be synced.
pub struct Home {
    pub path: PathBuf,
    pub file: File,
}

impl<T: Send + 'static> DiskThread<T> {
    /// Starts the thread, with this name.
    pub fn start(name: &str, waker: Arc<Waker>) -> io::Result<DiskThread<T>> {
        let (tasks, to_do) = channel::<Task>();
        let run = move || to_do.into_iter().for_each(|task| task());
        thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(DiskThread { tasks, results: channel(), waker, waiting: Arc::default() })
    }

    /// Queues a task. [`DiskThread::finished`] returns its result.
    pub fn ask(&self, task: impl FnOnce() -> T + Send + 'static) {
        let results = self.results.0.clone();
        self.run(move || drop(results.send(task())));
    }

    /// Queues a task that has no result. After each task the event loop is woken.
    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let (waiting, waker) = (Arc::clone(&self.waiting), Arc::clone(&self.waker));
        let task = move || {
            task();
            waiting.fetch_sub(1, Ordering::Relaxed);
            // It fails only if the event loop is gone.
            let _ = waker.wake();
        };
        // The thread ends only after this value is dropped.
        let _ = self.tasks.send(Box::new(task));
    }

    /// Returns the result of the oldest task, once. Waits for it if it `must_wait`: one must have been asked.
    pub fn finished(&self, must_wait: bool) -> Option<T> {
        let (_, results) = &self.results;
        if must_wait { results.recv().ok() } else { results.try_recv().ok() }
    }

    /// Returns how many tasks have not ended.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// Reads a record and verifies it, which takes milliseconds if it is large.
pub fn read_record(file: &File, read: RecordRead) -> io::Result<Vec<u8>> {
    let mut bytes = read.zeros()?;
    file.read_exact_at(&mut bytes, read.offset.into()).map_err(files::name_loss)?;
    read.verify(bytes)
}

impl FinishedSync {
    /// Syncs the directory, and then the files, and waits for that.
    pub fn of(home: Option<&Home>, files: Unsynced) -> FinishedSync {
        let begun_at = monotonic();
        let names = home.map_or(Ok(()), Home::sync);
        let names = names.map_err(|error| BinlogError::of_sync(None, error));
        let result = names.and_then(|()| {
            files.into_iter().try_for_each(|(number, file)| {
                let done = file.and_then(|file| file.sync_data());
                done.map_err(|error| BinlogError::of_sync(Some(number), error))
            })
        });
        FinishedSync { result, took: monotonic().since(begun_at) }
    }
}

impl Home {
    fn sync(&self) -> io::Result<()> {
        match self.file.sync_all() {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                static WARNED: Once = Once::new();
                WARNED.call_once(|| {
                    warn!(
                        "-b {}: this file system cannot sync a directory: {error}; after a power \
                         cut, files may be missing or removed files may be back",
                        self.path.display()
                    );
                });
                Ok(())
            }
            synced => synced,
        }
    }
}

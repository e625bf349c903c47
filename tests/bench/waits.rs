//! How long a server and its client could have run but had no core: other programs had it
//! or, where there is only one, each other. A stall that comes of other programs is the
//! machine's, not the server's; with one core the two cannot be separated.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// The kernel's accounts of two threads, kept open: they are read often.
pub struct Waits {
    accounts: Vec<File>,
}

impl Waits {
    /// Of this process and the calling thread. Not every kernel keeps such accounts.
    pub fn of(pid: u32) -> Waits {
        let paths = [format!("/proc/{pid}/schedstat"), "/proc/thread-self/schedstat".to_owned()];
        Waits { accounts: paths.iter().filter_map(|path| File::open(path).ok()).collect() }
    }

    /// Altogether, so far.
    pub fn total(&self) -> Duration {
        self.accounts.iter().filter_map(waited).sum()
    }
}

/// The second number: nanoseconds in which the thread could have run but did not.
fn waited(account: &File) -> Option<Duration> {
    let mut buffer = [0; 128];
    let count = account.read_at(&mut buffer, 0).ok()?;
    let text = str::from_utf8(&buffer[..count]).ok()?;
    text.split(' ').nth(1)?.parse().ok().map(Duration::from_nanos)
}

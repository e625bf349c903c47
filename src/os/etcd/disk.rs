//! The files of a binlog, as the engine sees them, in etcd.
//!
//! All files are read at once, before the first client is served. Changes are gathered, and handed over to
//! the thread when it has stored all earlier ones. So while etcd stores one batch the next one grows, and one
//! transaction serves many iterations. Several batches in flight would not help: measured with 4 KiB, one at a
//! time takes 2.1 ms, and each of four takes 5.4 ms.

use super::keys::File;
use super::shared::Shared;
use crate::engine::binlog::disk::{Disk, FileNumber, Progress, RemoteStats};
use crate::engine::time::Nanos;
use crate::os::membership::Standing;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use tokio::sync::mpsc::UnboundedSender;

/// What the event loop wants of the thread.
#[derive(Debug)]
pub enum Request {
    /// All files. For a server that leads they were read before.
    Read(Sender<io::Result<Files>>),
    /// Changes, and the number of the last one.
    Store(Vec<Change>, u64),
    /// An import ends: servers can use the binlog from now on.
    EndImport(Sender<io::Result<()>>),
    /// The lease is given back, and the thread ends.
    End(Sender<()>),
}

pub type Requests = UnboundedSender<Request>;

/// Files with their bytes.
pub type Files = BTreeMap<FileNumber, (File, Arc<Vec<u8>>)>;

/// A change of the files.
#[derive(Debug)]
pub enum Change {
    /// Adds bytes to the end of a file.
    Append { file: FileNumber, offset: u64, bytes: Vec<u8> },
    /// Removes a file.
    Remove { file: FileNumber },
    /// Shortens a file that an earlier leader wrote to this many bytes.
    Truncate { file: FileNumber, size: u64 },
    /// Copies the chunks of a file to other keys, and removes the file.
    SetAside { file: FileNumber },
    /// Ends an import: servers can use the binlog from now on.
    EndImport,
}

/// A binlog in etcd.
#[derive(Debug)]
pub struct EtcdDisk {
    shared: Arc<Shared>,
    requests: Requests,
    /// The files as they were listed.
    files: Files,
    /// The number of the first file that this server has begun.
    begun: FileNumber,
    /// The first bytes of files that are not stored yet: a file is stored with its first record.
    prepared: BTreeMap<FileNumber, Vec<u8>>,
    /// Changes that are not handed over yet.
    changes: Vec<Change>,
    /// The bytes of these changes.
    gathered_bytes: usize,
    /// The number of changes that were made.
    written: u64,
    /// Numbers of changes that are not acknowledged, with the times when they were made.
    made: VecDeque<(Nanos, u64)>,
    /// Output is held back for at most this long.
    patience: Nanos,
    /// The changes that are being stored: the number of the last one, their bytes, and the moment at which
    /// they were handed over.
    handed_over: u64,
    handed_over_bytes: usize,
    handed_over_at: Nanos,
}

/// When this many bytes are gathered, no further commands run: etcd stores some 15 to 60 MB/s.
const CONGESTED_BYTES: usize = 4 * 1024 * 1024;

/// A change that waits for longer than this is a stall.
const STALL: Nanos = Nanos::from_secs(1);
/// The times of changes are noted with this precision.
const NOTE_INTERVAL: Nanos = Nanos::from_millis(100);

impl EtcdDisk {
    pub fn new(shared: Arc<Shared>, requests: Requests, patience: Nanos) -> EtcdDisk {
        EtcdDisk {
            shared,
            requests,
            files: Files::new(),
            begun: FileNumber::MAX,
            prepared: BTreeMap::new(),
            changes: Vec::new(),
            gathered_bytes: 0,
            written: 0,
            made: VecDeque::new(),
            patience,
            handed_over: 0,
            handed_over_bytes: 0,
            handed_over_at: Nanos::ZERO,
        }
    }

    fn bytes(&self, number: FileNumber) -> io::Result<&[u8]> {
        let (_, bytes) = self.files.get(&number).ok_or(io::ErrorKind::NotFound)?;
        Ok(bytes)
    }

    /// Notes when changes were made, to a tenth of a second.
    fn note_changes(&mut self) {
        let (now, acknowledged) = (self.shared.now(), self.shared.state().acknowledged);
        self.made.retain(|(_, change)| *change > acknowledged);
        // Of those that are overdue the last one is enough.
        while self.made.get(1).is_some_and(|(at, _)| now.since(*at) > self.patience) {
            self.made.pop_front();
        }
        if self.written == self.made.back().map_or(acknowledged, |&(_, change)| change) {
            return;
        }
        match self.made.back_mut() {
            Some((at, change)) if now.since(*at) < NOTE_INTERVAL => *change = self.written,
            Some(_) | None => self.made.push_back((now, self.written)),
        }
    }

    fn is_storing(&self) -> bool {
        self.shared.state().acknowledged < self.handed_over
    }

    fn push(&mut self, change: Change) {
        self.changes.push(change);
        self.written += 1;
    }
}

/// Waits for the answer to a request.
pub fn ask<T>(
    requests: &Requests,
    request: impl FnOnce(Sender<io::Result<T>>) -> Request,
) -> io::Result<T> {
    let (to, answer) = channel();
    let gone = || io::Error::other("the thread for etcd has ended");
    requests.send(request(to)).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

impl Disk for EtcdDisk {
    fn list(&mut self) -> io::Result<Vec<FileNumber>> {
        self.files = ask(&self.requests, Request::Read)?;
        Ok(self.files.keys().copied().collect())
    }

    fn size(&mut self, number: FileNumber) -> io::Result<u64> {
        Ok(self.bytes(number)?.len() as u64)
    }

    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let file = self.bytes(number)?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let rest = file.get(start..).unwrap_or_default();
        let len = rest.len().min(bytes.len());
        bytes[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn create(&mut self, number: FileNumber, _size: u64) -> io::Result<()> {
        self.begun = self.begun.min(number);
        Ok(())
    }

    fn extend(&mut self, _number: FileNumber, _size: u64) -> io::Result<()> {
        Ok(())
    }

    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if offset == 0 {
            // The version, which is the same in all files.
            self.prepared.insert(number, bytes.to_vec());
            return Ok(());
        }
        self.gathered_bytes += bytes.len();
        if let Some(Change::Append { file, offset: start, bytes: gathered }) =
            self.changes.last_mut()
            && *file == number
        {
            assert_eq!(*start + gathered.len() as u64, offset, "a gap in binlog.{number}");
            gathered.extend_from_slice(bytes);
            self.written += 1;
            return Ok(());
        }
        let mut stored = self.prepared.remove(&number).unwrap_or_default();
        let start = if stored.is_empty() { offset } else { 0 };
        stored.extend_from_slice(bytes);
        self.push(Change::Append { file: number, offset: start, bytes: stored });
        Ok(())
    }

    fn truncate(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        // Space that was only allocated is not stored.
        if number < self.begun {
            self.push(Change::Truncate { file: number, size });
        }
        Ok(())
    }

    fn close(&mut self, number: FileNumber) {
        // A server reads each file once.
        if self.shared.standing() == Ok(Standing::Leader) {
            self.files.remove(&number);
        }
    }

    fn remove(&mut self, number: FileNumber) -> io::Result<()> {
        if self.prepared.remove(&number).is_none() {
            self.push(Change::Remove { file: number });
        }
        Ok(())
    }

    fn quarantine(&mut self, number: FileNumber) -> io::Result<String> {
        self.push(Change::SetAside { file: number });
        Ok(format!("damaged/{number:08x}"))
    }

    fn hand_over(&mut self) {
        self.note_changes();
        if self.changes.is_empty() || self.is_storing() {
            return;
        }
        self.handed_over = self.written;
        self.handed_over_bytes = std::mem::take(&mut self.gathered_bytes);
        self.handed_over_at = self.shared.now();
        let changes = std::mem::take(&mut self.changes);
        // Without the thread the lease is not renewed, and the loop ends.
        let _ = self.requests.send(Request::Store(changes, self.written));
    }

    fn progress(&self) -> Option<Progress> {
        let mut progress = Progress {
            written: self.written,
            acknowledged: self.shared.state().acknowledged,
            is_congested: self.gathered_bytes >= CONGESTED_BYTES,
            ..Progress::default()
        };
        let mut waiting = self.made.iter().filter(|(_, change)| *change > progress.acknowledged);
        if let Some(&(oldest_at, _)) = waiting.clone().next() {
            let now = self.shared.now();
            progress.is_stalled = now.since(oldest_at) > STALL;
            let overdue = waiting.rfind(|(at, _)| now.since(*at) > self.patience);
            progress.overdue = overdue.map_or(0, |&(_, change)| change);
        }
        Some(progress)
    }

    fn refuses_puts(&self) -> bool {
        let state = self.shared.state();
        state.is_full || state.is_nearly_full
    }

    fn remote_stats(&self) -> Option<RemoteStats> {
        let (is_storing, now) = (self.is_storing(), self.shared.now());
        let in_flight = if is_storing { self.handed_over_bytes } else { 0 };
        let since = now.since(self.handed_over_at);
        let lease_left = self.shared.lease_left();
        let state = self.shared.state();
        Some(RemoteStats {
            lease_left,
            transactions: state.transactions.clone(),
            stored_bytes: state.stored_bytes,
            waiting_bytes: (self.gathered_bytes + in_flight) as u64,
            waiting_for: if is_storing { since } else { Nanos::ZERO },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    fn disk() -> (EtcdDisk, Arc<Shared>, UnboundedReceiver<Request>) {
        let (requests, received) = unbounded_channel();
        let shared = Arc::new(Shared::new(|| Nanos::ZERO));
        (EtcdDisk::new(Arc::clone(&shared), requests, Nanos::from_secs(5)), shared, received)
    }

    /// Returns the changes that were handed over, as text, and the number of the last one.
    fn handed_over(received: &mut UnboundedReceiver<Request>) -> Option<(String, u64)> {
        let Request::Store(changes, last) = received.try_recv().ok()? else {
            panic!("the disk has read");
        };
        let text = changes.iter().map(|change| match change {
            Change::Append { file, offset, bytes } => {
                format!("{file}:{offset}={}", bytes.escape_ascii())
            }
            Change::Remove { file } => format!("remove {file}"),
            Change::Truncate { file, size } => format!("cut {file} at {size}"),
            Change::SetAside { file } => format!("set {file} aside"),
            Change::EndImport => "end".to_owned(),
        });
        Some((text.collect::<Vec<_>>().join(", "), last))
    }

    #[test]
    fn changes_grow_in_their_order_while_earlier_ones_are_stored() {
        let (mut disk, shared, mut received) = disk();
        disk.create(1, 4096).unwrap();
        disk.write(1, 0, b"v7").unwrap();
        disk.hand_over();
        assert_eq!(handed_over(&mut received), None, "a file is stored with its first record");
        disk.write(1, 2, b"ab").unwrap();
        disk.write(1, 4, b"c").unwrap();
        disk.hand_over();
        assert_eq!(handed_over(&mut received), Some(("1:0=v7abc".to_owned(), 2)));
        disk.write(1, 5, b"d").unwrap();
        disk.create(2, 4096).unwrap();
        disk.write(2, 0, b"v7").unwrap();
        disk.write(2, 2, b"e").unwrap();
        disk.remove(1).unwrap();
        disk.hand_over();
        assert_eq!(handed_over(&mut received), None, "earlier changes are being stored");
        assert_eq!(disk.progress().map(Progress::is_complete), Some(false));
        shared.acknowledge(2);
        disk.hand_over();
        assert_eq!(handed_over(&mut received), Some(("1:5=d, 2:0=v7e, remove 1".to_owned(), 5)));
        shared.acknowledge(5);
        assert_eq!(disk.progress().map(Progress::is_complete), Some(true));
    }

    #[test]
    fn only_what_is_stored_is_cut_or_removed() {
        let (mut disk, _, mut received) = disk();
        disk.create(1, 4096).unwrap();
        disk.write(1, 0, b"v7").unwrap();
        disk.write(1, 2, b"abc").unwrap();
        disk.truncate(1, 5).unwrap();
        disk.create(2, 4096).unwrap();
        disk.write(2, 0, b"v7").unwrap();
        disk.remove(2).unwrap();
        disk.hand_over();
        assert_eq!(handed_over(&mut received), Some(("1:0=v7abc".to_owned(), 1)));
        let (mut disk, _, mut received) = self::disk();
        disk.truncate(1, 4).unwrap();
        disk.write(1, 4, b"x").unwrap();
        disk.quarantine(1).unwrap();
        disk.hand_over();
        let expected = "cut 1 at 4, 1:4=x, set 1 aside".to_owned();
        assert_eq!(handed_over(&mut received), Some((expected, 3)));
    }

    #[test]
    fn many_gathered_bytes_are_a_congestion() {
        let (mut disk, shared, mut received) = disk();
        let is_congested = |disk: &EtcdDisk| disk.progress().unwrap().is_congested;
        disk.create(1, 1 << 30).unwrap();
        disk.write(1, 0, b"v7").unwrap();
        disk.write(1, 2, &vec![b'x'; CONGESTED_BYTES - 1]).unwrap();
        assert!(!is_congested(&disk));
        disk.write(1, 2 + CONGESTED_BYTES as u64 - 1, b"x").unwrap();
        assert!(is_congested(&disk));
        assert_eq!(disk.remote_stats().unwrap().waiting_bytes, CONGESTED_BYTES as u64);
        disk.hand_over();
        assert!(!is_congested(&disk));
        assert_eq!(disk.remote_stats().unwrap().waiting_bytes, CONGESTED_BYTES as u64);
        assert!(received.try_recv().is_ok());
        shared.acknowledge(2);
        assert_eq!(disk.remote_stats().unwrap().waiting_bytes, 0);
    }
}

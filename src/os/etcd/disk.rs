//! The files of a binlog, as the engine sees them, in etcd.
//!
//! All files are read at once, before the first client is served. Changes are gathered, and a sync hands them
//! over to the thread when it has stored all earlier ones. So while etcd stores one batch the next one grows, and
//! one transaction serves many iterations. Several batches in flight would not help: measured with 4 KiB, one at a
//! time takes 2.1 ms, and each of four takes 5.4 ms.

use super::keys::{CHUNK_MAX, File};
use super::shared::Shared;
use crate::engine::binlog::disk::{Disk, FileNumber, RemoteStats};
use crate::engine::binlog::error::BinlogError;
use crate::engine::headroom::{self, Headroom};
use crate::os::membership::Standing;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use tokio::sync::mpsc::UnboundedSender;

/// What the event loop wants of the thread.
pub enum Request {
    /// All files. For a server that leads they were read before.
    Read(Sender<io::Result<Files>>),
    /// Changes.
    Store(Vec<Change>),
    /// An import ends: servers can use the binlog from now on.
    EndImport(Sender<io::Result<()>>),
}

pub type Requests = UnboundedSender<Request>;

/// Files with their bytes.
pub type Files = BTreeMap<FileNumber, (File, Vec<u8>)>;

/// A change of the files.
pub enum Change {
    /// Adds bytes to the end of a file.
    Append { file: FileNumber, offset: u64, bytes: Vec<u8> },
    /// Removes a file.
    Remove { file: FileNumber },
    /// Shortens a file that an earlier leader wrote to this many bytes.
    Truncate { file: FileNumber, size: u64 },
    /// Copies the chunks of a file to other keys, and removes the file.
    SetAside { file: FileNumber },
    /// Replaces the format. While a binlog is imported it is another one.
    Format { value: String },
}

/// About what etcd stores with each chunk: its key, revisions, and space that is left in pages.
const CHUNK_OVERHEAD: u64 = 256;
/// The memory that a change has at first.
const BLOCK: usize = 16 * 1024;

impl Change {
    /// Returns how many bytes its chunks take in etcd, if it is stored at once.
    pub fn len(&self) -> u64 {
        if let Change::Append { bytes, .. } = self {
            bytes.len() as u64 + CHUNK_OVERHEAD
        } else {
            0
        }
    }
}

/// A binlog in etcd.
pub struct EtcdDisk {
    shared: Arc<Shared>,
    requests: Requests,
    /// The files as they were listed.
    files: Files,
    /// The number of the first file that this server has begun.
    begun: FileNumber,
    /// The first bytes of files that are not stored yet: a file is stored with what is written next, its first
    /// record, or nothing in a copy of a file without records.
    prepared: BTreeMap<FileNumber, Vec<u8>>,
    /// Changes that are not handed over yet.
    changes: Vec<Change>,
    /// How many times changes were handed over.
    batches: u64,
}

impl EtcdDisk {
    pub fn new(shared: Arc<Shared>, requests: Requests) -> EtcdDisk {
        EtcdDisk {
            shared,
            requests,
            files: Files::new(),
            begun: FileNumber::MAX,
            prepared: BTreeMap::new(),
            changes: Vec::new(),
            batches: 0,
        }
    }

    fn bytes(&self, number: FileNumber) -> io::Result<&[u8]> {
        let (_, bytes) = self.files.get(&number).ok_or(io::ErrorKind::NotFound)?;
        Ok(bytes)
    }

    /// Adds bytes to the end of a file: to the last change while that has room, or there is memory for more, and to
    /// further ones. Those need only small blocks, which the headroom has.
    fn gather(&mut self, number: FileNumber, mut offset: u64, bytes: &[u8]) {
        for bytes in bytes.chunks(BLOCK) {
            let mut len = bytes.len() as u64;
            if let Some(Change::Append { file, offset: start, bytes: gathered }) =
                self.changes.last_mut()
                && *file == number
                && gathered.len() + bytes.len() <= CHUNK_MAX
                && headroom::keeping(Headroom::Whole, || gathered.try_reserve(bytes.len())).is_ok()
            {
                let end = *start + gathered.len() as u64;
                assert_eq!(end, offset, "a gap in binlog.{number}");
                gathered.extend_from_slice(bytes);
            } else {
                let mut block = Vec::with_capacity(BLOCK);
                block.extend_from_slice(bytes);
                self.changes.push(Change::Append { file: number, offset, bytes: block });
                len += CHUNK_OVERHEAD;
            }
            self.shared.state().written_len += len;
            offset += bytes.len() as u64;
        }
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
        if let Some(first) = self.prepared.remove(&number) {
            self.gather(number, 0, &first);
        }
        self.gather(number, offset, bytes);
        Ok(())
    }

    fn truncate(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        // Space that was only allocated is not stored.
        if number < self.begun {
            self.changes.push(Change::Truncate { file: number, size });
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
            self.changes.push(Change::Remove { file: number });
        }
        Ok(())
    }

    fn quarantine(&mut self, number: FileNumber) -> io::Result<String> {
        self.changes.push(Change::SetAside { file: number });
        Ok(format!("damaged/{number:08x}"))
    }

    fn begin_sync(&mut self, _files: &[FileNumber], _with_names: bool, _in_background: bool) {
        if self.changes.is_empty() {
            return;
        }
        self.batches += 1;
        let changes = std::mem::take(&mut self.changes);
        // Without the thread the lease is not renewed, and the loop ends.
        let _ = self.requests.send(Request::Store(changes));
    }

    fn finished_sync(&mut self, _must_wait: bool) -> Option<Result<(), BinlogError>> {
        (self.shared.state().stored_batches == self.batches).then_some(Ok(()))
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn note_deletes(&mut self, len: u64) {
        self.shared.state().owed_len = len;
    }

    fn refuses_puts(&self) -> bool {
        self.shared.state().refuses_puts()
    }

    fn refuses_moves(&self) -> bool {
        self.shared.state().refuses_moves()
    }

    fn stored_bytes(&self) -> u64 {
        self.shared.state().stored_bytes
    }

    fn remote_stats(&self) -> Option<RemoteStats> {
        let lease_left = self.shared.lease_left();
        let transactions = self.shared.state().transactions.clone();
        Some(RemoteStats { lease_left, transactions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::time::Nanos;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    fn disk() -> (EtcdDisk, Arc<Shared>, UnboundedReceiver<Request>) {
        let (requests, received) = unbounded_channel();
        let shared = Arc::new(Shared::new(|| Nanos::ZERO, 0));
        (EtcdDisk::new(Arc::clone(&shared), requests), shared, received)
    }

    /// Begins a sync. Returns the changes that are handed over, as text.
    fn sync(disk: &mut EtcdDisk, received: &mut UnboundedReceiver<Request>) -> Option<String> {
        disk.begin_sync(&[], false, true);
        let Request::Store(changes) = received.try_recv().ok()? else {
            panic!("the disk has read");
        };
        let text = changes.iter().map(|change| match change {
            Change::Append { file, offset, bytes } => {
                format!("{file}:{offset}={}", bytes.escape_ascii())
            }
            Change::Remove { file } => format!("remove {file}"),
            Change::Truncate { file, size } => format!("cut {file} at {size}"),
            Change::SetAside { file } => format!("set {file} aside"),
            Change::Format { value } => format!("format {value}"),
        });
        Some(text.collect::<Vec<_>>().join(", "))
    }

    #[test]
    fn changes_grow_in_their_order_while_earlier_ones_are_stored() {
        let (mut disk, shared, mut received) = disk();
        disk.create(1, 4096).unwrap();
        disk.write(1, 0, b"v7").unwrap();
        let stored = sync(&mut disk, &mut received);
        assert_eq!(stored, None, "a file is stored with its first record");
        assert!(disk.finished_sync(false).is_some());
        disk.write(1, 2, b"ab").unwrap();
        disk.write(1, 4, b"c").unwrap();
        assert_eq!(sync(&mut disk, &mut received).unwrap(), "1:0=v7abc");
        disk.write(1, 5, b"d").unwrap();
        disk.create(2, 4096).unwrap();
        disk.write(2, 0, b"v7").unwrap();
        disk.write(2, 2, b"e").unwrap();
        disk.remove(1).unwrap();
        assert!(disk.finished_sync(false).is_none(), "earlier changes are being stored");
        shared.note_stored(0);
        assert!(disk.finished_sync(false).is_some());
        assert_eq!(sync(&mut disk, &mut received).unwrap(), "1:5=d, 2:0=v7e, remove 1");
        shared.note_stored(0);
        assert!(disk.finished_sync(false).is_some());
        disk.create(3, 4096).unwrap();
        disk.write(3, 0, b"v7").unwrap();
        disk.write(3, 2, b"").unwrap();
        assert_eq!(sync(&mut disk, &mut received).unwrap(), "3:0=v7");
    }

    #[test]
    fn changes_are_short_while_there_is_no_memory_for_more() {
        let (mut disk, shared, mut received) = disk();
        let records: Vec<u8> = (0..=250).cycle().take(300_000).collect();
        disk.create(1, 1 << 20).unwrap();
        disk.write(1, 0, &records[..2]).unwrap();
        headroom::refuse_after(0);
        for number in 0..5 {
            let rest = &records[2 + number * 50_000..][..50_000];
            disk.write(1, 2 + number as u64 * 50_000, rest).unwrap();
        }
        headroom::refuse_after(usize::MAX);
        disk.write(1, 250_002, &records[250_002..]).unwrap();
        disk.begin_sync(&[], false, true);
        let Ok(Request::Store(changes)) = received.try_recv() else { panic!("nothing is stored") };
        let len = changes.iter().map(Change::len).sum::<u64>();
        assert_eq!(shared.state().written_len, len);
        let mut stored = Vec::new();
        let last = changes.len() - 1;
        for (index, change) in changes.into_iter().enumerate() {
            let Change::Append { file: 1, offset, bytes } = change else { panic!("another file") };
            assert_eq!(offset, stored.len() as u64);
            assert!(bytes.capacity() <= BLOCK || index == last, "{} bytes", bytes.capacity());
            stored.extend(bytes);
        }
        assert_eq!(stored, records);
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
        assert_eq!(sync(&mut disk, &mut received).unwrap(), "1:0=v7abc");
        let (mut disk, _, mut received) = self::disk();
        disk.truncate(1, 4).unwrap();
        disk.write(1, 4, b"x").unwrap();
        disk.quarantine(1).unwrap();
        assert_eq!(sync(&mut disk, &mut received).unwrap(), "cut 1 at 4, 1:4=x, set 1 aside");
    }
}

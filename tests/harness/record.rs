//! Records of the binlog as bytes, written from the description of the format and not with the
//! server's code: an error that its writer and its reader share would not be seen.
//!
//! The description is that of `engine/binlog/record.rs`, and of C beanstalkd.

/// The version at the head of a file.
pub const VERSION_7: [u8; 4] = 7_i32.to_ne_bytes();
pub const VERSION_5: [u8; 4] = 5_i32.to_ne_bytes();

/// The states of C beanstalkd.
pub const DELETED: u8 = 0;
pub const READY: u8 = 1;
pub const RESERVED: u8 = 2;
pub const BURIED: u8 = 3;
pub const DELAYED: u8 = 4;

/// A worker has reserved the buried job.
pub const HELD: u8 = 1;
/// The delete is that of a flush of the buried jobs.
pub const FLUSHED_BURIED: u8 = 3;

/// The ids of records that are of no job: the head of a file, flushes, and keys.
pub const FILE_HEADER: u64 = u64::MAX;
pub const FLUSH_ALL: u64 = u64::MAX - 1;
pub const FLUSH_BURIED: u64 = u64::MAX - 2;
pub const KEY: u64 = u64::MAX - 3;

/// The bytes of the version and the file header record.
pub const FILE_HEAD_LEN: usize = 4 + 84;

/// What a record has. A short record has no tube.
#[derive(Clone, Copy, Debug, Default)]
pub struct Record<'r> {
    pub id: u64,
    pub tube: &'r str,
    pub state: u8,
    /// With CR LF. A short record and that of a delete have none.
    pub body: &'r [u8],
    /// `None`: that of the body. A short record has the one of its job.
    pub body_len: Option<u32>,
    /// In a file header the nonce of the file before.
    pub pri: u32,
    /// In version 5 times are cut to microseconds. In a file header the used bytes of the file before.
    pub delay_ns: u64,
    pub ttr_ns: u64,
    /// In a file header the number of the file.
    pub created_at_ns: u64,
    /// When it is due or was buried; in a file header the last id.
    pub moment_ns: u64,
    /// reserves, timeouts, releases, buries, kicks
    pub counts: [u32; 5],
    /// Only in version 7.
    pub mark: u8,
}

impl Record<'_> {
    /// Returns the record of version 7, with a checksum if the file has a nonce.
    pub fn v7(&self, nonce: Option<u32>) -> Vec<u8> {
        let name_len = u32::try_from(self.tube.len()).expect("names are short").to_ne_bytes();
        let mut bytes = self.bytes(&name_len, 1, nonce.unwrap_or(0));
        bytes.extend([self.mark, 0, 0]);
        bytes.extend(self.body);
        if nonce.is_some() {
            let checksum = crc32fast::hash(&bytes).to_ne_bytes();
            let at = 4 + self.tube.len() + 12;
            bytes[at..at + 4].copy_from_slice(&checksum);
        }
        bytes
    }

    /// Returns the record of version 5.
    pub fn v5(&self) -> Vec<u8> {
        let name_len = (self.tube.len() as u64).to_ne_bytes();
        [&self.bytes(&name_len, 1_000, 0xaaaa_aaaa), self.body].concat()
    }

    /// Returns the fields up to the state. `unused` is in the second gap that a C compiler leaves.
    fn bytes(&self, name_len: &[u8], nanos_per_unit: u64, unused: u32) -> Vec<u8> {
        let time = |nanos: u64| (nanos / nanos_per_unit).to_ne_bytes();
        let len = || u32::try_from(self.body.len()).expect("bodies are short");
        let body_len = self.body_len.unwrap_or_else(len);
        let mut bytes = [name_len, self.tube.as_bytes(), &self.id.to_ne_bytes()].concat();
        bytes.extend(self.pri.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend([time(self.delay_ns), time(self.ttr_ns)].concat());
        bytes.extend([body_len.to_ne_bytes(), unused.to_ne_bytes()].concat());
        bytes.extend([time(self.created_at_ns), time(self.moment_ns)].concat());
        bytes.extend(self.counts.map(u32::to_ne_bytes).concat());
        bytes.push(self.state);
        bytes
    }
}

/// Returns the head of a file with checksums. `before` has the used bytes and the nonce of the file before.
pub fn file_head(number: u64, last_id: u64, before: (u64, u32), nonce: u32) -> Vec<u8> {
    let ((delay_ns, pri), created_at_ns, moment_ns) = (before, number, last_id);
    let id = FILE_HEADER;
    let header = Record { id, pri, delay_ns, created_at_ns, moment_ns, ..Record::default() };
    [&VERSION_7[..], &header.v7(Some(nonce))].concat()
}

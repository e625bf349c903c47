//! The record of the key of a unique job.
//!
//! C beanstalkd skips it: it is a short record with an id that no job has. The bytes behind its id are:
//!
//! | offset | field | type |
//! |---|---|---|
//! | 8 | for how many seconds the key is kept after the delete of the job | u32 |
//! | 12 | the checksum | u32 |
//! | 16 | the secret with which the digest was made | 2 x u64 |
//! | 36 | the nonce of the file | u32 |
//! | 40 | id of the job | u64 |
//! | 48 | until when the key of a deleted job is kept, since 1970; 0 while there is the job | i64 |
//! | 56 | digest of the tube and the key | 4 x u32 |
//!
//! The key of a job has its record directly before each full record of the job, in the same file. So a
//! torn write loses both, or leaves a key that no job follows, which is ignored. When a job is deleted
//! whose key is kept, a record of the kept key is directly before the record of the delete. Without that
//! delete it is ignored too. Compaction writes the record of a kept key alone.
//!
//! All records of a binlog have one secret: each start reads it from them.

use super::record::{
    self, COUNTS_AT, CREATED_AT, DELAY_AT, FieldBytes, ID_AT, KEY_ID, MOMENT_AT, NONCE_AT, PRI_AT,
    array,
};
use crate::engine::digest::{Digest, Secret};
use crate::engine::time::Nanos;

/// The fields of the record of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// The id of the job that has or had the key.
    pub id: u64,
    pub digest: Digest,
    pub secret: Secret,
    /// For how many seconds the key is kept after the delete of the job.
    pub ttl_secs: u32,
    /// Since 1970. The job is deleted, and its key is kept until then. `None` while there is the job.
    pub kept_until: Option<Nanos>,
}

const SECRET_AT: [usize; 2] = [DELAY_AT, DELAY_AT + 8];

impl KeyRecord {
    /// Appends the record to `out`.
    pub fn write(&self, out: &mut Vec<u8>, nonce: u32) {
        let mut fields: FieldBytes = [0; _];
        let mut put = |at: usize, field: &[u8]| fields[at..at + field.len()].copy_from_slice(field);
        put(ID_AT, &KEY_ID.to_ne_bytes());
        put(PRI_AT, &self.ttl_secs.to_ne_bytes());
        for (at, half) in SECRET_AT.into_iter().zip(self.secret.0) {
            put(at, &half.to_ne_bytes());
        }
        put(NONCE_AT, &nonce.to_ne_bytes());
        put(CREATED_AT, &self.id.to_ne_bytes());
        let kept_until = self.kept_until.map_or(0, |at| at.as_nanos().max(1));
        put(MOMENT_AT, &kept_until.to_ne_bytes());
        for (index, word) in self.digest.0.into_iter().enumerate() {
            put(COUNTS_AT + 4 * index, &word.to_ne_bytes());
        }
        record::write_bytes(out, &fields, "", &[]);
    }

    /// Reads the fields of a record with [`KEY_ID`]. Returns `None` if no job can have its id.
    pub fn read(fields: &[u8]) -> Option<KeyRecord> {
        let id = u64::from_ne_bytes(array(fields, CREATED_AT));
        let kept_until = u64::from_ne_bytes(array(fields, MOMENT_AT));
        (id > 0).then(|| KeyRecord {
            id,
            digest: Digest(std::array::from_fn(|index| {
                u32::from_ne_bytes(array(fields, COUNTS_AT + 4 * index))
            })),
            secret: Secret(SECRET_AT.map(|at| u64::from_ne_bytes(array(fields, at)))),
            ttl_secs: u32::from_ne_bytes(array(fields, PRI_AT)),
            kept_until: (kept_until > 0).then_some(Nanos::from_nanos(kept_until)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::binlog::record::{Content, Head, Layout, SHORT_LEN};

    #[test]
    fn a_written_key_is_read_back_and_is_a_delete_of_no_job() {
        for kept_until in [None, Some(Nanos::from_secs(77))] {
            let key = KeyRecord {
                id: 0x0102_0304_0506_0708,
                digest: Digest([1, 2, 3, u32::MAX]),
                secret: Secret([u64::MAX, 0x1112_1314_1516_1718]),
                ttl_secs: u32::MAX,
                kept_until,
            };
            let mut bytes = Vec::new();
            key.write(&mut bytes, 9);
            assert_eq!(bytes.len(), SHORT_LEN);
            let (content, len) = (Content::Key(key), SHORT_LEN);
            let head = Head { id: KEY_ID, content, tube_len: 0, len, body_len: 0, nonce: 9 };
            assert_eq!(Layout::V7_WITH_CRC.read(&bytes), Ok(head));
            assert_eq!(Layout::V7_WITH_CRC.verify(&bytes, len), Ok(()));
        }
    }
}

//! The first record of a file. It shows whether the file has checksums.

use super::{CHECKSUM_AT, Content, FileEnd, FileNumber, NAME_LENGTH_LEN, Raw, SHORT_LEN, write};
use crate::engine::collections::chains::low_half;

/// A file header record with at most this many flipped bits is recognized as damaged. With more, the
/// file is taken for one without checksums.
const MAX_FLIPPED_BITS: u32 = 16;

/// The first record of a file. It shows whether the file has checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileHeader {
    /// It is no file header record: the file has no checksums.
    None,
    /// It is zeros: it was not written before a power cut. C beanstalkd leaves no such gap.
    Blank,
    /// The file has checksums, and was created with this number. The last id was given out before; the nonce is
    /// that of all records.
    Intact { number: FileNumber, last_id: u64, before: FileEnd, nonce: u32 },
    /// The file has checksums, but this record is damaged.
    Damaged,
}

impl FileHeader {
    /// Reads the first record of a file from the start of `bytes`.
    pub fn read(bytes: &[u8]) -> FileHeader {
        let Some(bytes) = bytes.first_chunk::<SHORT_LEN>() else { return FileHeader::None };
        if bytes.iter().all(|&byte| byte == 0) {
            return FileHeader::Blank;
        }
        let Raw { created, moment: last_id, delay, pri, nonce, .. } =
            Raw::of_bytes(&bytes[NAME_LENGTH_LEN..]);
        let (number, before) = (low_half(created), (delay, pri));
        let mut expected = Vec::with_capacity(SHORT_LEN);
        write(&mut expected, &Content::FileHeader(number, last_id, before), "", &[], 0, nonce);
        if expected == bytes {
            return FileHeader::Intact { number, last_id, before, nonce };
        }
        // A damaged id or nonce changes the expected checksum, so the checksum is not compared.
        let checksum_at = NAME_LENGTH_LEN + CHECKSUM_AT;
        let is_checksum = |at: usize| (checksum_at..checksum_at + 4).contains(&at);
        let pairs = expected.iter().zip(bytes).enumerate().filter(|(at, _)| !is_checksum(*at));
        let flipped_bits: u32 = pairs.map(|(_, (one, other))| (one ^ other).count_ones()).sum();
        if flipped_bits <= MAX_FLIPPED_BITS { FileHeader::Damaged } else { FileHeader::None }
    }
}

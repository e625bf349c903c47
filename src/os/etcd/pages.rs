//! What was read of the files of a log and is not wanted yet: by a server that stands by, or one page
//! ahead of the replay. It knows nothing of requests.
//!
//! The key of a file is changed with every change of the file that does not append (see
//! [`super::log`]). So as long as the revision of that key is the same, what was read stays right, and
//! only what was appended since is missing.

use super::keys::ChunkNumber;
use crate::engine::binlog::disk::FileNumber;
use std::collections::{BTreeMap, VecDeque};

/// The key of a file, as it was listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedFile {
    /// The file's first chunk.
    pub first: ChunkNumber,
    /// The revision of the last change of the key.
    pub revision: i64,
}

/// Some bytes of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Page {
    /// The offset of the first byte.
    pub at: u64,
    pub bytes: Vec<u8>,
}

impl Page {
    /// Returns the offset behind the last byte.
    pub fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64
    }
}

/// The pages of all files.
#[derive(Debug, Default)]
pub struct Pages {
    files: BTreeMap<FileNumber, FilePages>,
}

/// The pages of a file.
#[derive(Debug)]
struct FilePages {
    listed: ListedFile,
    /// The offset and the chunk that are read next.
    next: (u64, ChunkNumber),
    /// Pages in their order, without gaps. Those before them were taken.
    pages: VecDeque<Page>,
}

impl Pages {
    /// Drops what was read of files that are not there any more, or were changed.
    pub fn keep(&mut self, listed: &BTreeMap<FileNumber, ListedFile>) {
        self.files.retain(|number, file| listed.get(number) == Some(&file.listed));
    }

    /// Takes the page with this offset. Pages before it are dropped.
    pub fn take(&mut self, number: FileNumber, offset: u64) -> Option<Page> {
        let file = self.files.get_mut(&number)?;
        while file.pages.front()?.end() <= offset {
            file.pages.pop_front();
        }
        if file.pages.front()?.at > offset {
            return None;
        }
        file.pages.pop_front()
    }

    /// Returns the offset and the chunk of a file that are read next, so that [`Pages::take`] finds
    /// `offset` later.
    pub fn next(
        &mut self,
        number: FileNumber,
        listed: ListedFile,
        offset: u64,
    ) -> (u64, ChunkNumber) {
        let next_read = self.next_unread(number, listed);
        let file = self.files.get(&number);
        let first_kept = file.and_then(|file| file.pages.front()).map(|page| page.at);
        if first_kept.unwrap_or(next_read.0) <= offset {
            return next_read;
        }
        // Its page was taken before: the file is read again.
        self.files.remove(&number);
        (0, listed.first)
    }

    /// Returns the offset and the chunk of a file that were not read yet.
    pub fn next_unread(&self, number: FileNumber, listed: ListedFile) -> (u64, ChunkNumber) {
        self.files.get(&number).map_or((0, listed.first), |file| file.next)
    }

    /// Adds a page, which has this many chunks and was read at the place of [`Pages::next`].
    pub fn push(&mut self, number: FileNumber, listed: ListedFile, page: Page, chunks: u64) {
        let file = self.files.entry(number).or_insert_with(|| FilePages {
            listed,
            next: (0, listed.first),
            pages: VecDeque::new(),
        });
        assert_eq!(page.at, file.next.0, "a gap between two pages of binlog.{number}");
        file.next = (page.end(), file.next.1 + chunks);
        file.pages.push_back(page);
    }

    /// Returns whether a page is there that was not taken.
    pub fn has_untaken(&self) -> bool {
        self.files.values().any(|file| !file.pages.is_empty())
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.files.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: ListedFile = ListedFile { first: 5, revision: 70 };

    fn page(at: u64, bytes: &[u8]) -> Page {
        Page { at, bytes: bytes.to_vec() }
    }

    fn pages() -> Pages {
        let mut pages = Pages::default();
        assert_eq!(pages.next(1, FIRST, 3), (0, 5));
        pages.push(1, FIRST, page(0, b"abcd"), 2);
        assert_eq!(pages.next(1, FIRST, 5), (4, 7));
        pages.push(1, FIRST, page(4, b"ef"), 1);
        pages
    }

    #[test]
    fn pages_are_taken_in_their_order_and_those_before_dropped() {
        let mut pages = pages();
        assert_eq!(pages.take(1, 1), Some(page(0, b"abcd")));
        assert_eq!(pages.take(1, 5), Some(page(4, b"ef")));
        assert!(!pages.has_untaken());
        assert_eq!(pages.next(1, FIRST, 6), (6, 8), "the next page follows");
        let mut pages = self::pages();
        assert_eq!(pages.take(1, 4), Some(page(4, b"ef")));
        assert_eq!(pages.take(2, 0), None);
    }

    #[test]
    fn a_file_is_read_again_for_a_page_that_was_taken() {
        let mut pages = pages();
        assert_eq!(pages.take(1, 0), Some(page(0, b"abcd")));
        assert_eq!(pages.take(1, 3), None);
        assert_eq!(pages.next(1, FIRST, 3), (0, 5));
        pages.push(1, FIRST, page(0, b"abcd"), 2);
        assert_eq!(pages.take(1, 3), Some(page(0, b"abcd")));
    }

    #[test]
    fn a_file_that_was_changed_is_read_again() {
        let mut pages = pages();
        let second = ListedFile { first: 8, revision: 71 };
        pages.push(2, second, page(0, b"gh"), 1);
        pages.keep(&BTreeMap::from([(1, FIRST), (2, second)]));
        assert_eq!(pages.next_unread(1, FIRST), (6, 8), "it may have grown");
        let cut = ListedFile { revision: 72, ..second };
        pages.keep(&BTreeMap::from([(1, FIRST), (2, cut)]));
        assert_eq!(pages.next_unread(2, cut), (0, 8));
        pages.keep(&BTreeMap::from([(2, cut)]));
        assert_eq!(pages.take(1, 0), None);
    }
}

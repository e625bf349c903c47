//! The numbers of files that were removed although older files are still needed.
//!
//! Each gap has a record in the current file before its files are removed, and each new file begins with
//! the records of all gaps. So a start can distinguish a removed file from a lost one.

use super::disk::FileNumber;

/// The first and the last number of missing files.
pub type Gap = (FileNumber, FileNumber);

/// Disjoint gaps in ascending order. There is at least one number between two of them.
#[derive(Clone, Debug, Default)]
pub struct Gaps(Vec<Gap>);

impl Gaps {
    /// Adds a gap, which may overlap others.
    pub fn add(&mut self, (mut first, mut last): Gap) {
        let is_apart = |&(from, to): &Gap| from > last.saturating_add(1) || to < first - 1;
        let (apart, joined): (Vec<Gap>, Vec<Gap>) = self.0.iter().copied().partition(is_apart);
        for (from, to) in joined {
            (first, last) = (first.min(from), last.max(to));
        }
        self.0 = apart;
        let index = self.0.partition_point(|&(from, _)| from < first);
        self.0.insert(index, (first, last));
    }

    /// Returns whether a gap has this number.
    pub fn contains(&self, number: FileNumber) -> bool {
        self.0.iter().any(|&(first, last)| (first..=last).contains(&number))
    }

    /// Forgets the gaps before the oldest file.
    pub fn forget_before(&mut self, oldest: FileNumber) {
        self.0.retain(|&(_, last)| last > oldest);
    }

    /// Returns all gaps.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Gap> + '_ {
        self.0.iter().copied()
    }

    /// Returns the neighbours among `numbers`, which ascend, between which a file is missing that is in no
    /// gap.
    pub fn lost<'n>(&self, numbers: &'n [FileNumber]) -> impl Iterator<Item = Gap> + use<'n, '_> {
        numbers.array_windows().map(|&[before, after]| (before, after)).filter(
            |&(before, after)| {
                let is_known = |&(first, last): &Gap| first <= before + 1 && after - 1 <= last;
                after - before > 1 && !self.0.iter().any(is_known)
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_join_and_explain_missing_files() {
        let mut gaps = Gaps::default();
        for gap in [(9, 9), (3, 4), (6, 6), (20, 30), (5, 5), (25, 40)] {
            gaps.add(gap);
        }
        assert_eq!(gaps.0, [(3, 6), (9, 9), (20, 40)]);
        assert!(gaps.contains(3) && gaps.contains(40) && !gaps.contains(7));
        // A listed file may still exist.
        let numbers = [2, 4, 7, 8, 10, 12, 19, 41];
        assert_eq!(gaps.lost(&numbers).collect::<Vec<_>>(), [(10, 12), (12, 19)]);
        gaps.forget_before(7);
        assert_eq!(gaps.0, [(9, 9), (20, 40)]);
    }
}

//! Seeded mutations of inputs, for the runs without libFuzzer.

pub(crate) struct Mutator<'s> {
    random: fastrand::Rng,
    starts: &'s [Vec<u8>],
}

const MAX_LEN: usize = 4096;
/// Near an end of a range.
const NUMBERS: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff, u64::MAX >> 1, u64::MAX, 1 << 30];

impl Mutator<'_> {
    pub(crate) fn new(starts: &[Vec<u8>]) -> Mutator<'_> {
        Mutator { random: fastrand::Rng::with_seed(11), starts }
    }

    pub(crate) fn next(&mut self) -> Vec<u8> {
        let mut input = self.start().to_vec();
        for _ in 0..self.random.usize(1..6) {
            self.mutate(&mut input);
        }
        input.truncate(MAX_LEN);
        input
    }

    fn start(&mut self) -> &[u8] {
        self.random.choice(self.starts).expect("there are seeds")
    }

    fn mutate(&mut self, input: &mut Vec<u8>) {
        let at = self.random.usize(..=input.len());
        let longest = 1 << self.random.u32(..8);
        let end = (at + self.random.usize(..longest)).min(input.len());
        let is_inserted = self.random.bool();
        let over = |bytes: Vec<u8>| {
            let end = if is_inserted { at } else { (at + bytes.len()).min(input.len()) };
            (end, bytes)
        };
        let first = input.get(at).copied().unwrap_or_default();
        let (end, bytes) = match self.random.u8(..8) {
            0 => ((at + 1).min(input.len()), vec![first ^ 1 << self.random.u8(..8)]),
            1 => over(vec![self.random.u8(..)]),
            2 => (input.len(), Vec::new()),
            3 => (end, Vec::new()),
            4 => (at, input[at..end].repeat(self.random.usize(1..4))),
            5 => {
                let from = self.random.usize(..);
                let other = self.start();
                (end, other[from % (other.len() + 1)..].to_vec())
            }
            6 => {
                let number = self.random.choice(NUMBERS).expect("there are numbers");
                let number = number.wrapping_add(self.random.u64(..3)).to_le_bytes();
                over(number[..1 << self.random.usize(..4)].to_vec())
            }
            _ => {
                let number = self.random.u64(..) >> self.random.u32(..64);
                (end, format!(" {number}").into_bytes())
            }
        };
        input.splice(at..end, bytes);
    }
}

//! Digests of the keys of unique jobs: SipHash-2-4 with 128 bits and a secret.
//!
//! A digest stands for a tube and a key, which may have 200 bytes each. Two keys with one digest would
//! be taken for the same key. Without the secret no client can construct two, and by chance it happens
//! with a probability of 10^-21 among a billion keys. So the keys themselves are not stored.
//!
//! The algorithm is that of J.-P. Aumasson and D. J. Bernstein, "SipHash: a fast short-input PRF". The
//! standard library has only its variant with 64 bits, and no way to choose the secret.

use std::hash::{BuildHasher, RandomState};

/// The digest of a key and the name of its tube. Four words, so that an entry needs no padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub [u32; 4]);

/// The secret with which digests are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Secret(pub [u64; 2]);

impl Secret {
    /// Returns a random secret: hashes with the random keys of [`RandomState`].
    pub fn random() -> Secret {
        let hasher = RandomState::new();
        Secret([hasher.hash_one(0), hasher.hash_one(1)])
    }

    /// Returns the digest of a key in a tube. No name of a tube has a space.
    pub fn digest(self, tube: &str, key: &str) -> Digest {
        let mut hash = SipHash::new(self);
        hash.update(tube.as_bytes());
        hash.update(b" ");
        hash.update(key.as_bytes());
        hash.finish()
    }
}

impl Digest {
    /// Returns 64 bits of the digest.
    pub fn half(self) -> u64 {
        u64::from(self.0[1]) << u32::BITS | u64::from(self.0[0])
    }
}

/// A digest that is being made.
struct SipHash {
    state: [u64; 4],
    /// The bytes that do not fill a word yet.
    tail: [u8; WORD],
    /// The number of all bytes.
    len: usize,
}

const WORD: usize = 8;
const ROUNDS_PER_WORD: usize = 2;
const LAST_ROUNDS: usize = 4;

impl SipHash {
    fn new(Secret([k0, k1]): Secret) -> SipHash {
        let state = [
            k0 ^ 0x736f_6d65_7073_6575,
            k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
            k0 ^ 0x6c79_6765_6e65_7261,
            k1 ^ 0x7465_6462_7974_6573,
        ];
        SipHash { state, tail: [0; WORD], len: 0 }
    }

    fn update(&mut self, bytes: &[u8]) {
        // Up to the next word, whole words, and the rest.
        let filled = self.len % WORD;
        let (head, rest) = bytes.split_at(bytes.len().min((WORD - filled) % WORD));
        self.tail[filled..filled + head.len()].copy_from_slice(head);
        self.len += bytes.len();
        if !head.is_empty() && filled + head.len() == WORD {
            self.add_word(u64::from_le_bytes(self.tail));
        }
        let (words, rest) = rest.as_chunks::<WORD>();
        for &word in words {
            self.add_word(u64::from_le_bytes(word));
        }
        if !rest.is_empty() {
            self.tail[..rest.len()].copy_from_slice(rest);
        }
    }

    fn add_word(&mut self, word: u64) {
        self.state[3] ^= word;
        self.mix(ROUNDS_PER_WORD);
        self.state[0] ^= word;
    }

    fn finish(mut self) -> Digest {
        let filled = self.len % WORD;
        self.tail[filled..].fill(0);
        // The highest byte is the length, modulo 256.
        self.add_word(u64::from_le_bytes(self.tail) | (self.len as u64) << (u64::BITS - u8::BITS));
        self.state[2] ^= 0xee;
        let low = self.last_half();
        self.state[1] ^= 0xdd;
        let high = self.last_half();
        let words = [low, high].map(|half| {
            let [a, b, c, d, e, f, g, h] = half.to_le_bytes();
            [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
        });
        Digest([words[0][0], words[0][1], words[1][0], words[1][1]])
    }

    fn last_half(&mut self) -> u64 {
        self.mix(LAST_ROUNDS);
        self.state.iter().fold(0, |half, word| half ^ word)
    }

    fn mix(&mut self, rounds: usize) {
        let [mut v0, mut v1, mut v2, mut v3] = self.state;
        for _ in 0..rounds {
            v0 = v0.wrapping_add(v1);
            v1 = v1.rotate_left(13) ^ v0;
            v0 = v0.rotate_left(32);
            v2 = v2.wrapping_add(v3);
            v3 = v3.rotate_left(16) ^ v2;
            v0 = v0.wrapping_add(v3);
            v3 = v3.rotate_left(21) ^ v0;
            v2 = v2.wrapping_add(v1);
            v1 = v1.rotate_left(17) ^ v2;
            v2 = v2.rotate_left(32);
        }
        self.state = [v0, v1, v2, v3];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// The digests that OpenSSL computes: `openssl mac -macopt hexkey:000102030405060708090a0b0c0d0e0f
    /// -macopt size:16 -in FILE SIPHASH`.
    #[test]
    fn digests_match_another_implementation() {
        let key: [u8; 16] = std::array::from_fn(|index| u8::try_from(index).unwrap());
        let half = |at: usize| u64::from_le_bytes(*key[at..].first_chunk().unwrap());
        let secret = Secret([half(0), half(8)]);
        for (bytes, expected) in [
            (&b""[..], "A3817F04BA25A8E66DF67214C7550293"),
            (b"\0", "DA87C1D86B99AF44347659119B22FC45"),
            (b"default order-1", "AB16BA11EFD4D043930F3358BE795AFE"),
            (b"a tube key", "903065B969F01D026B744E7C4555ECD5"),
        ] {
            let mut hash = SipHash::new(secret);
            hash.update(bytes);
            let words = hash.finish().0.map(u32::to_le_bytes);
            let hex: String = words.concat().iter().map(|byte| format!("{byte:02X}")).collect();
            assert_eq!(hex, expected, "{}", bytes.escape_ascii());
        }
        let mut hash = SipHash::new(secret);
        hash.update(b"default order-1");
        assert_eq!(secret.digest("default", "order-1"), hash.finish());
    }

    #[test]
    fn a_digest_does_not_depend_on_the_pieces() {
        let bytes: Vec<u8> = (0..100).collect();
        for len in 0..bytes.len() {
            let digest = |pieces: &[&[u8]]| {
                let mut hash = SipHash::new(Secret([1, 2]));
                pieces.iter().for_each(|piece| hash.update(piece));
                hash.finish()
            };
            let whole = digest(&[&bytes[..len]]);
            for at in 0..=len {
                let (first, second) = bytes[..len].split_at(at);
                assert_eq!(digest(&[first, b"", second]), whole, "{at} of {len} bytes");
            }
            let single: Vec<&[u8]> = bytes[..len].chunks(1).collect();
            assert_eq!(digest(&single), whole, "{len} bytes");
        }
    }

    #[test]
    fn digests_depend_on_the_secret_the_tube_and_the_key() {
        let secrets = [Secret::random(), Secret::random()];
        let names = ["a", "b", "ab", "ba", "aa"];
        let digests: HashSet<[u32; 4]> = secrets
            .iter()
            .flat_map(|secret| names.map(|tube| names.map(|key| secret.digest(tube, key).0)))
            .flatten()
            .collect();
        assert_eq!(digests.len(), secrets.len() * names.len() * names.len());
    }
}

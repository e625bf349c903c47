//! Digests of the keys of unique jobs: SipHash-2-4 with 128 bits and a secret.
//!
//! A digest stands for a tube and a key, which may have 200 bytes each. Two keys with one digest would
//! be taken for the same key. Without the secret no client can construct two, and by chance it happens
//! with a probability of 10^-21 among a billion keys. So the keys themselves are not stored.
//!
//! The algorithm is that of J.-P. Aumasson and D. J. Bernstein, "SipHash: a fast short-input PRF". The
//! standard library has only its variant with 64 bits, and no way to choose the secret.

use crate::engine::collections::chains::{low_half, mix};
use siphasher::sip128::{Hash128, Hasher128, SipHasher24};
use std::hash::{BuildHasher, Hasher, RandomState};

/// The digest of a key and the name of its tube. It is no `u128`, which would be aligned to 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub [u32; 4]);

/// The secret with which digests are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Secret(pub [u64; 2]);

/// The group of a job, as a hash of its key, and the limit that its put has named. The others of the group
/// may have other limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Con {
    pub group: u64,
    pub limit: u32,
}

impl Default for Secret {
    /// Returns a random secret: hashes with the random keys of [`RandomState`].
    fn default() -> Secret {
        let hasher = RandomState::new();
        Secret([hasher.hash_one(0), hasher.hash_one(1)])
    }
}

impl Secret {
    /// Returns the digest of a key in a tube. A space is between them: no name of a tube has one, so no two
    /// pairs are the same text.
    pub fn digest(self, tube: &str, key: &[u8]) -> Digest {
        self.digest_of(&[tube.as_bytes(), b" ", key])
    }

    /// Returns the digest of a key that stands alone.
    pub fn hash(self, key: &[u8]) -> u64 {
        let mut hasher = SipHasher24::new_with_keys(self.0[0], self.0[1]);
        hasher.write(key);
        hasher.finish128().h1
    }

    fn digest_of(self, parts: &[&[u8]]) -> Digest {
        let mut hasher = SipHasher24::new_with_keys(self.0[0], self.0[1]);
        parts.iter().for_each(|part| hasher.write(part));
        let Hash128 { h1: low, h2: high } = hasher.finish128();
        Digest([low, low >> u32::BITS, high, high >> u32::BITS].map(low_half))
    }
}

impl Digest {
    /// Returns what a job without a key has instead of a digest. Each job has another hash.
    pub fn none(id: u64) -> Digest {
        Digest([low_half(mix(id)), 0, 0, 0])
    }

    /// Returns whether this is the digest of no key. By chance a key has it with a probability of 2^-96.
    pub fn is_none(self) -> bool {
        self.0[1..] == [0; 3]
    }

    /// Returns the hash for a [`HashSlab`](crate::engine::collections::chains::HashSlab).
    pub fn hash(self) -> u32 {
        self.0[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::text::TUBE_NAME_MAX;
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
            let words = secret.digest_of(&[bytes]).0.map(u32::to_le_bytes);
            let hex: String = words.concat().iter().map(|byte| format!("{byte:02X}")).collect();
            assert_eq!(hex, expected, "{}", bytes.escape_ascii());
        }
        let digest = secret.digest_of(&[b"default order-1"]);
        assert_eq!(secret.digest("default", b"order-1"), digest);
        let longest = "k".repeat(TUBE_NAME_MAX);
        let digest = secret.digest_of(&[format!("{longest} {longest}").as_bytes()]);
        assert_eq!(secret.digest(&longest, longest.as_bytes()), digest);
    }

    #[test]
    fn digests_depend_on_the_secret_the_tube_and_the_key() {
        let secrets = [Secret::default(), Secret::default()];
        let names = ["a", "b", "ab", "ba", "aa"];
        let digests: HashSet<[u32; 4]> = secrets
            .iter()
            .flat_map(|secret| {
                names.map(|tube| names.map(|key| secret.digest(tube, key.as_bytes()).0))
            })
            .flatten()
            .collect();
        assert_eq!(digests.len(), secrets.len() * names.len() * names.len());
    }
}

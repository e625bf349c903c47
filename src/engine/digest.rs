//! Digests of the keys of unique jobs: SipHash-2-4 with 128 bits and a secret.
//!
//! A digest stands for a tube and a key, which may have 200 bytes each. Two keys with one digest would
//! be taken for the same key. Without the secret no client can construct two, and by chance it happens
//! with a probability of 10^-21 among a billion keys. So the keys themselves are not stored.
//!
//! The algorithm is that of J.-P. Aumasson and D. J. Bernstein, "SipHash: a fast short-input PRF". The
//! standard library has only its variant with 64 bits, and no way to choose the secret.

use crate::engine::collections::chains::low_half;
use crate::engine::text::TUBE_NAME_MAX;
use std::hash::{BuildHasher, RandomState};

/// The digest of a key and the name of its tube. It is no `u128`, which would be aligned to 16 bytes.
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

    /// Returns the digest of a key in a tube. A space is between them: no name of a tube has one, so no two
    /// pairs are the same text.
    ///
    /// # Panics
    /// Both together have more than 400 bytes.
    pub fn digest(self, tube: &str, key: &[u8]) -> Digest {
        let mut text = [0; TEXT_MAX];
        let (tube_end, end) = (tube.len(), tube.len() + 1 + key.len());
        text[..tube_end].copy_from_slice(tube.as_bytes());
        text[tube_end] = b' ';
        text[tube_end + 1..end].copy_from_slice(key);
        sip_hash(self, &text, end)
    }
}

impl Digest {
    /// Returns the hash for a [`HashSlab`](crate::engine::collections::chains::HashSlab).
    pub fn hash(self) -> u32 {
        self.0[0]
    }
}

const ROUNDS_PER_WORD: usize = 2;
const LAST_ROUNDS: usize = 4;

/// The maximum length of a text, up to the next multiple of a word.
const TEXT_MAX: usize = (2 * TUBE_NAME_MAX + 1).next_multiple_of(8);

/// Returns the digest of the first `len` bytes, which zeros follow.
fn sip_hash(Secret([k0, k1]): Secret, text: &[u8; TEXT_MAX], len: usize) -> Digest {
    let mut state = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let mut add_word = |word| {
        state[3] ^= word;
        state = sip_rounds(state, ROUNDS_PER_WORD);
        state[0] ^= word;
    };
    let (words, _) = text.as_chunks();
    let (whole, rest) = words.split_at(len / 8);
    whole.iter().for_each(|&word| add_word(u64::from_le_bytes(word)));
    // The last word has the rest of the bytes, and the length modulo 256 in its highest byte.
    let length = (len as u64) << (u64::BITS - u8::BITS);
    add_word(u64::from_le_bytes(rest[0]) | length);
    state[2] ^= 0xee;
    state = sip_rounds(state, LAST_ROUNDS);
    let low = state.iter().fold(0, |half, word| half ^ word);
    state[1] ^= 0xdd;
    state = sip_rounds(state, LAST_ROUNDS);
    let high = state.iter().fold(0, |half, word| half ^ word);
    Digest([low, low >> u32::BITS, high, high >> u32::BITS].map(low_half))
}

fn sip_rounds([mut v0, mut v1, mut v2, mut v3]: [u64; 4], rounds: usize) -> [u64; 4] {
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
    [v0, v1, v2, v3]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn digest_of(secret: Secret, bytes: &[u8]) -> Digest {
        let mut text = [0; TEXT_MAX];
        text[..bytes.len()].copy_from_slice(bytes);
        sip_hash(secret, &text, bytes.len())
    }

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
            let words = digest_of(secret, bytes).0.map(u32::to_le_bytes);
            let hex: String = words.concat().iter().map(|byte| format!("{byte:02X}")).collect();
            assert_eq!(hex, expected, "{}", bytes.escape_ascii());
        }
        let digest = digest_of(secret, b"default order-1");
        assert_eq!(secret.digest("default", b"order-1"), digest);
        let longest = "k".repeat(TUBE_NAME_MAX);
        let digest = digest_of(secret, format!("{longest} {longest}").as_bytes());
        assert_eq!(secret.digest(&longest, longest.as_bytes()), digest);
    }

    #[test]
    fn digests_depend_on_the_secret_the_tube_and_the_key() {
        let secrets = [Secret::random(), Secret::random()];
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

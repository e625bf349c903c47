//! SHA-256 (FIPS 180-4) in base64, as a Content-Security-Policy names a style or a script.

/// Returns the hash of `text` in base64.
pub fn base64_of(text: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digest = digest(text.as_bytes());
    let mut encoded = String::new();
    for group in digest.chunks(3) {
        let bytes = [group[0], *group.get(1).unwrap_or(&0), *group.get(2).unwrap_or(&0)];
        let bits = u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]);
        for index in 0..4 {
            let symbol = ALPHABET[(bits >> (18 - 6 * index) & 63) as usize];
            encoded.push(if index <= group.len() { char::from(symbol) } else { '=' });
        }
    }
    encoded
}

fn digest(message: &[u8]) -> [u8; 32] {
    let (primes, mut hash) = (first_primes(), [0; 8]);
    for (word, &prime) in hash.iter_mut().zip(&primes) {
        *word = fraction(f64::from(prime).sqrt());
    }
    let round_constants = primes.map(|prime| fraction(f64::from(prime).cbrt()));
    let mut padded = message.to_vec();
    padded.push(0x80);
    padded.resize(padded.len().next_multiple_of(64), 0);
    if message.len() % 64 >= 56 {
        padded.resize(padded.len() + 64, 0);
    }
    let length_at = padded.len() - 8;
    padded[length_at..].copy_from_slice(&(message.len() as u64 * 8).to_be_bytes());
    for block in padded.chunks(64) {
        compress(&mut hash, block, &round_constants);
    }
    let mut digest = [0; 32];
    for (bytes, word) in digest.chunks_mut(4).zip(hash) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

fn compress(hash: &mut [u32; 8], block: &[u8], round_constants: &[u32; 64]) {
    let mut words = [0_u32; 64];
    for (word, bytes) in words.iter_mut().zip(block.chunks(4)) {
        *word = u32::from_be_bytes(bytes.try_into().unwrap());
    }
    for index in 16..64 {
        let (early, late) = (words[index - 15], words[index - 2]);
        let early = early.rotate_right(7) ^ early.rotate_right(18) ^ early >> 3;
        let late = late.rotate_right(17) ^ late.rotate_right(19) ^ late >> 10;
        let sum = words[index - 16].wrapping_add(early).wrapping_add(words[index - 7]);
        words[index] = sum.wrapping_add(late);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *hash;
    for (word, constant) in words.iter().zip(round_constants) {
        let rotated = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let sum = h.wrapping_add(rotated).wrapping_add(e & f ^ !e & g);
        let first = sum.wrapping_add(*constant).wrapping_add(*word);
        let rotated = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let second = rotated.wrapping_add(a & b ^ a & c ^ b & c);
        (h, g, f, e) = (g, f, e, d.wrapping_add(first));
        (d, c, b, a) = (c, b, a, first.wrapping_add(second));
    }
    for (word, added) in hash.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(added);
    }
}

fn first_primes() -> [u32; 64] {
    let is_prime = |number: &u32| (2..*number).all(|divisor| !number.is_multiple_of(divisor));
    let mut primes = (2..).filter(is_prime);
    std::array::from_fn(|_| primes.next().unwrap())
}

/// Returns the first 32 bits of the fractional part.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is below 2^32")]
fn fraction(number: f64) -> u32 {
    (number.fract() * f64::from(2_u32.pow(16)).powi(2)) as u32
}

#[test]
fn hashes_agree_with_the_standard() {
    assert_eq!(base64_of(""), "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
    assert_eq!(base64_of("abc"), "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=");
}

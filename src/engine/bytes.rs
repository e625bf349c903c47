//! What is done to bytes all day: looking for one of them, and writing numbers.

/// Where `byte` stands first in `bytes`. Eight are looked at together: lines are short, and
/// one by one this takes as long as all the rest of reading a command.
pub fn find(byte: u8, bytes: &[u8]) -> Option<usize> {
    let (words, rest) = bytes.as_chunks::<8>();
    let wanted = u64::from_ne_bytes([byte; 8]);
    for (index, &word) in words.iter().enumerate() {
        let zeros = zero_bytes(u64::from_le_bytes(word) ^ wanted);
        if zeros != 0 {
            return Some(index * 8 + zeros.trailing_zeros() as usize / 8);
        }
    }
    rest.iter().position(|&other| other == byte).map(|place| words.len() * 8 + place)
}

/// A bit set in the lowest byte of `word` that is zero, none below it, and any above.
fn zero_bytes(word: u64) -> u64 {
    const LOW_BITS: u64 = u64::from_ne_bytes([0x01; 8]);
    const HIGH_BITS: u64 = u64::from_ne_bytes([0x80; 8]);
    word.wrapping_sub(LOW_BITS) & !word & HIGH_BITS
}

/// `number` in decimal.
pub fn decimal(mut number: u64, buffer: &mut [u8; 20]) -> &[u8] {
    let mut at = buffer.len();
    loop {
        at -= 1;
        buffer[at] = b'0' + u8::try_from(number % 10).expect("a digit is small");
        number /= 10;
        if number == 0 {
            return &buffer[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_plain_search_finds() {
        let mut random = fastrand::Rng::with_seed(4);
        for _ in 0..20_000 {
            // Few values, with their neighbours across the borders of a sign and of zero.
            let bytes: Vec<u8> =
                (0..random.usize(..40)).map(|_| *random.choice(&VALUES).unwrap()).collect();
            for byte in VALUES {
                let expected = bytes.iter().position(|&other| other == byte);
                assert_eq!(find(byte, &bytes), expected, "{byte} in {bytes:?}");
            }
        }
        const VALUES: [u8; 8] = [0, 1, b'\n', b'\r', 0x7f, 0x80, 0x81, 0xff];
    }

    #[test]
    fn decimals() {
        let mut buffer = [0; 20];
        for number in [0, 9, 10, 4_294_967_296, u64::MAX] {
            assert_eq!(decimal(number, &mut buffer), number.to_string().as_bytes());
        }
    }
}

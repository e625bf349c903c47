//! Bytes and text: line ends, tube names, decimal numbers, times for people, strings in JSON.

use super::headroom::{self, Headroom};
use crate::engine::headroom::NoMemory;
use std::fmt::{self, Write};

/// The end of lines and bodies.
pub const CR_LF: &[u8] = b"\r\n";

/// The maximum length of a tube name, in bytes.
pub const TUBE_NAME_MAX: usize = 200;

/// Returns whether `name` is a valid tube name.
pub fn is_tube_name(name: &[u8]) -> bool {
    name_prefix_len(name) == Some(name.len())
}

/// Returns how many of the first bytes names may contain, up to the first other byte. Returns `None` if
/// they are no valid name: too few, too many, or after a `-`. Keys of unique jobs have the same rule.
pub fn name_prefix_len(bytes: &[u8]) -> Option<usize> {
    let len = bytes.iter().position(|&byte| !is_name_byte(byte)).unwrap_or(bytes.len());
    ((1..=TUBE_NAME_MAX).contains(&len) && bytes[0] != b'-').then_some(len)
}

/// Returns whether tube names may contain `byte`.
pub const fn is_name_byte(byte: u8) -> bool {
    IS_NAME_BYTE[byte as usize]
}

/// For each byte, whether tube names may contain it.
const IS_NAME_BYTE: [bool; 256] = {
    let allowed = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-+/;.$_()";
    let mut is_allowed = [false; 256];
    let mut index = 0;
    while index < allowed.len() {
        is_allowed[allowed[index] as usize] = true;
        index += 1;
    }
    is_allowed
};

/// Returns a copy of `text`.
pub fn try_boxed(text: &str) -> Result<Box<str>, NoMemory> {
    let mut copy = String::new();
    headroom::keeping(Headroom::Quarter, || copy.try_reserve_exact(text.len()))?;
    copy.push_str(text);
    Ok(copy.into_boxed_str())
}

/// Appends `number` in decimal.
pub fn push_decimal(text: &mut String, number: u64) {
    let mut digits = [0; 20];
    let start = write_decimal(number, &mut digits, 20);
    text.push_str(str::from_utf8(&digits[start..]).expect("digits are ASCII"));
}

/// Writes `number` in decimal into `buffer`, before `end`, and returns the index of its first
/// digit.
///
/// # Panics
/// The digits need more bytes than `end`.
pub fn write_decimal(mut number: u64, buffer: &mut [u8], end: usize) -> usize {
    let mut at = end;
    // Two digits a division: half as many divisions.
    while number >= 10 {
        at -= 2;
        let pair = usize::try_from(number % 100).expect("two digits are below 100");
        buffer[at..at + 2].copy_from_slice(&PAIRS[pair]);
        number /= 100;
    }
    if number > 0 || at == end {
        at -= 1;
        buffer[at] = PAIRS[usize::try_from(number).expect("a digit is below 10")][1];
    }
    at
}

/// The numbers below 100 with two digits each.
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[b'0'; 2]; 100];
    let mut number: u8 = 0;
    while number < 100 {
        pairs[number as usize] = [b'0' + number / 10, b'0' + number % 10];
        number += 1;
    }
    pairs
};

/// Displays a number in groups of three digits, such as `3,120`.
pub struct Grouped(pub u64);

impl fmt::Display for Grouped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            number @ 0..1000 => write!(f, "{number}"),
            number => write!(f, "{},{:03}", Grouped(number / 1000), number % 1000),
        }
    }
}

/// Displays a number with what it counts, such as `1 job` or `3,120 jobs`.
pub struct CountOf(pub u64, pub &'static str);

impl fmt::Display for CountOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CountOf(number, noun) = *self;
        write!(f, "{} {noun}{}", Grouped(number), if number == 1 { "" } else { "s" })
    }
}

/// Returns the largest unit of a time of which there are two, seconds, minutes, hours or days as 0 to 3, and
/// how many there are.
pub fn largest_unit(secs: u64) -> (u64, usize) {
    match secs {
        0..120 => (secs, 0),
        120..7200 => (secs / 60, 1),
        7200..172_800 => (secs / 3600, 2),
        _ => (secs / 86_400, 3),
    }
}

/// Displays a time in seconds in its [largest unit](largest_unit): `119s`, `20m`, `3h`, `2d`.
pub struct Span(pub u64);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, unit) = largest_unit(self.0);
        write!(f, "{number}{}", ["s", "m", "h", "d"][unit])
    }
}

/// Returns whether a terminal may interpret a character: control characters, invisible marks, and those that
/// change the direction of the text after them.
pub fn is_unprintable(char: char) -> bool {
    char.is_control()
        || ['\u{200b}'..='\u{200f}', '\u{2028}'..='\u{202e}', '\u{2060}'..='\u{2069}']
            .iter()
            .any(|range| range.contains(&char))
}

/// Displays text as the content of a JSON string, without the quotes (RFC 8259, section 7).
pub struct JsonText<'t>(pub &'t str);

impl fmt::Display for JsonText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|char| match char {
            '"' | '\\' => write!(f, "\\{char}"),
            '\n' => f.write_str("\\n"),
            '\r' => f.write_str("\\r"),
            '\t' => f.write_str("\\t"),
            _ if is_unprintable(char) => write!(f, "\\u{:04x}", u32::from(char)),
            _ => f.write_char(char),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_no_plural() {
        let counts = [(0, "0 jobs"), (1, "1 job"), (2, "2 jobs"), (3120, "3,120 jobs")];
        assert!(counts.iter().all(|&(number, text)| CountOf(number, "job").to_string() == text));
    }

    #[test]
    fn write_decimal_matches_the_standard_library() {
        for number in (0..=1_000).chain([4_294_967_296, u64::MAX]) {
            let (mut buffer, text) = ([b'x'; 24], number.to_string());
            let start = write_decimal(number, &mut buffer, 22);
            assert_eq!(buffer[start..22], *text.as_bytes());
            assert_eq!((start, &buffer[22..]), (22 - text.len(), &b"xx"[..]));
        }
    }

    #[test]
    fn json_text_is_escaped() {
        let text = "a\"b\\c\r\n\t\0\u{1f}\u{e9}\u{1f600}";
        assert_eq!(JsonText(text).to_string(), r#"a\"b\\c\r\n\t\u0000\u001fé😀"#);
        // U+009B begins a sequence of control on a terminal, as ESC [ does.
        assert_eq!(JsonText("\u{7f}\u{9b}2J\u{202e}").to_string(), r"\u007f\u009b2J\u202e");
    }
}

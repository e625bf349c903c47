//! Percent-encoding in paths and queries (RFC 3986, section 2.1).

use std::borrow::Cow;
use std::fmt::{self, Display, Write};

/// Displays text, percent-encoded, as a part of a path or as a value of a query.
#[derive(Clone, Copy, Debug)]
pub struct Encoded<'t>(pub &'t str);

impl Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    f.write_char(byte.into())?;
                }
                _ => write!(f, "%{byte:02X}")?,
            }
        }
        Ok(())
    }
}

/// Returns the bytes of percent-encoded text. An incomplete escape is not changed.
pub fn decode(text: &str) -> Cow<'_, [u8]> {
    if !text.contains('%') {
        return Cow::Borrowed(text.as_bytes());
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match (byte, after.first_chunk::<2>().and_then(|&digits| hex_byte(digits))) {
            (b'%', Some(decoded)) => {
                bytes.push(decoded);
                rest = &after[2..];
            }
            _ => bytes.push(byte),
        }
    }
    Cow::Owned(bytes)
}

fn hex_byte([high, low]: [u8; 2]) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    Some(digit(high)? << 4 | digit(low)?)
}

/// Returns the value of a field of a query, as an HTML form sends it: `+` is a space.
pub fn query_value(query: &str, name: &str) -> Option<String> {
    let mut fields = query.split('&').filter_map(|field| field.split_once('='));
    let (_, value) = fields.find(|&(other, _)| other == name)?;
    let value = value.replace('+', " ");
    Some(String::from_utf8_lossy(&decode(&value)).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_text_is_decoded() {
        let text = "a+/;.$_()-~ %\"<é";
        let encoded = Encoded(text).to_string();
        assert_eq!(encoded, "a%2B%2F%3B.%24_%28%29-~%20%25%22%3C%C3%A9");
        assert_eq!(&*decode(&encoded), text.as_bytes());
        for (text, decoded) in [("a%", "a%"), ("%4", "%4"), ("%zz%41", "%zzA"), ("%%41", "%A")] {
            assert_eq!(&*decode(text), decoded.as_bytes());
        }
    }

    #[test]
    fn a_query_has_named_values() {
        let query = "sort=-ready&filter=a%2Bb+c%26&filter=later&empty=";
        assert_eq!(query_value(query, "sort").as_deref(), Some("-ready"));
        assert_eq!(query_value(query, "filter").as_deref(), Some("a+b c&"));
        assert_eq!(query_value(query, "empty").as_deref(), Some(""));
        assert_eq!(query_value(query, "a"), None);
        assert_eq!(query_value("", ""), None);
    }
}

//! Text between the quotes of JSON, for those who read what the server tells line by line.

use std::fmt::{self, Write};

/// Text, as it stands between the quotes of a JSON string (RFC 8259, section 7).
#[derive(Clone, Copy, Debug)]
pub struct JsonText<'t>(pub &'t str);

impl fmt::Display for JsonText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for char in self.0.chars() {
            match char {
                '"' | '\\' => write!(f, "\\{char}")?,
                '\n' => f.write_str("\\n")?,
                '\r' => f.write_str("\\r")?,
                '\t' => f.write_str("\\t")?,
                '\0'..='\x1f' => write!(f, "\\u{:04x}", u32::from(char))?,
                _ => f.write_char(char)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let text = "a\"b\\c\r\n\t\0\u{1f}\u{e9}\u{1f600}";
        assert_eq!(JsonText(text).to_string(), r#"a\"b\\c\r\n\t\u0000\u001fé😀"#);
    }
}

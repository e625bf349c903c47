//! Values in the documents of `stats`, `stats-job` and `stats-tube`.

/// Returns the value of the line `key: value`, without quotes.
pub fn field<'t>(document: &'t str, key: &str) -> Option<&'t str> {
    let value = |line: &'t str| line.strip_prefix(key)?.strip_prefix(": ");
    document.lines().find_map(value).map(|value| value.trim_matches('"'))
}

/// Returns a value that must be there and be a number.
pub fn number(document: &str, key: &str) -> u64 {
    let number = field(document, key).and_then(|value| value.parse().ok());
    number.unwrap_or_else(|| panic!("there is no number {key} in {document}"))
}

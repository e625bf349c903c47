//! Values in the documents of `stats`, `stats-job` and `stats-tube`.

/// The keys of the counts of a job.
pub const COUNTS: &str = "reserves timeouts releases buries kicks";

/// Returns values of `stats-job` and the body of a job, with spaces between them, or `None` if there is
/// no such job. `ask` returns the body of a reply, or `None` for NOT_FOUND.
pub fn job(mut ask: impl FnMut(&str) -> Option<String>, id: u64, keys: &str) -> Option<String> {
    let stats = ask(&format!("stats-job {id}\r\n"))?;
    let body = ask(&format!("peek {id}\r\n"))?;
    let values = keys.split(' ').map(|key| field(&stats, key).expect("stats-job has the key"));
    Some(values.chain([&*body]).collect::<Vec<&str>>().join(" "))
}

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

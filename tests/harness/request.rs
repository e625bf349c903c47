//! Requests as bytes, and bodies that differ by a number.

/// The request that puts a job.
pub fn put(pri: u32, delay_s: u32, ttr_s: u32, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let line = format!("put {pri} {delay_s} {ttr_s} {}\r\n", body.len());
    [line.as_bytes(), body, b"\r\n"].concat()
}

/// The requests that delete these jobs.
pub fn delete_all(ids: impl IntoIterator<Item = u64>) -> String {
    ids.into_iter().map(|id| format!("delete {id}\r\n")).collect()
}

/// Returns `len` bytes of all values, which differ for each number if they are long enough.
pub fn numbered_body(number: u64, len: usize) -> Vec<u8> {
    let mut body = format!("{number} ").into_bytes();
    body.resize(len.max(body.len()), 0);
    let start = body.iter().position(|&byte| byte == b' ').map_or(0, |space| space + 1);
    fastrand::Rng::with_seed(number).fill(&mut body[start..]);
    body.truncate(len);
    body
}

/// Returns the number of a body, if the body is whole.
pub fn body_number(bytes: &[u8]) -> Option<u64> {
    let digits = bytes.split(|&byte| byte == b' ').next()?;
    let number = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (numbered_body(number, bytes.len()) == bytes).then_some(number)
}

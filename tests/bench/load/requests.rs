//! Requests as bytes.

use std::io::Write;

pub const RESERVE: &[u8] = b"reserve\r\n";

pub fn repeat(request: &[u8], count: usize, output: &mut Vec<u8>) {
    for _ in 0..count {
        output.extend_from_slice(request);
    }
}

/// Deletes these jobs; returns their number.
pub fn delete_all(ids: &mut Vec<u64>, output: &mut Vec<u8>) -> usize {
    let count = ids.len();
    for id in ids.drain(..) {
        write!(output, "delete {id}\r\n").expect("memory takes it");
    }
    count
}

/// Buries these jobs with pseudo-random priorities; returns their number.
pub fn bury_all(ids: &mut Vec<u64>, output: &mut Vec<u8>) -> usize {
    /// A large prime number.
    const SCATTER: u64 = 2_654_435_761;
    let count = ids.len();
    for id in ids.drain(..) {
        let priority = (id * SCATTER) & u64::from(u32::MAX);
        write!(output, "bury {id} {priority}\r\n").expect("memory takes it");
    }
    count
}

/// Watches the tube with this number, in words.
pub fn watch(number: usize) -> String {
    format!("watch tube-{number}")
}

/// Uses the tube with this number.
pub fn write_use(number: usize, output: &mut Vec<u8>) {
    write!(output, "use tube-{number}\r\n").expect("memory takes it");
}

/// A plain job, for clients that repeat one request.
pub fn put_request(body_size: usize) -> Vec<u8> {
    let mut request = Vec::new();
    write_put(0, 0, 60, body_size, &mut request);
    request
}

pub fn write_put(priority: u32, delay_s: u64, ttr_s: u32, body_size: usize, output: &mut Vec<u8>) {
    write_put_with_key(priority, delay_s, ttr_s, body_size, None, output);
}

/// The same with the key of this number, if there is one.
pub fn write_put_with_key(
    priority: u32,
    delay_s: u64,
    ttr_s: u32,
    body_size: usize,
    key: Option<u64>,
    output: &mut Vec<u8>,
) {
    write!(output, "put {priority} {delay_s} {ttr_s} {body_size}").expect("memory takes it");
    if let Some(number) = key {
        write!(output, " idp:order-{number}").expect("memory takes it");
    }
    output.extend_from_slice(b"\r\n");
    output.resize(output.len() + body_size, b'x');
    output.extend_from_slice(b"\r\n");
}

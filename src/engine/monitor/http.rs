//! The little of HTTP that is spoken where the server tells of itself: the head of a request to
//! what it asks for, and the heads of answers (RFC 9112).
//!
//! Which paths there are and what is told there is not known here. Requests have no bodies that
//! anybody reads, and each connection has one request.

use std::fmt;

/// A head may have so many bytes.
pub const HEAD_MAX: usize = 4096;
/// And so many lines.
const FIELDS_MAX: usize = 64;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'h> {
    /// The path, without what comes behind a question mark.
    pub path: &'h str,
    /// Whether only the head of the answer is wanted.
    pub head_only: bool,
    /// Whether the client understands an answer in chunks.
    pub takes_chunks: bool,
}

/// How an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok,
    BadRequest,
    NotFound,
    MethodNotAllowed,
    HeadTooLarge,
    ServiceUnavailable,
}

/// How the end of an answer is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// It has so many bytes.
    Bytes(usize),
    /// It comes in chunks.
    Chunks,
    /// The connection is closed.
    ToTheEnd,
}

/// Reads the head of a request; nothing while it is not complete. `bytes` are all that have come so
/// far.
///
/// # Errors
/// It is none that is answered: what it earns instead.
pub fn parse(bytes: &[u8]) -> Result<Option<Request<'_>>, Status> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut head = httparse::Request::new(&mut fields);
    match head.parse(&bytes[..bytes.len().min(HEAD_MAX)]) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_MAX => return Ok(None),
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Err(Status::HeadTooLarge);
        }
        Err(_) => return Err(Status::BadRequest),
    }
    let head_only = match head.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Err(Status::MethodNotAllowed),
    };
    let target = head.path.ok_or(Status::BadRequest)?;
    // As a proxy asks (RFC 9112, section 3.2.2).
    let target = target
        .strip_prefix("http://")
        .map_or(target, |rest| rest.find('/').map_or("/", |path_at| &rest[path_at..]));
    let (path, _query) = target.split_once('?').unwrap_or((target, ""));
    Ok(Some(Request { path, head_only, takes_chunks: head.version == Some(1) }))
}

/// The head of an answer.
pub fn head(status: Status, media_type: &str, length: Length) -> String {
    let (code, phrase) = status.code_and_phrase();
    let allow = if status == Status::MethodNotAllowed { "Allow: GET, HEAD\r\n" } else { "" };
    format!(
        "HTTP/1.1 {code} {phrase}\r\nContent-Type: {media_type}\r\n{length}{allow}\
         Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
}

impl Status {
    fn code_and_phrase(self) -> (u16, &'static str) {
        match self {
            Status::Ok => (200, "OK"),
            Status::BadRequest => (400, "Bad Request"),
            Status::NotFound => (404, "Not Found"),
            Status::MethodNotAllowed => (405, "Method Not Allowed"),
            Status::HeadTooLarge => (431, "Request Header Fields Too Large"),
            Status::ServiceUnavailable => (503, "Service Unavailable"),
        }
    }
}

/// The field of the head that says so.
impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Length::Bytes(count) => write!(f, "Content-Length: {count}\r\n"),
            Length::Chunks => f.write_str("Transfer-Encoding: chunked\r\n"),
            Length::ToTheEnd => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_understood_once_they_are_complete() {
        let whole = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), Ok(None), "{end} bytes");
        }
        for (bytes, path, head_only, takes_chunks) in [
            (&whole[..], "/metrics", false, true),
            (b"HEAD /healthz HTTP/1.0\r\n\r\n", "/healthz", true, false),
            (b"GET /readyz?a=b?c HTTP/1.1\n\n", "/readyz", false, true),
            (b"GET http://a:9/readyz?/ HTTP/1.1\r\n\r\n", "/readyz", false, true),
            (b"GET http://a HTTP/1.1\r\n\r\n", "/", false, true),
        ] {
            let request = Request { path, head_only, takes_chunks };
            assert_eq!(parse(bytes), Ok(Some(request)), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn what_is_no_request_earns_a_status() {
        for (bytes, status) in [
            (
                &b"POST /metrics HTTP/1.1\r\nContent-Length: 1\r\n\r\nx"[..],
                Status::MethodNotAllowed,
            ),
            (b"GET /metrics HTTP/2.0\r\n\r\n", Status::BadRequest),
            (b"put 0 0 9 1\r\na\r\n", Status::BadRequest),
            (b"\x16\x03\x01", Status::BadRequest),
        ] {
            assert_eq!(parse(bytes), Err(status), "{}", bytes.escape_ascii());
        }
        let long = [b"GET /", &[b'x'; HEAD_MAX][..]].concat();
        assert_eq!(parse(&long), Err(Status::HeadTooLarge));
        let lines = [b"GET /metrics HTTP/1.1\r\n", &b"a: b\r\n".repeat(65)[..], b"\r\n"].concat();
        assert_eq!(parse(&lines), Err(Status::HeadTooLarge));
    }

    #[test]
    fn a_head_says_what_follows() {
        let head = head(Status::MethodNotAllowed, "text/plain", Length::Bytes(7));
        assert!(head.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"));
        assert!(head.contains("\r\nContent-Length: 7\r\nAllow: GET, HEAD\r\n"));
        assert!(head.ends_with("\r\nConnection: close\r\n\r\n"));
    }
}

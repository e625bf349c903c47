//! Parses HTTP request heads and writes response heads (RFC 9112).
//!
//! Each connection has one request, and request bodies are ignored. Paths and their content are in
//! [`http_conn`](super::http_conn).

use super::accept::MediaType;
use std::fmt;

/// The maximum length of a request head, in bytes.
pub const HEAD_MAX: usize = 4096;
/// The maximum number of header fields.
const FIELDS_MAX: usize = 64;

/// A parsed request head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'h> {
    /// The path without the query.
    pub path: &'h str,
    /// The query without the question mark.
    pub query: &'h str,
    /// The media type that the client prefers, of those of the status page.
    pub media_type: MediaType,
    /// True for HEAD: only the response head is sent.
    pub head_only: bool,
    /// True for HTTP/1.1: the client accepts a chunked response.
    pub takes_chunks: bool,
}

/// The status of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok,
    BadRequest,
    NotFound,
    MethodNotAllowed,
    HeadTooLarge,
    ServiceUnavailable,
}

/// The framing of a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// The length in bytes is in the head.
    Bytes(usize),
    /// The body is chunked.
    Chunks,
    /// The end of the body is the end of the connection.
    UntilClose,
}

/// Returns the request at the start of `bytes`, `None` while its head is incomplete, or the status
/// for an invalid request.
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
    // Requests to a proxy have an absolute target (RFC 9112, section 3.2.2).
    let target = target
        .strip_prefix("http://")
        .map_or(target, |rest| rest.find('/').map_or("/", |path_at| &rest[path_at..]));
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let accepted = head.headers.iter().filter(|field| field.name.eq_ignore_ascii_case("Accept"));
    let media_type = MediaType::preferred(accepted.map(|field| field.value));
    let takes_chunks = head.version == Some(1);
    Ok(Some(Request { path, query, media_type, head_only, takes_chunks }))
}

/// Returns a response head. The connection closes after the response.
pub fn head(status: Status, media_type: &str, length: Length) -> String {
    head_with(status, media_type, length, "")
}

/// Returns a response head with more header fields: whole lines with CR LF.
pub fn head_with(status: Status, media_type: &str, length: Length, fields: &str) -> String {
    let (code, phrase) = status.code_and_phrase();
    let allow = if status == Status::MethodNotAllowed { "Allow: GET, HEAD\r\n" } else { "" };
    format!(
        "HTTP/1.1 {code} {phrase}\r\nContent-Type: {media_type}\r\n{length}{allow}\
         {fields}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
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

/// Displays the header field of this framing.
impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Length::Bytes(count) => write!(f, "Content-Length: {count}\r\n"),
            Length::Chunks => f.write_str("Transfer-Encoding: chunked\r\n"),
            Length::UntilClose => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_parsed_once_complete() {
        let whole = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), Ok(None), "{end} bytes");
        }
        for (bytes, path, query, head_only, takes_chunks) in [
            (&whole[..], "/metrics", "", false, true),
            (b"HEAD /healthz HTTP/1.0\r\n\r\n", "/healthz", "", true, false),
            (b"GET /readyz?a=b?c HTTP/1.1\n\n", "/readyz", "a=b?c", false, true),
            (b"GET http://a:9/readyz?/ HTTP/1.1\r\n\r\n", "/readyz", "/", false, true),
            (b"GET http://a HTTP/1.1\r\n\r\n", "/", "", false, true),
        ] {
            let media_type = MediaType::Html;
            let request = Request { path, query, media_type, head_only, takes_chunks };
            assert_eq!(parse(bytes), Ok(Some(request)), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn invalid_requests_return_a_status() {
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
    fn a_head_has_status_length_and_allowed_methods() {
        let head = head(Status::MethodNotAllowed, "text/plain", Length::Bytes(7));
        assert!(head.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"));
        assert!(head.contains("\r\nContent-Length: 7\r\nAllow: GET, HEAD\r\n"));
        assert!(head.ends_with("\r\nConnection: close\r\n\r\n"));
    }
}

//! Parses HTTP request heads and writes response heads (RFC 9112), and selects the media type of the
//! status page by the `Accept` fields of a request (RFC 9110, section 12.5.1).
//!
//! Each connection has one request, and request bodies are ignored. Paths and their content are in
//! [`http_conn`](super::http_conn).

use percent_encoding::percent_decode_str;
use std::fmt::Display;

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
    /// The media type that `format` in the query names, or else the one that the client prefers.
    pub media_type: MediaType,
    /// True for HEAD: only the response head is sent.
    pub head_only: bool,
    /// True for HTTP/1.1: the client accepts a chunked response.
    pub takes_chunks: bool,
}

/// The status of a response, and its body: a line for people who use a browser.
pub type Response = (&'static str, &'static str);

pub const OK: &str = "200 OK";
pub const UNAVAILABLE: &str = "503 Service Unavailable";
const METHOD_NOT_ALLOWED: &str = "405 Method Not Allowed";
const BAD_REQUEST: Response =
    ("400 Bad Request", "The request is not valid HTTP/1.0 or HTTP/1.1.\n");
const HEAD_TOO_LARGE: Response = (
    "431 Request Header Fields Too Large",
    "The request head is longer than 4096 bytes or has more than 64 fields.\n",
);

/// Returns the request at the start of `bytes`, `None` while its head is incomplete, or the answer to an
/// invalid request.
pub fn parse(bytes: &[u8]) -> Result<Option<Request<'_>>, Response> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut head = httparse::Request::new(&mut fields);
    match head.parse(&bytes[..bytes.len().min(HEAD_MAX)]) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_MAX => return Ok(None),
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Err(HEAD_TOO_LARGE);
        }
        Err(_) => return Err(BAD_REQUEST),
    }
    let head_only = match head.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Err((METHOD_NOT_ALLOWED, "The methods are GET and HEAD.\n")),
    };
    let target = head.path.ok_or(BAD_REQUEST)?;
    // Requests to a proxy have an absolute target (RFC 9112, section 3.2.2).
    let target = target
        .strip_prefix("http://")
        .map_or(target, |rest| rest.find('/').map_or("/", |path_at| &rest[path_at..]));
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let accepted = head.headers.iter().filter(|field| field.name.eq_ignore_ascii_case("Accept"));
    let media_type = match query_value(query, "format").as_deref() {
        Some("html") => MediaType::Html,
        Some("text") => MediaType::Text,
        Some("json") => MediaType::Json,
        Some(_) | None => MediaType::preferred(accepted.map(|field| field.value)),
    };
    let takes_chunks = head.version == Some(1);
    Ok(Some(Request { path, query, media_type, head_only, takes_chunks }))
}

/// Returns a response head. `framing` and `fields` are whole lines. The connection closes after the
/// response.
pub fn head(status: &str, media_type: &str, framing: impl Display, fields: &str) -> String {
    let allow = if status == METHOD_NOT_ALLOWED { "Allow: GET, HEAD\r\n" } else { "" };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\n{framing}{allow}{fields}\
         Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
}

/// Returns the value of a field of a query, as an HTML form sends it: `+` is a space.
pub fn query_value(query: &str, name: &str) -> Option<String> {
    let mut fields = query.split('&').filter_map(|field| field.split_once('='));
    let (_, value) = fields.find(|&(other, _)| other == name)?;
    Some(percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned())
}

/// The media type of all responses but pages, and of pages as text.
pub const TEXT_TYPE: &str = "text/plain; charset=utf-8";

/// The media types of the status page. Of types with equal quality the first is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaType {
    Html,
    Text,
    Json,
}

impl MediaType {
    /// Returns the media ranges that match this type, the most specific last, and the value of the field
    /// `Content-Type`.
    pub fn names(self) -> ([&'static str; 3], &'static str) {
        match self {
            MediaType::Html => (["*/*", "text/*", "text/html"], "text/html; charset=utf-8"),
            MediaType::Text => (["*/*", "text/*", "text/plain"], TEXT_TYPE),
            MediaType::Json => (["*/*", "application/*", "application/json"], "application/json"),
        }
    }

    /// Returns the type that a client with these `Accept` fields prefers. If it accepts none of
    /// them, it gets HTML: section 12.5.1 allows a response that ignores the field.
    fn preferred<'h>(fields: impl Iterator<Item = &'h [u8]> + Clone) -> MediaType {
        // Of equal ones the last counts.
        let types = [MediaType::Json, MediaType::Text, MediaType::Html];
        let preferred = types.into_iter().max_by_key(|own| own.quality(fields.clone()));
        preferred.unwrap_or(MediaType::Html)
    }

    /// Returns the quality of this type in thousandths: that of the most specific range that matches it.
    fn quality<'h>(self, fields: impl Iterator<Item = &'h [u8]>) -> u32 {
        let ranges = fields.filter_map(|field| std::str::from_utf8(field).ok());
        let matching = ranges.flat_map(|field| field.split(',')).filter_map(|range| {
            let mut parts = range.split(';').map(str::trim);
            let name = parts.next()?;
            let (own, _) = self.names();
            let specificity = own.iter().position(|own| own.eq_ignore_ascii_case(name))?;
            let quality = parts.find_map(|part| part.strip_prefix(['q', 'Q'])?.strip_prefix('='));
            Some((specificity, thousandths(quality.unwrap_or("1")).unwrap_or(0)))
        });
        matching.max_by_key(|&(specificity, _)| specificity).map_or(0, |(_, quality)| quality)
    }
}

/// Returns a quality, which has three decimals that count (RFC 9110, section 12.4.2), in thousandths.
fn thousandths(quality: &str) -> Option<u32> {
    let (whole, decimals) = quality.split_once('.').unwrap_or((quality, ""));
    let number = format!("{whole}{decimals:0<3.3}").parse().ok();
    number.filter(|&it| it <= 1000)
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
            (b"GET /?format=xml HTTP/1.1\r\n\r\n", "/", "format=xml", false, true),
        ] {
            let media_type = MediaType::Html;
            let request = Request { path, query, media_type, head_only, takes_chunks };
            assert_eq!(parse(bytes), Ok(Some(request)), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn invalid_requests_have_an_answer() {
        let status = |bytes: &[u8]| parse(bytes).expect_err("it is invalid").0;
        let post = b"POST /metrics HTTP/1.1\r\nContent-Length: 1\r\n\r\nx";
        assert_eq!(status(post), METHOD_NOT_ALLOWED);
        for bytes in
            [&b"GET /metrics HTTP/2.0\r\n\r\n"[..], b"put 0 0 9 1\r\na\r\n", b"\x16\x03\x01"]
        {
            assert_eq!(parse(bytes), Err(BAD_REQUEST), "{}", bytes.escape_ascii());
        }
        let long = [b"GET /", &[b'x'; HEAD_MAX][..]].concat();
        assert_eq!(parse(&long), Err(HEAD_TOO_LARGE));
        let lines = [b"GET /metrics HTTP/1.1\r\n", &b"a: b\r\n".repeat(65)[..], b"\r\n"].concat();
        assert_eq!(parse(&lines), Err(HEAD_TOO_LARGE));
    }

    #[test]
    fn a_query_has_named_values() {
        let query = "sort=-ready&filter=a%2Bb+c%26&filter=later&empty=&cut=%4&odd=%zz%41";
        assert_eq!(query_value(query, "sort").as_deref(), Some("-ready"));
        assert_eq!(query_value(query, "filter").as_deref(), Some("a+b c&"));
        assert_eq!(query_value(query, "empty").as_deref(), Some(""));
        assert_eq!(query_value(query, "cut").as_deref(), Some("%4"));
        assert_eq!(query_value(query, "odd").as_deref(), Some("%zzA"));
        assert_eq!(query_value(query, "a"), None);
        assert_eq!(query_value("", ""), None);
    }

    #[test]
    fn the_preferred_type_is_sent() {
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8";
        for (accept, expected) in [
            (&[][..], MediaType::Html),
            (&["*/*"], MediaType::Html),
            (&[browser], MediaType::Html),
            (&["text/*"], MediaType::Html),
            (&["text/plain"], MediaType::Text),
            (&["Text/Plain;charset=utf-8"], MediaType::Text),
            (&["application/json"], MediaType::Json),
            (&["application/*, text/plain;q=0.5"], MediaType::Json),
            (&["text/html;q=0.5, text/plain ; q=0.75"], MediaType::Text),
            (&["text/html;q=0.5", "application/json;q=0.6"], MediaType::Json),
            (&["text/html;q=0, */*;q=0.1"], MediaType::Text),
            (&["*/*;q=0.9, text/html;q=0.1"], MediaType::Text),
            (&["text/plain;q=x, text/html;q=0.001"], MediaType::Html),
            (&["text/plain;q=nan, application/json;q=2, text/html;q=0.1"], MediaType::Html),
            (&["text/html;q=.3333", "text/plain;q=0.3341"], MediaType::Text),
            (&["image/png"], MediaType::Html),
            (&["text/plain;q=0"], MediaType::Html),
            (&["text"], MediaType::Html),
            (&[",;/,"], MediaType::Html),
        ] {
            let fields = accept.iter().map(|field| field.as_bytes());
            assert_eq!(MediaType::preferred(fields), expected, "{accept:?}");
        }
        let invalid: [&[u8]; 2] = [b"\xff", b"text/plain"];
        assert_eq!(MediaType::preferred(invalid.into_iter()), MediaType::Text);
    }
}

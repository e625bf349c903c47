//! One job as a line of JSON, in the form of `beanstalkd --dump`. It must not know a server.

use super::conn::Fields;
use super::print::{json_body, json_string};
use super::transfer::{DEFAULT_PRI, DEFAULT_TTR, is_key};
use crate::engine::text::is_tube_name;
use std::collections::HashMap;

/// A job of a line, as it can be put.
#[derive(Debug, PartialEq, Eq)]
pub struct Dumped {
    pub tube: Option<String>,
    pub pri: u32,
    /// The rest of its delay, in seconds.
    pub delay: u32,
    pub ttr: u32,
    pub key: Option<String>,
    pub body: Vec<u8>,
}

const NANOS: u64 = 1_000_000_000;

/// Returns a job as a line. `now` is the time of day, in ns.
pub fn line(job: &Fields, body: &[u8], now: u64) -> String {
    let number = |key: &str| (key.to_owned(), job.number(key).to_string());
    let text = |key: &str| (key.to_owned(), json_string(job.text(key)));
    let created_at = now.saturating_sub(job.number("age") * NANOS);
    let mut pairs = vec![number("id"), text("tube"), text("state")];
    pairs.extend(["pri", "delay", "ttr"].map(number));
    pairs.push(("created_at_ns".into(), created_at.to_string()));
    if job.text("state") == "delayed" {
        let due = now + job.number("time-left") * NANOS;
        pairs.push(("due_at_ns".into(), due.to_string()));
    }
    pairs.extend(["reserves", "timeouts", "releases", "buries", "kicks"].map(number));
    pairs.push(json_body(body));
    Fields(pairs).to_string()
}

/// Parses a line. An error names the member that is not valid.
pub fn parse(line: &str, now: u64) -> Result<Dumped, String> {
    let object = object(line).ok_or("not a JSON object without objects in it")?;
    let text = |key: &str| {
        let text = |value: &String| value.strip_prefix('"').map(str::to_owned);
        object.get(key).map(|value| text(value).ok_or(format!("{key} is no string"))).transpose()
    };
    let number = |key: &str, default: u32| {
        let number =
            |value: &String| value.parse::<u64>().map_err(|_| format!("{key} is no number"));
        object.get(key).map_or(Ok(default.into()), number)
    };
    let small = |key: &str, default| {
        u32::try_from(number(key, default)?).map_err(|_| format!("{key} is too large"))
    };
    let body = match (text("body")?, text("body_base64")?) {
        (Some(body), None) => body.into_bytes(),
        (None, Some(body)) => from_base64(&body).ok_or("body_base64 is not base64")?,
        _ => return Err("needs body or body_base64".into()),
    };
    let delay = match (text("state")?.as_deref(), number("due_at_ns", 0)?) {
        (None, _) | (Some("delayed"), 0) => small("delay", 0)?,
        (Some("delayed"), due) => {
            u32::try_from(due.saturating_sub(now).div_ceil(NANOS)).unwrap_or(u32::MAX)
        }
        // The delay of a former put or release is over.
        (Some(_), _) => 0,
    };
    let (tube, key) = (text("tube")?, text("key")?);
    if tube.as_ref().is_some_and(|tube| !is_tube_name(tube.as_bytes())) {
        return Err("tube is not a name of a tube".into());
    }
    if key.as_ref().is_some_and(|key| !is_key(key, 0)) {
        return Err("key is not a key".into());
    }
    let (pri, ttr) = (small("pri", DEFAULT_PRI)?, small("ttr", DEFAULT_TTR)?);
    Ok(Dumped { tube, pri, delay, ttr, key, body })
}

/// Parses a JSON object (RFC 8259) whose values are strings, numbers and words. A string begins with a
/// quote.
fn object(text: &str) -> Option<HashMap<String, String>> {
    let mut rest = text.trim().strip_prefix('{')?.trim_start();
    let mut object = HashMap::new();
    while !rest.starts_with('}') {
        if !object.is_empty() {
            rest = rest.strip_prefix(',')?.trim_start();
        }
        let key = string(&mut rest)?;
        rest = rest.trim_start().strip_prefix(':')?.trim_start();
        let value = if rest.starts_with('"') {
            format!("\"{}", string(&mut rest)?)
        } else {
            let word;
            (word, rest) = rest.split_at(rest.find([',', '}', ' ', '\t'])?);
            let is_number = word.starts_with(|char: char| char.is_ascii_digit() || char == '-');
            let is_word = ["null", "true", "false"].contains(&word);
            (is_word || is_number && word.parse::<f64>().is_ok()).then(|| word.to_owned())?
        };
        // Of two values with the same key, one would be lost.
        object.insert(key, value).is_none().then_some(())?;
        rest = rest.trim_start();
    }
    (rest == "}").then_some(object)
}

/// Parses the string at the beginning of `rest`, which is then what follows.
fn string(rest: &mut &str) -> Option<String> {
    let text = rest.strip_prefix('"')?;
    let mut parsed = String::new();
    let mut chars = text.chars();
    loop {
        match chars.next()? {
            '"' => break,
            '\\' => parsed.push(match chars.next()? {
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'b' => '\x08',
                'f' => '\x0c',
                'u' => match code_unit(&mut chars)? {
                    high @ 0xd800..0xdc00 => {
                        let is_pair = chars.next()? == '\\' && chars.next()? == 'u';
                        let low =
                            code_unit(&mut chars).filter(|unit| (0xdc00..0xe000).contains(unit))?;
                        let code = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
                        char::from_u32(code).filter(|_| is_pair)?
                    }
                    unit => char::from_u32(unit)?,
                },
                char @ ('"' | '\\' | '/') => char,
                _ => return None,
            }),
            char if char < ' ' => return None,
            char => parsed.push(char),
        }
    }
    *rest = chars.as_str();
    Some(parsed)
}

fn code_unit(chars: &mut std::str::Chars<'_>) -> Option<u32> {
    (0..4).try_fold(0, |unit, _| Some(unit << 4 | chars.next()?.to_digit(16)?))
}

/// Parses base64 (RFC 4648, section 4).
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    const ALPHABET: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for four in digits.as_bytes().chunks(4) {
        let mut bits: u32 = 0;
        for &digit in four {
            bits = bits << 6 | u32::try_from(ALPHABET.find(char::from(digit))?).ok()?;
        }
        bits <<= 6 * (4 - four.len());
        bytes.extend_from_slice(&bits.to_be_bytes()[1..four.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(line: &str) -> Result<Dumped, String> {
        parse(line, 100 * NANOS)
    }

    #[test]
    fn a_line_that_is_printed_is_parsed_again() {
        let all: Vec<u8> = (0..=255).collect();
        let fields = "{id: 7, tube: \"mail\", state: delayed, pri: 3, age: 5, delay: 60, ttr: 9, time-left: 20}";
        let (jobs, _) = Fields::of_entries(&format!("jobs:\n- {fields}\n"));
        for body in [&b""[..], b"a", b"\xff", b"\xff\xfe", "\"\\\n\u{1}\u{1f600}".as_bytes(), &all]
        {
            let line = line(&jobs[0], body, 100 * NANOS);
            let tube = Some("mail".into());
            let job = Dumped { tube, pri: 3, delay: 20, ttr: 9, key: None, body: body.into() };
            assert_eq!(put(&line), Ok(job), "{line}");
        }
    }

    #[test]
    fn lines_by_hand_have_defaults() {
        let (pri, ttr) = (DEFAULT_PRI, DEFAULT_TTR);
        let job =
            Dumped { tube: None, pri, delay: 0, ttr, key: None, body: b"\xf0\x9f\x98\x80/".into() };
        assert_eq!(put(r#" { "body" : "\ud83d\ude00\/" , "x": null , "y":-1.5}"#), Ok(job));
        assert_eq!(put(r#"{"body":"","delay":5}"#).unwrap().delay, 5);
        assert_eq!(put(r#"{"body":"","delay":5,"state":"buried"}"#).unwrap().delay, 0);
        assert_eq!(put(r#"{"body":"","state":"delayed","due_at_ns":1}"#).unwrap().delay, 0);
        assert_eq!(put(r#"{"body":"","key":"a"}"#).unwrap().key, Some("a".into()));
    }

    #[test]
    fn bad_lines_are_rejected() {
        let lines = [
            "",
            "x",
            "{}",
            r#"{"body":"a""#,
            r#"{"body":"a"} x"#,
            r#"{"body":1}"#,
            r#"{"body":"a","body":"b"}"#,
            r#"{"body":"a","pri":4294967296}"#,
            r#"{"body":"a","pri":"1"}"#,
            r#"{"body":"a","tube":"a b"}"#,
            r#"{"body":"a","key":"a b"}"#,
            r#"{"body":"\x"}"#,
            r#"{"body":"\ud83d"}"#,
            r#"{"body":"a","x":[1]}"#,
            r#"{"body_base64":"a"}"#,
            r#"{"body_base64":"a==="}"#,
            r#"{"body_base64":"!!!!"}"#,
            r#"{"body":"a","body_base64":""}"#,
            r#"{"body":"a",}"#,
        ];
        for line in lines {
            assert!(put(line).is_err(), "{line}");
        }
    }
}

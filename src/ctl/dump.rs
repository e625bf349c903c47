//! One job as a line of JSON, in the form of `beanstalkd --dump`. It must not know a server.

use super::conn::Fields;
use super::transfer::{DEFAULT_PRI, DEFAULT_TTR, delay_left, tag};
use crate::engine::text::is_tube_name;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

/// A job of a line, as it can be put.
#[derive(Debug, PartialEq, Eq)]
pub struct Dumped {
    pub tube: Option<String>,
    pub pri: u32,
    /// The rest of its delay, in seconds.
    pub delay: u32,
    pub ttr: u32,
    /// Its keys, as a put has them.
    pub tags: String,
    pub body: Vec<u8>,
}

const NANOS: u64 = 1_000_000_000;

/// Returns a job as a line. `now` is the time of day, in ns.
pub fn line(job: &Fields, body: &[u8], now: u64) -> Fields {
    let copies = |keys: &'static [&str]| {
        job.0.iter().filter(|(key, _)| keys.contains(&key.as_str())).cloned()
    };
    let mut line = Fields(copies(&["id", "tube", "state", "pri", "delay", "ttr"]).collect());
    line.push("created_at_ns", now.saturating_sub(job.number("age") * NANOS));
    let left = delay_left(job);
    if left > 0 {
        line.push("due_at_ns", now + left * NANOS);
    }
    line.0.extend(copies(&["reserves", "timeouts", "releases", "buries", "kicks"]));
    line.push_body(body);
    line
}

/// Parses a line. An error names the member that is not valid.
pub fn parse(line: &str, now: u64) -> Result<Dumped, String> {
    let object: Map<String, Value> = serde_json::from_str(line).map_err(|error| {
        // It would name a line of its own.
        let error = error.to_string();
        format!("not a JSON object: {}", error.split(" at line").next().unwrap_or_default())
    })?;
    let text = |key: &str| {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        object.get(key).map(|value| text(value).ok_or(format!("{key} is no string"))).transpose()
    };
    let number = |key: &str, default: u32| {
        let number = |value: &Value| value.as_u64().ok_or(format!("{key} is no number"));
        object.get(key).map_or(Ok(default.into()), number)
    };
    let small = |key: &str, default| {
        u32::try_from(number(key, default)?).map_err(|_| format!("{key} is too large"))
    };
    let body = match (text("body")?, text("body_base64")?) {
        (Some(body), None) => body.into_bytes(),
        (None, Some(body)) => STANDARD.decode(body).map_err(|_| "body_base64 is not base64")?,
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
    let tube = text("tube")?;
    if tube.as_ref().is_some_and(|tube| !is_tube_name(tube.as_bytes())) {
        return Err("tube is not a name of a tube".into());
    }
    let limit = format!(":{}", small("limit", 1)?);
    let mut tags = String::new();
    for (member, word, limit) in [("key", "idp", ""), ("con", "con", &limit)] {
        let Some(key) = text(member)? else { continue };
        tags += &tag(word, &(key + limit)).ok_or(format!("{member} is not a key"))?;
    }
    let (pri, ttr) = (small("pri", DEFAULT_PRI)?, small("ttr", DEFAULT_TTR)?);
    Ok(Dumped { tube, pri, delay, ttr, tags, body })
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
        let fields = "id: 7, tube: \"mail\", state: delayed, pri: 3, age: 5, delay: 60, ttr: 9, time-left: 20";
        let job = Fields::parse(fields.split(", "));
        for body in [&b""[..], b"a", b"\xff", b"\xff\xfe", "\"\\\n\u{1}\u{1f600}".as_bytes(), &all]
        {
            let line = line(&job, body, 100 * NANOS).to_string();
            let tube = Some("mail".into());
            let dumped =
                Dumped { tube, pri: 3, delay: 21, ttr: 9, tags: String::new(), body: body.into() };
            assert_eq!(put(&line), Ok(dumped), "{line}");
        }
    }

    #[test]
    fn lines_by_hand_have_defaults() {
        let (pri, ttr) = (DEFAULT_PRI, DEFAULT_TTR);
        let (body, tags) = (b"\xf0\x9f\x98\x80/".into(), String::new());
        let job = Dumped { tube: None, pri, delay: 0, ttr, tags, body };
        assert_eq!(put(r#" { "body" : "\ud83d\ude00\/" , "x": null , "y":[-1.5]}"#), Ok(job));
        assert_eq!(put(r#"{"body":"","delay":5}"#).unwrap().delay, 5);
        assert_eq!(put(r#"{"body":"","delay":5,"state":"buried"}"#).unwrap().delay, 0);
        assert_eq!(put(r#"{"body":"","state":"delayed","due_at_ns":1}"#).unwrap().delay, 0);
        let late = r#"{"body":"","state":"delayed","due_at_ns":101000000001}"#;
        assert_eq!(put(late).unwrap().delay, 2);
        assert_eq!(put(r#"{"body":"","key":"a"}"#).unwrap().tags, " idp:a");
        let keys = r#"{"body":"","con":"b","limit":2,"key":"a:60"}"#;
        assert_eq!(put(keys).unwrap().tags, " idp:a:60 con:b:2");
        assert_eq!(put(r#"{"body":"","con":"b"}"#).unwrap().tags, " con:b:1");
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
            r#"{"body":"a","pri":4294967296}"#,
            r#"{"body":"a","pri":"1"}"#,
            r#"{"body":"a","tube":"a b"}"#,
            r#"{"body":"a","key":"a b"}"#,
            r#"{"body":"a","con":"a b"}"#,
            r#"{"body":"a","con":"a","limit":0}"#,
            r#"{"body":"\x"}"#,
            r#"{"body":"\ud83d"}"#,
            r#"["body"]"#,
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

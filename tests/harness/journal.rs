//! Jobs as clients see them.

use super::instance::Instance;
use super::reply::frame;
use super::yaml::{field, number};

/// A job as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub tube: String,
    pub body: String,
    pub pri: u32,
    pub delay_secs: u32,
    pub ttr_secs: u32,
    pub state: String,
    /// reserves, timeouts, releases, buries, kicks
    pub counts: [u32; 5],
}

impl View {
    /// Reads a job with `stats-job` and `peek`; `ask` returns the body of a reply, or `None` for
    /// NOT_FOUND.
    pub fn read(mut ask: impl FnMut(&str) -> Option<String>, id: u64) -> Option<View> {
        let stats = ask(&format!("stats-job {id}\r\n"))?;
        let body = ask(&format!("peek {id}\r\n"))?;
        let count = |key: &str| u32::try_from(number(&stats, key)).expect("it has 32 bits");
        Some(View {
            tube: field(&stats, "tube")?.to_owned(),
            body,
            pri: count("pri"),
            delay_secs: count("delay"),
            ttr_secs: count("ttr"),
            state: field(&stats, "state")?.to_owned(),
            counts: ["reserves", "timeouts", "releases", "buries", "kicks"].map(count),
        })
    }

    /// Reads a job of an instance.
    pub fn of(instance: &mut Instance, id: u64) -> Option<View> {
        let ask = |request: &str| {
            let reply = instance.ask_now(request);
            let body = frame(reply.as_bytes()).expect("the reply is whole").body?;
            Some(String::from_utf8(body.to_vec()).expect("bodies are text"))
        };
        View::read(ask, id)
    }
}

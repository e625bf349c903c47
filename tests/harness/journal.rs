//! A record of what a client asked for and what was acknowledged, to judge what a crash has left.
//! It shares no code with the engine.

use super::engine::Instance;
use super::reply::frame;
use super::yaml::{field, number};
use beanstalkd::testing::Nanos;
use std::collections::BTreeMap;

/// A job as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub tube: String,
    pub body: String,
    pub pri: u32,
    pub delay_secs: u32,
    pub ttr_secs: u32,
    pub state: String,
    /// The moment at which a delayed job is due; in a view that was read, the time until then.
    pub due: Nanos,
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
            due: Nanos::from_secs(count("time-left")),
            counts: ["reserves", "timeouts", "releases", "buries", "kicks"].map(count),
        })
    }

    /// Reads a job of an instance.
    pub fn of(instance: &mut Instance, id: u64) -> Option<View> {
        let ask = |request: &str| {
            let reply = instance.ask(request);
            let body = frame(reply.as_bytes()).expect("the reply is whole").body?;
            Some(String::from_utf8(body.to_vec()).expect("bodies are text"))
        };
        View::read(ask, id)
    }
}

/// Everything that has become of each job, in order.
#[derive(Debug, Default)]
pub struct Journal {
    pub jobs: BTreeMap<u64, Vec<Event>>,
    pub safe: Safe,
    /// What was acknowledged when the background sync was begun.
    begun: BTreeMap<u64, usize>,
}

/// For each job, the index of the last event that no crash may take back. After a crash the job is
/// as that event or a later one left it. Events that the binlog does not record are never safe.
#[derive(Clone, Debug, Default)]
pub struct Safe {
    /// When only the process ends.
    pub acknowledged: BTreeMap<u64, usize>,
    /// When the power fails.
    pub durable: BTreeMap<u64, usize>,
}

/// The job after a command, or `None` if it is gone.
#[derive(Debug)]
pub struct Event {
    pub view: Option<View>,
    pub is_recorded: bool,
}

impl Journal {
    pub fn add(&mut self, id: u64, view: Option<View>) {
        let nothing = || vec![Event { view: None, is_recorded: true }];
        self.jobs.entry(id).or_insert_with(nothing).push(Event { view, is_recorded: true });
    }

    pub fn add_unrecorded(&mut self, id: u64, view: View) {
        let events = self.jobs.get_mut(&id).expect("a job is put first");
        events.push(Event { view: Some(view), is_recorded: false });
    }

    /// Notes that all replies have arrived, and whether their records were synced.
    pub fn acknowledge(&mut self, is_durable: bool) {
        for (&id, events) in &self.jobs {
            let last = events.iter().rposition(|event| event.is_recorded);
            self.safe.acknowledged.insert(id, last.expect("the first event is recorded"));
        }
        if is_durable {
            self.safe.durable = self.safe.acknowledged.clone();
        }
    }

    /// Notes that a sync was begun after the last replies.
    pub fn begin_sync(&mut self) {
        self.begun = self.safe.acknowledged.clone();
    }

    /// Notes that it has ended.
    pub fn end_sync(&mut self) {
        self.safe.durable = std::mem::take(&mut self.begun);
    }

    /// Asserts that each job is as a safe event or a later one left it. `safe` is one half of a
    /// [`Safe`].
    pub fn judge(&self, safe: &BTreeMap<u64, usize>, instance: &mut Instance, when: &str) {
        for (id, events) in &self.jobs {
            let first = safe.get(id).copied().unwrap_or(0);
            let found = View::of(instance, *id);
            let now = instance.now;
            let is_allowed = events[first..].iter().any(|event| is_same(&event.view, &found, now));
            assert!(
                is_allowed,
                "{when}: job {id} is {found:?}, but should be one of {:?}",
                &events[first..]
            );
        }
        let last_id = safe.iter().filter(|(_, first)| **first > 0).map(|(&id, _)| id).max();
        let next = instance.put("next");
        assert!(next > last_id, "{when}: id {next:?} is assigned after {last_id:?}");
    }

    pub fn last(&self, id: u64) -> Option<&View> {
        self.jobs.get(&id)?.last()?.view.as_ref()
    }
}

/// Returns whether a view that was read at `now` is the expected one.
pub fn is_same(expected: &Option<View>, found: &Option<View>, now: Nanos) -> bool {
    let (Some(expected), Some(found)) = (expected, found) else {
        return expected.is_none() && found.is_none();
    };
    let mut expected = expected.clone();
    if expected.state == "delayed" && expected.due > now {
        // The server reports whole seconds.
        let seconds = u32::try_from(expected.due.secs_left(now)).expect("delays are u32");
        expected.due = Nanos::from_secs(seconds);
    } else {
        expected.due = Nanos::ZERO;
        if expected.state == "delayed" {
            "ready".clone_into(&mut expected.state);
        }
    }
    expected == *found
}

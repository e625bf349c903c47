//! A chapter of the model: what it says, and the documents. What it cannot know it reads off what was
//! really said, where that is one of the things that may be said.

use super::super::words::COUNTERS;
use super::{ClientNumber, Counts, Job, Model, Place, SECOND, Tube};
use std::collections::BTreeMap;
use std::rc::Rc;

impl Model {
    // ---- Speaking ----

    pub(super) fn say(&mut self, number: ClientNumber, line: &str) {
        self.say_bytes(number, line.as_bytes());
    }

    pub(super) fn say_bytes(&mut self, number: ClientNumber, bytes: &[u8]) {
        let output = &mut self.client(number).output;
        output.extend_from_slice(bytes);
        output.extend_from_slice(b"\r\n");
    }

    pub(super) fn say_watching(&mut self, number: ClientNumber) {
        let line = format!("WATCHING {}", self.clients[&number].watched.len());
        self.say(number, &line);
    }

    pub(super) fn say_job(&mut self, number: ClientNumber, word: &str, id: u64) {
        let body = Rc::clone(&self.job(id).body);
        self.say(number, &format!("{word} {id} {}", body.len()));
        self.say_bytes(number, &body);
        // Large ones are not copied.
        let len = body.len() + 2;
        self.said += if len <= 4098 { len } else { len / 16 };
    }

    /// The first job of the used tube that has such a rank.
    pub(super) fn say_first<R: Ord>(
        &mut self,
        number: ClientNumber,
        rank: impl Fn(&Job, &str) -> Option<R>,
    ) {
        let first = self.in_order(|job| rank(job, &self.clients[&number].used)).first().copied();
        self.say_found(number, first);
    }

    pub(super) fn say_found(&mut self, number: ClientNumber, id: Option<u64>) {
        match id {
            Some(id) => self.say_job(number, "FOUND", id),
            None => self.say(number, "NOT_FOUND"),
        }
    }

    pub(super) fn say_document(&mut self, number: ClientNumber, text: &str) {
        self.say(number, &format!("OK {}", text.len()));
        self.say(number, text);
        self.said += text.len();
    }

    pub(super) fn say_stats_job(&mut self, number: ClientNumber, id: u64, now: u64) {
        let Some(job) = self.find(id) else { return self.say(number, "NOT_FOUND") };
        let left = |at: u64| at.saturating_sub(now) / SECOND;
        let (state, time_left) = match job.place {
            Place::Ready => ("ready", 0),
            Place::Delayed { due } => ("delayed", left(due)),
            Place::Reserved { deadline, .. } => ("reserved", left(deadline)),
            Place::Buried { .. } => ("buried", 0),
        };
        let heard = |key: &str| self.figure_heard(number, key);
        let file = if self.rules.has_binlog { heard("file") } else { 0 };
        let age = if job.is_age_unknown {
            heard("age")
        } else {
            now.saturating_sub(job.created) / SECOND
        };
        let Job { tube, pri, delay, ttr, .. } = job;
        let Counts { reserves, timeouts, releases, buries, kicks } = job.counts;
        let text = format!(
            "---\nid: {id}\ntube: \"{tube}\"\nstate: {state}\npri: {pri}\nage: {age}\n\
             delay: {delay}\nttr: {ttr}\ntime-left: {time_left}\nfile: {file}\n\
             reserves: {reserves}\ntimeouts: {timeouts}\nreleases: {releases}\n\
             buries: {buries}\nkicks: {kicks}\n"
        );
        self.say_document(number, &text);
    }

    pub(super) fn say_stats_tube(&mut self, number: ClientNumber, name: &str, now: u64) {
        let Some(tube) = self.tubes.iter().find(|tube| *tube.name == *name) else {
            return self.say(number, "NOT_FOUND");
        };
        let [urgent, ready, reserved, delayed, buried] = self.sums(|job| job.tube == tube.name);
        let clients = || self.clients.values();
        let using = clients().filter(|client| client.used == tube.name).count();
        let watching = clients().filter(|client| client.watches(name)).count();
        let waiting =
            clients().filter(|client| client.watches(name) && client.is_waiting()).count();
        let (pause, left) =
            tube.pause.map_or((0, 0), |(secs, until)| (secs, until.saturating_sub(now) / SECOND));
        let Tube { total_jobs, deletes, pauses, .. } = tube;
        let text = format!(
            "---\nname: \"{name}\"\ncurrent-jobs-urgent: {urgent}\ncurrent-jobs-ready: {ready}\n\
             current-jobs-reserved: {reserved}\ncurrent-jobs-delayed: {delayed}\n\
             current-jobs-buried: {buried}\ntotal-jobs: {total_jobs}\ncurrent-using: {using}\n\
             current-watching: {watching}\ncurrent-waiting: {waiting}\ncmd-delete: {deletes}\n\
             cmd-pause-tube: {pauses}\npause: {pause}\npause-time-left: {left}\n"
        );
        self.say_document(number, &text);
    }

    pub(super) fn say_stats(&mut self, number: ClientNumber, now: u64) {
        let [urgent, ready, reserved, delayed, buried] = self.sums(|_| true);
        let mut text = format!(
            "---\ncurrent-jobs-urgent: {urgent}\ncurrent-jobs-ready: {ready}\n\
             current-jobs-reserved: {reserved}\ncurrent-jobs-delayed: {delayed}\n\
             current-jobs-buried: {buried}\n"
        );
        for word in COUNTERS {
            text += &format!("cmd-{word}: {}\n", self.counts.get(word).unwrap_or(&0));
        }
        let clients = || self.clients.values();
        text += &format!(
            "job-timeouts: {}\ntotal-jobs: {}\nmax-job-size: {}\ncurrent-tubes: {}\n\
             current-connections: {}\ncurrent-producers: {}\ncurrent-workers: {}\n\
             current-waiting: {}\ntotal-connections: {}\npid: 7\nversion: \"1.13\"\n\
             rusage-utime: 0.000000\nrusage-stime: 0.000000\nuptime: {}\n",
            self.timeouts,
            self.total_jobs,
            self.rules.max_job_size,
            self.tubes.len(),
            self.clients.len(),
            clients().filter(|client| client.is_producer).count(),
            clients().filter(|client| client.is_worker).count(),
            clients().filter(|client| client.is_waiting()).count(),
            self.total_connections,
            (now - self.started_at) / SECOND,
        );
        for key in ["oldest-index", "current-index", "records-migrated", "records-written"] {
            let key = format!("binlog-{key}");
            let figure = if self.rules.has_binlog { self.figure_heard(number, &key) } else { 0 };
            text += &format!("{key}: {figure}\n");
        }
        text += &format!(
            "binlog-max-size: {}\ndraining: {}\nid: 0123456789abcdef\nhostname: \"host\"\n\
             os: \"version\"\nplatform: \"machine\"\n",
            self.rules.binlog_file_size, self.is_draining
        );
        self.say_document(number, &text);
    }

    /// How many jobs are urgent, ready, reserved, delayed and buried.
    pub(super) fn sums(&self, is_meant: impl Fn(&Job) -> bool) -> [usize; 5] {
        let mut sums = [0; 5];
        for job in self.jobs.iter().filter(|job| is_meant(job)) {
            match job.place {
                Place::Ready => {
                    sums[0] += usize::from(job.pri < 1024);
                    sums[1] += 1;
                }
                Place::Reserved { .. } => sums[2] += 1,
                Place::Delayed { .. } => sums[3] += 1,
                Place::Buried { .. } => sums[4] += 1,
            }
        }
        sums
    }

    // ---- Hints ----

    /// A turn begins; this is what is really said in it, as far as that is known: a hint for what
    /// cannot be predicted.
    pub fn hear(&mut self, heard: BTreeMap<ClientNumber, Vec<u8>>) {
        self.heard = heard;
        for client in self.clients.values_mut() {
            client.said_before = client.output.len();
        }
    }

    /// What was really said where the model goes on.
    pub(super) fn heard(&self, number: ClientNumber) -> &[u8] {
        let client = &self.clients[&number];
        let said = client.output.len() - client.said_before;
        self.heard.get(&number).and_then(|heard| heard.get(said..)).unwrap_or_default()
    }

    /// Whether the disk had no space for what the client asks, which may be.
    pub(super) fn is_refused(&self, number: ClientNumber) -> bool {
        self.is_space_short && self.heard(number).starts_with(b"OUT_OF_MEMORY\r\n")
    }

    pub(super) fn number_heard(&self, number: ClientNumber, word: &[u8]) -> Option<usize> {
        let rest = self.heard(number).strip_prefix(word)?;
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        str::from_utf8(&rest[..digits]).ok()?.parse().ok()
    }

    /// A figure of a document.
    pub(super) fn figure_heard(&self, number: ClientNumber, key: &str) -> u64 {
        let heard = self.heard(number);
        let line = format!("\n{key}: ");
        let at = heard.windows(line.len()).position(|window| window == line.as_bytes());
        let figure = at.and_then(|at| {
            let rest = &heard[at + line.len()..];
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            str::from_utf8(&rest[..digits]).ok()?.parse().ok()
        });
        figure.unwrap_or(0)
    }
}

pub(super) fn list<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let mut text = "---\n".to_owned();
    for name in names {
        text += &format!("- {name}\n");
    }
    text
}

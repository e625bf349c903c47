//! Crashes and restarts: which jobs the next process must find on the disk, and which it may find.

use super::super::event::Crash;
use super::super::journal::{End, FoundJob, Journal, Verdict};
use super::super::model::{Job, JobKey, KeptKey, Model, SECOND};
use super::super::request::command_named;
use super::{Commit, Failure, Simulation, TICK, nanos, options};
use crate::harness::driver::{
    Client, Driver, End as EndOfClient, Recovered, damage, is_of_first_file,
};
use crate::harness::reply::{Frame, frame};
use std::collections::{BTreeMap, BTreeSet};

/// The time from the end of a process to the start of the next one.
const DOWN_TIME: u64 = 2 * TICK;

impl Simulation {
    pub(super) fn restart(&mut self) -> Result<(), Failure> {
        if !self.setup.has_binlog() {
            return Ok(());
        }
        let starts = self.starts;
        self.end_iteration()?;
        if self.starts != starts {
            return Ok(());
        }
        let crash = match self.driver.stop() {
            Ok(()) => {
                self.send_last_replies()?;
                Crash { power_cut: None, flipped_bits: 0 }
            }
            Err(failure) => {
                let crash = self.crash_to_come.take();
                crash.ok_or_else(|| format!("close without a disk fault: {failure}"))?
            }
        };
        self.crash(crash)
    }

    /// Acknowledges all changes, and sends the replies that waited, as the event loop does before the
    /// server exits. A server that has lost the leadership sends nothing more.
    fn send_last_replies(&mut self) -> Result<(), Failure> {
        while !self.driver.sync_rest() {
            let before = self.disk.last_handed_over();
            self.disk.acknowledge(usize::MAX);
            let is_acknowledged = self.driver.sync_rest();
            if self.disk.is_refused() {
                return Ok(());
            }
            if !is_acknowledged && self.disk.last_handed_over() == before && self.disk.waiting() > 0
            {
                return Err("changes are not handed over before the server ends".to_owned());
            }
        }
        loop {
            self.hold_replies();
            let sent = self.driver.send_last();
            self.follow_sent(&sent)?;
            if sent.closed.is_empty() && sent.replies.iter().all(|(_, bytes)| bytes.is_empty()) {
                break;
            }
        }
        let is_unsent = |client: Client| {
            self.driver.room(client).is_none() && !self.driver.made(client).is_empty()
        };
        match self.sockets.iter().find(|(_, socket)| is_unsent(socket.client)) {
            Some((number, _)) => Err(format!("client {number}: its last replies are not sent")),
            None => Ok(()),
        }
    }

    pub(super) fn crash(&mut self, crash: Crash) -> Result<(), Failure> {
        if !self.setup.has_binlog() {
            return Ok(());
        }
        self.crash_to_come = None;
        // After a failed write the replies may differ, but records of the commands before may be on the disk.
        self.record_changes();
        self.had_disk_faults |= crash.flipped_bits > 0;
        let end = self.end(&self.disk, crash.power_cut);
        let flip_seed = crash.power_cut.unwrap_or(self.now());
        let mut power_cut = crash.power_cut.map(fastrand::Rng::with_seed);
        self.disk = self.disk.after_end(power_cut.as_mut());
        self.disk.flip_bits(&mut fastrand::Rng::with_seed(flip_seed), crash.flipped_bits);
        // The inspector expects each reply at once.
        self.disk.hold_reads(false);
        self.sockets.clear();
        self.numbers.clear();
        self.iterations_of_flush = 0;
        let now = self.now().saturating_add_signed(self.clock_offset) + DOWN_TIME;
        self.clock_offset = 0;
        self.starts += 1;
        self.start(crash, end, now.next_multiple_of(TICK))
    }

    fn start(&mut self, crash: Crash, end: End, now: u64) -> Result<(), Failure> {
        self.recover(now)?;
        let recovered = self.driver.recovered;
        let mut inspector = Inspector::default();
        inspector.connect(&mut self.driver);
        let mut jobs =
            judge(&self.journal, &mut self.driver, &mut inspector, end, crash.flipped_bits)?;
        // The model cannot know when these jobs were put or become due.
        for (id, found) in &jobs.unknown {
            if inspector.delete(&mut self.driver, *id, found.tube()) != "DELETED" {
                self.driver.end(inspector.client, EndOfClient::HangUp);
                self.set_capacity(None);
                // The next iteration tries to take space again.
                let committed = self.driver.commit();
                committed.map_err(|failure| format!("a commit at the start: {failure}"))?;
                inspector.connect(&mut self.driver);
                let reply = inspector.delete(&mut self.driver, *id, found.tube());
                if reply != "DELETED" {
                    return Err(format!("job {id} cannot be deleted with space: {reply:?}"));
                }
            }
        }
        let tubes = self.driver.tubes();
        let mut expected: BTreeSet<&str> =
            jobs.known.iter().map(|(_, possible)| &*possible[0].tube).collect();
        expected.insert("default");
        let names: Vec<&str> = tubes.iter().map(|name| &**name).collect();
        if names.iter().copied().collect::<BTreeSet<&str>>() != expected {
            return Err(format!("the tubes are {tubes:.20?}\n  expected: {expected:.20?}"));
        }
        // The keys of jobs may be lost, although the jobs are there.
        let is_damaged = crash.flipped_bits > 0 || end == End::PowerCut { synced_within: None };
        let is_unsure = is_damaged || self.disk.faults().capacity.is_some();
        let kept_keys = kept_keys(&self.journal, &jobs, end, is_unsure, now);
        for (id, possible) in &mut jobs.known {
            let is_unsure = is_damaged || !self.journal.is_put_durable(*id, end);
            let keys = possible.iter_mut().filter_map(|job| job.key.as_mut());
            keys.for_each(|key| key.is_unsure |= is_unsure);
        }
        let restored = jobs.known.iter().map(|(_, possible)| possible[0].at(now));
        let id = recovered.last_id;
        let mut model = self.model.restarted(restored.collect(), &names, id, now);
        let in_force = kept_keys.iter().filter(|key| key.until > now);
        model.kept_keys = in_force.cloned().collect();
        inspector.add_to(&mut model, inspector.now(&self.driver));
        self.driver.end(inspector.client, EndOfClient::HangUp);
        let committed = self.driver.commit();
        committed.map_err(|failure| format!("the first commit: {failure}"))?;
        let deleted: Vec<u64> = jobs.unknown.iter().map(|(id, _)| *id).collect();
        self.journal.restart(&jobs.known, &kept_keys, &deleted, now);
        // What was read is stored already.
        self.commits = vec![Commit { at: now, change: 0 }];
        self.has_failed_sync = false;
        model.may_refuse_updates = self.may_lack_space();
        model.may_refuse_deletes = self.has_capacity();
        // A damaged file cannot be continued: at the limit there may be no room for all deletes.
        self.may_exceed_limit = crash.flipped_bits > 0;
        self.model = model;
        self.disk.hold_reads(self.setup.has_threads);
        Ok(())
    }

    /// Starts a server on what a kill or a power cut would have left at each step of the disk since the last
    /// call, and judges its jobs, if the run asks for it. A kill leaves no damage.
    pub(super) fn judge_each_step(&self) -> Result<(), Failure> {
        let history = if self.judges_steps { self.disk.take_history() } else { Vec::new() };
        for disk in history {
            let seed = disk.counts().changes;
            let after_power_cut = disk.after_end(Some(&mut fastrand::Rng::with_seed(seed)));
            let ends = [Some(seed), None].map(|power_cut| self.end(&disk, power_cut));
            for (mut disk, end) in [after_power_cut, disk].into_iter().zip(ends) {
                let report = if end == End::Killed { damage(&mut disk) } else { None };
                if let Some(report) = report {
                    return Err(format!("a kill has damaged the files: {report}"));
                }
                let driver =
                    Driver::start(options(&self.setup), Some(disk.boxed()), self.driver.now);
                let mut driver = driver.map_err(|error| format!("after a step: {error}"))?;
                let mut inspector = Inspector::default();
                inspector.connect(&mut driver);
                judge(&self.journal, &mut driver, &mut inspector, end, 0)?;
            }
        }
        Ok(())
    }

    /// Starts a server on the files of the disk. If it does not start on a full disk, it is started
    /// again with more space.
    fn recover(&mut self, now: u64) -> Result<(), Failure> {
        let start =
            |it: &Simulation| Driver::start(options(&it.setup), Some(it.disk.boxed()), nanos(now));
        let mut driver = start(self);
        if driver.as_ref().is_err_and(is_of_first_file) && self.may_lack_space() {
            self.set_capacity(None);
            self.setup.limit = None;
            driver = start(self);
        }
        self.driver = driver.map_err(|error| format!("the server does not start: {error}"))?;
        self.driver.check();
        Ok(())
    }
}

/// Compares all jobs of a server that has just started with what may be there after such an end. Each flipped
/// bit may have changed one job, but not its tube or body, or have undone a flush.
fn judge(
    journal: &Journal,
    driver: &mut Driver,
    inspector: &mut Inspector,
    end: End,
    flipped_bits: u32,
) -> Result<Judged, Failure> {
    let now = driver.now.as_nanos();
    let is_never_synced = end == End::PowerCut { synced_within: None };
    let max_of_bits = flipped_bits as usize * journal.jobs_of_a_bit();
    let max_wrong = if is_never_synced { usize::MAX } else { max_of_bits };
    let ids = if max_wrong > 0 { journal.all_ids() } else { journal.candidates() };
    let mut judged = Judged::default();
    let mut wrong = Vec::new();
    for id in ids {
        let found = inspector.find(driver, id);
        match journal.judge(id, found.as_ref(), end, now) {
            Verdict::Expected(possible) => judged.known.push((id, possible)),
            Verdict::Gone => {}
            Verdict::Ambiguous => judged.unknown.extend(found.map(|found| (id, found))),
            Verdict::Wrong(why) => {
                if let Some(found) = found {
                    if !journal.is_intact(id, &found) {
                        return Err(why);
                    }
                    judged.unknown.push((id, found));
                }
                wrong.push(why);
            }
        }
    }
    if max_wrong == 0 {
        let ids: BTreeSet<u64> = judged
            .known
            .iter()
            .map(|(id, _)| *id)
            .chain(judged.unknown.iter().map(|(id, _)| *id))
            .collect();
        journal.check_flushes(&ids, end)?;
    }
    if wrong.len() > max_wrong {
        return Err(format!(
            "{} jobs are wrong after {flipped_bits} flipped bits; the first: {}",
            wrong.len(),
            wrong[0]
        ));
    }
    let (Recovered { jobs, last_id, .. }, count) = (driver.recovered, judged.count());
    if jobs != count {
        return Err(format!("the server has {jobs} jobs\n  expected: {count}"));
    }
    let durable_id = journal.highest_durable_id(end);
    if last_id < durable_id && flipped_bits == 0 {
        return Err(format!("the next id is above {last_id}\n  expected: above {durable_id}"));
    }
    Ok(judged)
}

/// The jobs after a restart.
#[derive(Default)]
struct Judged {
    /// Jobs as they may be; the model takes the first version of each.
    known: Vec<(u64, Vec<Job>)>,
    /// Jobs that damage, lost bytes or a clock that was set have made ambiguous.
    unknown: Vec<(u64, FoundJob)>,
}

impl Judged {
    fn count(&self) -> u64 {
        (self.known.len() + self.unknown.len()) as u64
    }
}

/// Returns the keys that may be kept, now or after the clock is set back. Those of jobs that the
/// simulation has just deleted are kept from now on.
fn kept_keys(
    journal: &Journal,
    jobs: &Judged,
    end: End,
    is_unsure: bool,
    now: u64,
) -> Vec<KeptKey> {
    let found: BTreeSet<u64> = jobs.known.iter().map(|(id, _)| *id).collect();
    let mut kept = journal.kept_keys(&found, end, now);
    kept.iter_mut().for_each(|key| key.is_unsure |= is_unsure);
    for (id, found) in &jobs.unknown {
        let Some(JobKey { key, ttl: ttl @ 1.., .. }) = journal.key_of(*id) else { continue };
        kept.retain(|kept| kept.id != *id);
        kept.push(KeptKey {
            id: *id,
            tube: found.tube().into(),
            key,
            until: now + (u64::from(ttl) + 1) * SECOND,
            ttl,
            is_unsure: true,
        });
    }
    kept
}

/// Asks a server that has just started for its jobs, on a connection of its own.
#[derive(Default)]
struct Inspector {
    client: Client,
    connections: u64,
    /// How often each command was given.
    commands: BTreeMap<&'static str, u64>,
    /// How many jobs were deleted in each tube.
    deletes: BTreeMap<String, u64>,
}

impl Inspector {
    fn connect(&mut self, driver: &mut Driver) {
        self.client = driver.connect();
        self.connections += 1;
    }

    /// Returns the line of the reply, and its body or nothing.
    fn ask(&mut self, driver: &mut Driver, line: &str) -> (String, Vec<u8>) {
        let word = line.split(' ').next().unwrap_or_default();
        *self.commands.entry(command_named(word).word).or_default() += 1;
        let reply = driver.ask_at_once(self.client, format!("{line}\r\n"));
        let Frame { line, body, .. } = frame(&reply).expect("the reply is whole");
        (String::from_utf8_lossy(line).into_owned(), body.unwrap_or_default().to_vec())
    }

    /// Returns the moment of the last command: each is a nanosecond later than the one before.
    fn now(&self, driver: &Driver) -> u64 {
        driver.now.as_nanos() + self.commands.values().sum::<u64>()
    }

    fn find(&mut self, driver: &mut Driver, id: u64) -> Option<FoundJob> {
        let (line, document) = self.ask(driver, &format!("stats-job {id}"));
        let at = self.now(driver);
        if line == "NOT_FOUND" {
            return None;
        }
        let text = String::from_utf8(document).expect("documents are text");
        Some(FoundJob { text, body: self.ask(driver, &format!("peek {id}")).1, at })
    }

    fn delete(&mut self, driver: &mut Driver, id: u64, tube: &str) -> String {
        let (reply, _) = self.ask(driver, &format!("delete {id}"));
        let deletes = self.deletes.entry(tube.to_owned()).or_default();
        *deletes += u64::from(reply == "DELETED");
        reply
    }

    fn add_to(&self, model: &mut Model, now: u64) {
        model.total_connections = self.connections;
        model.counters.clone_from(&self.commands);
        model.last_command_at = now;
        for tube in &mut model.tubes {
            tube.deletes = self.deletes.get(&*tube.name).copied().unwrap_or(0);
        }
    }
}

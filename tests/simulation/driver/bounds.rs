//! Properties of the engine that BEHAVIOUR.md does not give as one exact result: fairness, and the
//! use of memory and of the disk.

use super::super::model::{ClientNumber, Flush, Job, SECOND};
use super::{Failure, Nanos, Simulation};

/// At most this many commands of one connection are run in an iteration, less than 0.1 ms of work:
/// a client that sends thousands of commands does not delay the others. A put counts as two, its
/// line and its body.
const MAX_COMMANDS: usize = 200;
/// The same where each iteration ends in a sync of the disk, which takes longer than all commands.
const MAX_COMMANDS_BEFORE_SYNC: usize = 3_000;
/// The files of flushed jobs are removed in this time, and those that a congested disk has kept.
const AFTER_FLUSH: u64 = 3 * SECOND;
/// A flush ends after 8 iterations, and one more for each 16 jobs: a client that
/// flushes waits little longer than one that deletes the jobs.
const ITERATIONS_OF_FLUSH: usize = 8;
const JOBS_PER_ITERATION: usize = 16;
/// A read that has failed is tried again within this time: 0.1 s after the moment of its command, which is
/// later by a nanosecond for each command of a visit.
const RETRY_PAUSE: u64 = SECOND / 10 + 100_000;
/// A client that could be served is left out in at most this many iterations.
const MAX_ITERATIONS_LEFT_OUT: usize = 3;

impl Simulation {
    /// Checks that each client got its share of the iteration.
    /// Clients may be left out in an iteration that `was_congested`.
    pub(super) fn check_clients(&mut self, was_congested: bool) -> Result<(), Failure> {
        let syncs_always = self.setup.has_binlog() && self.setup.sync_within == Some(0);
        let max_commands = if syncs_always { MAX_COMMANDS_BEFORE_SYNC } else { MAX_COMMANDS };
        for (&client, socket) in &mut self.sockets {
            let commands = std::mem::take(&mut socket.commands);
            if commands > 0 && self.is_congested {
                return Err(format!("client {client}: {commands} commands on a congested disk"));
            }
            if commands > max_commands {
                return Err(format!(
                    "client {client}: {commands} commands in one iteration\n  \
                     expected: at most {max_commands}"
                ));
            }
            let can_read = self.model.is_free(client) && self.driver.unread(socket.client) > 0;
            let has_progress = std::mem::take(&mut socket.has_progress);
            let has_work = self.model.can_run(client) || can_read;
            let is_left_out = !has_progress && has_work && !was_congested;
            let iterations = if is_left_out { socket.iterations_left_out + 1 } else { 0 };
            socket.iterations_left_out = iterations;
            if iterations > MAX_ITERATIONS_LEFT_OUT {
                return Err(format!("client {client}: not served in {iterations} iterations"));
            }
        }
        Ok(())
    }

    /// Checks that the server may close a connection: the client has quit, or has sent its last command,
    /// and has all replies.
    pub(super) fn check_close(&self, client: ClientNumber) -> Result<(), Failure> {
        let known = &self.model.clients[&client];
        if known.output.is_empty() && (known.is_closing || self.is_over(client)) {
            return Ok(());
        }
        Err(format!("client {client}: the server has closed the connection too early"))
    }

    /// Returns whether nothing more can come from the client, and all of it was run.
    fn is_over(&self, client: ClientNumber) -> bool {
        let is_blocked = self.model.is_waiting(client)
            || self.model.is_flushing(client)
            || self.model.is_reading(client)
            || self.model.is_in_step(client);
        self.model.clients[&client].has_input_ended && !is_blocked && !self.model.can_run(client)
    }

    /// Checks that the oldest flush makes progress.
    pub(super) fn check_flushes(&mut self) -> Result<(), Failure> {
        let Some(Flush { count, .. }) = self.model.flushes.first() else {
            self.iterations_of_flush = 0;
            return Ok(());
        };
        // With a smaller share an iteration frees a job.
        let is_slow = self.setup.limits.most_due_work < JOBS_PER_ITERATION;
        if self.driver.is_congested() || is_slow {
            return Ok(());
        }
        self.iterations_of_flush += 1;
        let limit = ITERATIONS_OF_FLUSH + count / JOBS_PER_ITERATION;
        if self.iterations_of_flush <= limit {
            return Ok(());
        }
        Err(format!("a flush of {count} jobs has no reply after {limit} iterations"))
    }

    /// Checks that all files together take at most `--binlog-limit`, and less than three times the live bytes and two files.
    /// Files so small that the space kept for deletes fills them may take more. The files of flushed jobs
    /// are removed in the time without commands that follows. On a congested disk no job is moved.
    pub(super) fn check_disk_use(&self) -> Result<(), Failure> {
        const SMALL_FILE: u64 = 16_384;
        const LARGE_BODY: u32 = 65_535;
        /// The record of a key.
        const KEY_LEN: usize = 84;
        let Some(file_size) = self.setup.file_size else { return Ok(()) };
        let used = self.disk.used_by_binlog();
        let limit = self.setup.limit.filter(|&limit| limit < used && !self.may_exceed_limit);
        if let Some(limit) = limit {
            return Err(format!("the binlog takes {used} bytes\n  expected: at most {limit}"));
        }
        // A file takes at least one record, and is at most a 64th of the limit.
        let file_size = self.setup.limit.map_or(file_size, |limit| (limit / 64).min(file_size));
        // Jobs are not moved while their bodies are read.
        if file_size < SMALL_FILE
            || self.setup.max_job_size > LARGE_BODY
            || self.disk.begun_reads() > 0
            || self.now() < self.read_at + AFTER_FLUSH
        {
            return Ok(());
        }
        if self.now() < self.model.last_flush_at.max(self.congested_at) + AFTER_FLUSH {
            return Ok(());
        }
        let key_len = |job: &Job| if job.key.is_some() || job.con.is_some() { KEY_LEN } else { 0 };
        let record_len =
            |job: &Job| (4 + job.tube.len() + 80 + job.body.len() + 2 + key_len(job)) as u64;
        let kept = self.model.kept_keys.iter().filter(|kept| kept.until > self.now()).count();
        let live: u64 =
            self.model.jobs.iter().map(record_len).sum::<u64>() + (kept * KEY_LEN) as u64;
        let limit = 3 * live + 2 * file_size;
        if used <= limit || self.had_disk_faults {
            return Ok(());
        }
        Err(format!("the binlog takes {used} bytes for {live} live bytes: {}", self.disk.names()))
    }

    /// Checks that an idle server has nothing left to run, to read, to send or to close. While the
    /// disk is congested, it neither runs nor reads.
    pub(super) fn check_idle(&self) -> Result<(), Failure> {
        let progress = self.disk.progress();
        let is_congested = self.driver.is_congested();
        let retry_at = self.now() + RETRY_PAUSE;
        let is_soon = |due: Nanos| due.as_nanos() <= retry_at;
        let may_read_again = self.had_read_faults && self.driver.next_due().is_some_and(is_soon);
        for (&client, socket) in &self.sockets {
            let is_free = self.model.is_free(client);
            let known = &self.model.clients[&client];
            let has_room = self.driver.room(socket.client) != Some(0);
            let has_unread = is_free && self.driver.unread(socket.client) > 0;
            let left = if has_room && socket.held.required(progress) > 0 {
                "replies to send"
            } else if !is_congested && (self.model.can_run(client) || has_unread) {
                "commands to run"
            } else if known.output.is_empty() && (known.is_closing || self.is_over(client)) {
                "to close the connection"
            } else if self.model.is_in_step(client) && !is_congested {
                "a command in steps"
            } else if self.model.is_reading(client)
                && self.disk.begun_reads() == 0
                && !may_read_again
            {
                "a body to read"
            } else {
                continue;
            };
            return Err(format!("client {client}: the server is idle, but has {left}"));
        }
        Ok(())
    }
}

//! Properties of the engine that BEHAVIOUR.md does not give as one exact result: fairness, and the
//! use of memory and of the disk.

use super::super::event::BinlogSetup;
use super::super::model::{ClientNumber, Flush, Job, Model, SECOND};
use super::{Failure, Simulation, Socket, syncing};
use beanstalkd::testing::{Progress, Server, Syncing};

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
/// A client that could be served is left out in at most this many iterations.
const MAX_ITERATIONS_LEFT_OUT: usize = 3;

impl Simulation {
    /// Checks what each client may do next, and that each got its share of the iteration.
    pub(super) fn check_clients(&mut self) -> Result<(), Failure> {
        let syncs_always = syncing(&self.setup) == Syncing::EachIteration;
        let max_commands = if syncs_always { MAX_COMMANDS_BEFORE_SYNC } else { MAX_COMMANDS };
        let progress = self.disk.progress();
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
            check_actions(client, socket, progress, &self.server, &self.model)?;
            let can_read = self.server.actions(socket.key).read && !socket.inbound.is_empty();
            let has_progress = std::mem::take(&mut socket.has_progress);
            let has_work = self.model.can_run(client) || can_read;
            let is_left_out = !has_progress && has_work && !self.is_congested;
            let iterations = if is_left_out { socket.iterations_left_out + 1 } else { 0 };
            socket.iterations_left_out = iterations;
            if iterations > MAX_ITERATIONS_LEFT_OUT {
                return Err(format!("client {client}: not served in {iterations} iterations"));
            }
            socket.is_served = false;
        }
        Ok(())
    }

    /// Checks that the oldest flush makes progress.
    pub(super) fn check_flushes(&mut self) -> Result<(), Failure> {
        let Some(Flush { count, .. }) = self.model.flushes.first() else {
            self.iterations_of_flush = 0;
            return Ok(());
        };
        if self.server.is_congested() {
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
        let Some(BinlogSetup { file_size, .. }) = self.setup.binlog else { return Ok(()) };
        let used = self.disk.used_by_binlog();
        if let Some(limit) = self.limit.filter(|&limit| limit < used) {
            return Err(format!("the binlog takes {used} bytes\n  expected: at most {limit}"));
        }
        // A file takes at least one record, and is at most a 64th of the limit.
        let file_size =
            self.limit.map_or(file_size.into(), |limit| (limit / 64).min(file_size.into()));
        if file_size < SMALL_FILE || self.setup.max_job_size > LARGE_BODY {
            return Ok(());
        }
        if self.now < self.model.last_flush_at.max(self.congested_at) + AFTER_FLUSH {
            return Ok(());
        }
        let key_len = |job: &Job| if job.key.is_some() { KEY_LEN } else { 0 };
        let record_len =
            |job: &Job| (4 + job.tube.len() + 80 + job.body.len() + 2 + key_len(job)) as u64;
        let kept = self.model.kept_keys.iter().filter(|kept| kept.until > self.now).count();
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
        let is_congested = self.server.is_congested();
        for (&client, socket) in &self.sockets {
            let actions = self.server.actions(socket.key);
            let has_unread = actions.read && !socket.inbound.is_empty();
            let has_unsent = actions.write && socket.read_limit != Some(0);
            let has_work = actions.run || has_unread || self.model.can_run(client);
            if has_unsent || actions.close || (has_work && !is_congested) {
                return Err(format!(
                    "client {client}: the server is idle, but has something to do: {actions:?}"
                ));
            }
        }
        Ok(())
    }
}

/// Checks what the engine allows the event loop to do with a connection.
fn check_actions(
    client: ClientNumber,
    socket: &Socket,
    progress: Progress,
    server: &Server,
    model: &Model,
) -> Result<(), Failure> {
    let actions = server.actions(socket.key);
    let sendable_len = server.unsent(socket.key).0.sendable_len();
    let (required, allowed) = (socket.held.required(progress), socket.held.allowed(progress));
    if sendable_len < required || sendable_len > allowed {
        return Err(format!(
            "client {client}: {sendable_len} bytes may be sent\n  expected: {required} to {allowed}"
        ));
    }
    let known = &model.clients[&client];
    let is_free = model.is_free(client);
    let has_replies = !known.output.is_empty();
    let is_blocked = model.is_waiting(client) || model.is_flushing(client);
    let is_over = known.has_input_ended && !is_blocked && !actions.run;
    let is_right = actions.write == (sendable_len > 0)
        && (!actions.run || is_free && (known.has_batch() || !known.input.is_empty()))
        && actions.read == (is_free && !actions.run && !known.has_input_ended)
        && actions.close == (!has_replies && (known.is_closing || is_over));
    if is_right {
        return Ok(());
    }
    Err(format!(
        "client {client}: the server has {actions:?}\n  expected: commands can be run: {is_free}, \
         waits: {}, closing: {}, input ended: {}, bytes of input: {}, of output: {}",
        model.is_waiting(client),
        known.is_closing,
        known.has_input_ended,
        known.input.len(),
        known.output.len(),
    ))
}

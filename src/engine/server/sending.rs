//! The end of an iteration: replies are sent, and connections closed.
//!
//! Replies to a connection with more commands to run are sent once 16 KiB have gathered, or after 16
//! iterations.

use super::{Server, link_of};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::ConnKey;
use std::io::{Read, Write};

impl<S: Read + Write> Server<S> {
    /// Sends the replies of this iteration, while `may_send` returns true, then closes connections. A
    /// close may give jobs to waiting workers, whose replies wait for the next commit.
    pub fn send(&mut self, may_send: impl Fn() -> bool) {
        let (mut sent, left_before) = (0, self.leaving.len());
        if self.is_stopping {
            self.send_unvisited();
        }
        for at in 0..self.store.dirty.len() {
            // The process may have been stopped since the last reply.
            if may_send() {
                self.send_one(self.store.dirty[at], &mut sent);
            }
        }
        self.store.dirty.clear();
        if !self.postponed.is_empty() && !self.store.is_crowded() {
            self.wake_postponed();
        }
        if self.store.is_congested() {
            self.send_unvisited();
        }
        if self.leaving.len() > left_before {
            let queue = &mut self.store.queue;
            let rest = queue.work.give(queue.limits.closing_work);
            // Those that were closed now come first.
            self.leaving.rotate_left(left_before);
            self.leave();
            self.deliver();
            self.store.queue.work.end(rest);
        }
    }

    /// Sends replies to one connection, unless it is worth waiting for more of them. Then enqueues the
    /// connection if there is more to do.
    fn send_one(&mut self, key: ConnKey, sent: &mut usize) {
        let Server { links, store: s, visits, leaving, postponed, is_stopping, .. } = self;
        let Some(link) = link_of(links, key) else { return };
        let is_overdue = link.conn.begin_send(s);
        let is_short = link.conn.output.len() < s.queue.limits.gathered_bytes;
        let gathers = link.conn.has_backlog && is_short && !*is_stopping && link.conn.can_run(s);
        let delays = gathers && link.delayed_sends < s.queue.limits.delayed_sends;
        // Short replies wait for long ones to others only if there are many.
        let most = s.queue.limits.sent_per_iteration_bytes * if is_short { 2 } else { 1 };
        if delays || *sent >= most {
            link.delayed_sends = link.delayed_sends.saturating_add(1);
            return visits.add(link);
        }
        link.delayed_sends = 0;
        match link.send(s) {
            Ok(count) => *sent += count,
            Err(error) => {
                link.close(s, Some(&error));
                return leaving.push_back(key);
            }
        }
        let is_postponed =
            link.conn.output.sendable_len() > 0 && !link.is_postponed && s.is_crowded();
        if is_postponed && headroom::keeping(Headroom::Quarter, || postponed.try_reserve(1)).is_ok()
        {
            link.is_postponed = true;
            postponed.push(key);
        }
        if is_overdue || link.conn.is_finished() {
            link.close(s, None);
            leaving.push_back(key);
        } else if link.has_more(s) {
            visits.add(link);
        }
    }

    /// Visits postponed connections again, some in each iteration, now that memory for replies is not
    /// short. Some of them may have ended or been visited since.
    fn wake_postponed(&mut self) {
        let Server { links, store: s, visits, postponed, .. } = self;
        let first = postponed.len().saturating_sub(s.queue.limits.postponed_per_iteration);
        for key in postponed.drain(first..) {
            if let Some(link) = link_of(links, key) {
                link.is_postponed = false;
                visits.add(link);
            }
        }
    }

    /// Lets the next replies that are sent be those to connections that are not visited, because the disk is congested
    /// or the server stops. Closes the others whose commands have waited for too long.
    fn send_unvisited(&mut self) {
        let Server { links, store: s, visits, leaving, .. } = self;
        let progress = s.progress.unwrap_or_default();
        visits.retain(|key| {
            let Some(link) = link_of(links, key) else { return false };
            let has_reply = link.conn.output.sendable_len() > 0;
            if has_reply && link.seen.is_writable {
                link.conn.mark_dirty(s);
            }
            let waits = !has_reply && link.has_more(s);
            let since = &mut link.conn.unsent_since;
            if waits {
                *since = s.queue.now.min(*since);
            }
            let closes = waits && progress.is_overdue(*since);
            if closes {
                link.close(s, None);
                leaving.push_back(key);
            }
            !closes
        });
    }
}

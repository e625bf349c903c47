//! Checks a connection, for tests: what it does fits its input, and what the store knows of it.

use super::{Conn, Doing, Steps, WaitFor};
use crate::engine::commands::lines;
use crate::engine::protocol::reply::Word;
use crate::engine::queue::body::{Body, LARGE};
use crate::engine::store::Store;
use crate::engine::text::CR_LF;

impl Conn {
    /// Checks that the buffered input is an incomplete line or body, unless the connection has a
    /// backlog: then it has a step to run.
    ///
    /// # Panics
    /// The check fails.
    pub fn check(&self, s: &Store) {
        let index = self.id();
        self.output.check(format_args!("the output of connection {index}"));
        assert!(
            self.is_half_closed || !self.input_ended,
            "the input of connection {index} has ended, but it is not half-closed"
        );
        let Conn { doing, has_backlog, .. } = self;
        let input = self.input.unused();
        let waits = matches!(doing, Doing::Wait(WaitFor::Job(_)));
        assert_eq!(
            waits,
            s.queue.waits(self.client.key),
            "whether connection {index} waits, and whether the queue knows it: {doing:?}"
        );
        assert!(!waits || !self.is_half_closed, "connection {index} is half-closed, but it waits");
        let is_incomplete = match doing {
            Doing::Closing | Doing::Leaving(_) => return,
            // Its input may have been dropped for lack of memory.
            Doing::SkipBody(_, Word::OUT_OF_MEMORY) if *has_backlog => return,
            Doing::Line => lines::is_incomplete(input),
            Doing::SkipLine(_) => input.is_empty() || input == b"\r",
            Doing::Body(put) => {
                let max_len = s.queue.settings.max_job_size as usize + CR_LF.len();
                let is_new = put.id <= s.queue.last_id && s.queue.jobs.find(put.id).is_none();
                assert!(
                    is_new && put.full_len as usize <= max_len,
                    "connection {index} puts {put:?}, the last assigned id is {}",
                    s.queue.last_id
                );
                input.len() < (put.full_len as usize).min(LARGE)
            }
            Doing::LargeBody(large) => {
                assert!(
                    large.put.id <= s.queue.last_id && large.put.full_len == large.body.full_len(),
                    "connection {index} puts {large:?}"
                );
                input.is_empty() && large.filled < large.put.full_len as usize
            }
            Doing::Steps(Steps::Kick(kick)) => {
                assert!(kick.left > 0, "connection {index} kicks {kick:?}");
                false
            }
            Doing::Steps(_) => false,
            Doing::Wait(WaitFor::List) => {
                assert_eq!(s.lists.requests_of(self.client.key), 1, "lists for connection {index}");
                input.is_empty()
            }
            Doing::Wait(WaitFor::Bodies(wanted)) => {
                wanted.check(self.client.key, s);
                input.is_empty()
            }
            Doing::SkipBody(..) | Doing::Wait(_) => input.is_empty(),
        };
        assert!(
            if *has_backlog { self.has_step(input) } else { is_incomplete },
            "connection {index} buffers {} bytes in {doing:?}, backlog: {has_backlog}",
            input.len()
        );
    }

    /// Returns the memory of its input, of its output and of the bodies or clients that it lists, and the large bodies
    /// that the connection refers to, for the check of their sums.
    pub fn check_parts(&self) -> ([usize; 3], impl Iterator<Item = &Body>) {
        let large =
            if let Doing::LargeBody(large) = &self.doing { Some(&large.body) } else { None };
        let waiting = if let Doing::Wait(WaitFor::Bodies(wanted)) = &self.doing {
            wanted.own_bytes()
        } else if let Doing::Steps(Steps::ListClients(page)) = &self.doing {
            page.lines.capacity()
        } else {
            0
        };
        let buffered = [self.input.capacity(), self.output.text_len(), waiting];
        (buffered, self.output.bodies().chain(large))
    }
}

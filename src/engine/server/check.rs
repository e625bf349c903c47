//! What tests see of a server: its connections, and whether all counts are right.

use super::Server;
use crate::engine::binlog::record;
use crate::engine::conn::Conn;
use crate::engine::keys::ConnKey;
use crate::engine::queue::body::Bodies;
use crate::engine::time::Nanos;
use std::io::{Read, Write};

impl<S> Server<S> {
    /// Returns the connection of this key, if it is open, and the bodies that its output shares.
    pub fn inspect(&self, key: ConnKey) -> Option<(&Conn, &Bodies)> {
        self.conn_ref(key).map(|c| (c, &self.store.queue.bodies))
    }

    /// Checks all invariants between two calls of the methods above. They do not hold
    /// after a replay has failed or [`Server::stop`] was called.
    ///
    /// # Panics
    /// A check fails.
    pub fn check(&self) {
        let s = &self.store;
        let links = || self.links.iter().map(|(_, link)| link);
        let clients = links().map(|link| &link.conn.client);
        s.queue.check(clients, links().flat_map(|link| link.conn.check_parts().1));
        let sum = |part: usize| links().map(|link| link.conn.check_parts().0[part]).sum::<usize>();
        assert_eq!(s.input_bytes, sum(0), "stored and actual bytes of inputs");
        assert_eq!(s.pool.text_len(), sum(1), "stored and actual bytes of outputs");
        assert_eq!(s.waiting_bytes, sum(2), "stored and actual bytes of lists of bodies");
        s.pool.check();
        assert_eq!(s.queue.woken.len(), 0, "wait results that were not delivered");
        let open = links().filter(|link| link.stream.is_some()).count();
        assert_eq!(s.connections, open, "stored and actual number of connections");
        let keys = s.connections + self.leaving.len();
        assert_eq!(self.links.len(), keys, "keys, and connections that have one");
        links().for_each(|link| link.conn.check(s));
        for (_, job) in s.queue.jobs.iter() {
            // A damaged binlog may have ids above `HIGHEST_ID`, which were never assigned.
            let is_assigned = job.id <= s.queue.last_id || job.id > record::HIGHEST_ID;
            assert!(is_assigned, "job {}, but the last assigned id is {}", job.id, s.queue.last_id);
        }
    }
}

impl<S: Read + Write> Server<S> {
    /// Visits a connection without an iteration, and takes its output: nothing that is due is
    /// done, and nothing is committed.
    pub fn run_now(&mut self, key: ConnKey, now: Nanos) -> Vec<u8> {
        let queue = &mut self.store.queue;
        queue.work.begin_visits(1, false, &queue.limits);
        self.visits.retain(|queued| queued != key);
        self.visit(key, &mut || now);
        let output = self.with(key, |c, s| {
            let bytes = c.output.unsent(0, &s.queue.bodies);
            c.sent(s, bytes.len());
            bytes
        });
        output.unwrap_or_default()
    }
}

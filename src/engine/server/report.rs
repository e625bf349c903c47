//! Replies that show other connections: `list-clients`, and the holders of jobs in `list-jobs`.
//!
//! A handler has its own connection only, so the server makes these replies, right after the handler. A page
//! of many clients is made in steps.

use super::{Server, link_of};
use crate::engine::commands::pages::{
    CONNECTIONS_PER_STEP, ClientPage, Report, WORK_PER_CLIENT, WORK_PER_LOOK,
};
use crate::engine::conn::{Doing, Steps, WaitFor};
use crate::engine::keys::ConnKey;
use crate::engine::protocol::reply::{Answer, Reply, Word};
use crate::engine::protocol::stats;
use crate::engine::queue::job::Holder;
use crate::engine::store::Store;

impl<S> Server<S> {
    /// Makes the reply of a connection that shows others, or a part of it.
    pub(super) fn report(&mut self, key: ConnKey) {
        let Some(link) = link_of(&mut self.links, key) else { return };
        let Doing::Wait(WaitFor::Report(report)) = &mut link.conn.doing else { return };
        let report = std::mem::replace(report, Report::Jobs(Vec::new(), 0));
        let mut rest = Doing::Line;
        let answer = match report {
            Report::Jobs(keys, next) => {
                let s = &self.store;
                let entry_of =
                    |Holder { by, index }: Holder| self.links[by].conn.client.held[index as usize];
                let text = stats::jobs(&keys, next, &s.queue, entry_of);
                text.map(Reply::Document).map_err(Word::from)
            }
            Report::Clients(mut page) => {
                let answer = self.list_clients(&mut page);
                if matches!(answer, Ok(Reply::Later)) {
                    self.store.waiting_bytes += page.lines.capacity();
                    rest = Doing::Steps(Steps::ListClients(page));
                }
                answer
            }
        };
        self.with(key, |c, s| {
            c.doing = rest;
            c.answer_later(s, answer);
        });
    }

    /// Looks at the next connections of a page.
    fn list_clients(&mut self, page: &mut ClientPage) -> Answer {
        let Server { links, store: s, .. } = self;
        s.queue.work.spend(WORK_PER_LOOK);
        let tube = s.queue.tubes.find(&page.tube);
        if tube.is_none() && !page.tube.is_empty() {
            return Err(Word::NOT_FOUND);
        }
        let numbers_end = links.numbers_end();
        let first = usize::try_from(page.after).unwrap_or(usize::MAX).min(numbers_end);
        let end = (first + CONNECTIONS_PER_STEP).min(numbers_end);
        for index in first..end {
            let Some(link) = link_of(links, ConnKey::from_index(index)) else { continue };
            let c = &link.conn;
            if tube.is_some_and(|tube| s.queue.find_watch(c.client.key, tube).is_none()) {
                continue;
            }
            if page.left == 0 {
                return page_of(page, page.last, s);
            }
            if s.is_crowded_by(page.lines.len()) {
                return Err(Word::OUT_OF_MEMORY);
            }
            s.queue.work.spend(WORK_PER_CLIENT);
            stats::push_client_line(&mut page.lines, c, &s.queue)?;
            (page.left, page.last) = (page.left - 1, c.id());
        }
        page.after = end as u64;
        if end < numbers_end {
            return Ok(Reply::Later);
        }
        page_of(page, 0, s)
    }
}

/// Returns the reply with these lines. `next` is the id after which the next page begins, or 0.
fn page_of(page: &ClientPage, next: u64, s: &Store) -> Answer {
    if s.is_crowded_by(stats::longest_page_len(page.lines.len())) {
        return Err(Word::OUT_OF_MEMORY);
    }
    Ok(Reply::Document(stats::clients(&page.lines, next)?))
}

//! A chapter of the model: what the bytes of a client amount to, and what there is to do for it.

use super::{Actions, Client, Phase};

/// One thing that came out of the bytes of a client.
pub(super) enum Step {
    Line(Vec<u8>),
    TooLong(Vec<u8>),
    Body(Vec<u8>),
    UnwantedEnds,
}

/// A client that leaves so much unread is not listened to.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// With its CR LF.
const LINE_LIMIT: usize = 224;

impl Client {
    pub(super) fn takes_commands(&self) -> bool {
        !matches!(self.phase, Phase::Waiting { .. } | Phase::Closing)
            && self.output.len() < OUTPUT_LIMIT
    }

    pub fn actions(&self) -> Actions {
        let is_over = match self.phase {
            Phase::Closing => true,
            Phase::Waiting { .. } => false,
            _ => self.has_input_ended && !self.has_backlog,
        };
        Actions {
            read: self.takes_commands() && !self.has_backlog && !self.has_input_ended,
            run: self.takes_commands() && self.has_backlog,
            write: !self.output.is_empty(),
            close: is_over && self.output.is_empty(),
        }
    }

    pub(super) fn watches(&self, tube: &str) -> bool {
        self.watched.iter().any(|name| **name == *tube)
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. })
    }

    pub(super) fn next_step(&mut self) -> Option<Step> {
        if !self.takes_commands() {
            return None;
        }
        match self.phase {
            Phase::Line | Phase::TooLongLine(_) => self.next_line(),
            Phase::Body { len, .. } => {
                (self.input.len() >= len + 2).then(|| Step::Body(self.take(len + 2)))
            }
            Phase::Unwanted { left } => {
                let taken = left.min(self.input.len());
                self.take(taken);
                self.phase = Phase::Unwanted { left: left - taken };
                (left == taken).then_some(Step::UnwantedEnds)
            }
            Phase::Waiting { .. } | Phase::Closing => None,
        }
    }

    pub(super) fn next_line(&mut self) -> Option<Step> {
        let end = self.input.windows(2).position(|pair| pair == b"\r\n");
        let (was_too_long, mut line) = match std::mem::replace(&mut self.phase, Phase::Line) {
            Phase::TooLongLine(line) => (true, line),
            _ => (false, Vec::new()),
        };
        if let Some(end) = end {
            line.extend(self.take(end + 2));
            line.truncate(line.len() - 2);
            let is_too_long = was_too_long || end + 2 > LINE_LIMIT;
            return Some(if is_too_long { Step::TooLong(line) } else { Step::Line(line) });
        }
        if was_too_long || self.input.len() >= LINE_LIMIT {
            // All but what may be half of its end.
            let kept = usize::from(self.input.ends_with(b"\r"));
            line.extend(self.take(self.input.len() - kept));
            self.phase = Phase::TooLongLine(line);
        }
        None
    }

    pub(super) fn take(&mut self, count: usize) -> Vec<u8> {
        self.input.drain(..count).collect()
    }
}

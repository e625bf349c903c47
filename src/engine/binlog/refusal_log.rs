//! Limits the log lines about a full disk to one of each kind a minute. A full disk may make the
//! server refuse and accept puts thousands of times a second.

use super::Binlog;
use super::space::Refusal;
use crate::engine::time::Nanos;
use log::warn;

/// Which lines about refused puts were logged, and when.
#[derive(Debug, Default)]
pub struct RefusalLog {
    /// The last put was refused.
    pub is_refusing: bool,
    /// The last logged line is that puts are refused.
    is_refusal_logged: bool,
    /// The number of times that the server began to refuse puts since it last logged that.
    unlogged: u64,
    next_at: Nanos,
}

impl RefusalLog {
    const PAUSE: Nanos = Nanos::from_secs(60);

    /// Counts a put that is refused. If that is to be logged, returns how many earlier times it
    /// was not.
    pub fn refused(&mut self, now: Nanos) -> Option<u64> {
        if !std::mem::replace(&mut self.is_refusing, true) {
            self.unlogged += 1;
        }
        if self.is_refusal_logged || now < self.next_at {
            return None;
        }
        self.is_refusal_logged = true;
        self.next_at = now + RefusalLog::PAUSE;
        Some(std::mem::take(&mut self.unlogged).saturating_sub(1))
    }

    /// Notes a put that is accepted. Returns whether to log that puts are accepted again: once after each
    /// logged refusal.
    pub fn accepted(&mut self) -> bool {
        self.is_refusing = false;
        std::mem::take(&mut self.is_refusal_logged)
    }
}

impl Binlog {
    /// Logs that puts are refused for want of space, or accepted again.
    pub(super) fn log_refusal(&mut self, is_accepted: bool) {
        if is_accepted {
            if self.space.log.accepted() {
                warn!("there is space again: accepting puts");
            }
        } else if let Some(Refusal { file, error, .. }) = &self.space.refusal
            && self.failure.is_none()
            && let Some(earlier) = self.space.log.refused(self.now)
        {
            let times = if earlier == 0 {
                String::new()
            } else {
                format!(" (as {earlier} times since this was last logged)")
            };
            warn!("no space for binlog.{file}: {error}; refusing puts until there is{times}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_line_is_logged_once_a_minute() {
        let mut log = RefusalLog::default();
        let mut lines = Vec::new();
        // Refused and accepted alternately, every millisecond for two and a half minutes.
        for millis in 0..150_000 {
            let now = Nanos::from_millis(millis);
            if let Some(earlier) = log.refused(now) {
                lines.push((millis, Some(earlier)));
            }
            if log.accepted() {
                lines.push((millis, None));
            }
        }
        assert_eq!(
            lines,
            [
                (0, Some(0)),
                (0, None),
                (60_000, Some(59_999)),
                (60_000, None),
                (120_000, Some(59_999)),
                (120_000, None)
            ]
        );
    }

    #[test]
    fn a_refusal_within_the_minute_is_logged_when_the_minute_is_over() {
        let mut log = RefusalLog::default();
        assert_eq!(log.refused(Nanos::ZERO), Some(0));
        assert!(log.accepted());
        for secs in 1..60 {
            assert_eq!(log.refused(Nanos::from_secs(secs)), None);
        }
        assert_eq!(log.refused(Nanos::from_secs(60)), Some(0));
        assert_eq!(log.refused(Nanos::from_secs(600)), None);
        assert!(log.accepted());
    }
}

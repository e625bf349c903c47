//! The log lines about jobs that `--bury-after` has buried. Jobs of several clients may come back at the
//! same moment, in any order; the lines have the order in which they were buried.

use log::{LevelFilter, Log, Metadata, Record};
use std::cell::RefCell;
use std::sync::Once;

thread_local! {
    /// The jobs that a server of this thread has buried.
    static BURIED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

struct BuryLog;

impl Log for BuryLog {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = record.args().to_string();
        let rest = line.strip_prefix("job ").filter(|_| line.ends_with("times: burying it"));
        let id = rest.and_then(|rest| rest.split(' ').next());
        if let Some(id) = id.and_then(|id| id.parse().ok()) {
            BURIED.with_borrow_mut(|buried| buried.push(id));
        }
    }

    fn flush(&self) {}
}

/// Reads the log of the servers of all threads from now on.
pub(super) fn install() {
    static LOG: BuryLog = BuryLog;
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        log::set_logger(&LOG).expect("there is no other logger");
        log::set_max_level(LevelFilter::Warn);
    });
}

/// Returns the jobs that were buried since the last call, in their order.
pub(super) fn take() -> Vec<u64> {
    BURIED.take()
}

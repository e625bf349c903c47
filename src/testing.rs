//! What the tests of this package use of the server's inside. Not an interface: it changes with
//! every version.

pub use crate::engine::binlog::Syncing;
pub use crate::engine::binlog::disk::{
    Disk, FileNumber, FinishedRead, Progress, ReadToken, SyncError,
};
pub use crate::engine::binlog::inspect;
pub use crate::engine::binlog::record;
pub use crate::engine::collections::histogram::Histogram;
pub use crate::engine::keys::ConnKey;
pub use crate::engine::monitor::html;
pub use crate::engine::monitor::http_conn::{HttpConn, ServerState};
pub use crate::engine::monitor::measurements::Measurements;
pub use crate::engine::monitor::metrics::{LONGEST_SAMPLE, Page, SLICE_LEN};
pub use crate::engine::monitor::status_page::HTML_MAX;
pub use crate::engine::protocol::command::{self, Command, Counter, Rejection, UniqueTag};
pub use crate::engine::protocol::stats::{self, ProcessInfo, ProcessorTime};
pub use crate::engine::queue::replay::{Recovered, ReplayError};
pub use crate::engine::server::{Server, Settings};
pub use crate::engine::text;
pub use crate::engine::time::{ClockOffset, Nanos};
pub use crate::os::disk::Directory;
pub use crate::os::listen::{self, Address};
pub use crate::os::metrics_server::MetricsServer;

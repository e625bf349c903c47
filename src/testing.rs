//! What the tests of this package use of the server's inside. Not an interface: it changes with
//! every version.

pub use crate::engine::binlog::disk::{Disk, FileNumber};
pub use crate::engine::binlog::error::{BinlogError, Step};
pub use crate::engine::binlog::reads::RecordRead;
pub use crate::engine::binlog::{Progress, Syncing};
pub use crate::engine::binlog::{copy, inspect};
pub use crate::engine::commands::Command;
pub use crate::engine::conn::{Doing, Steps, WaitFor};
pub use crate::engine::headroom::{are_refused, refuse_after};
pub use crate::engine::keys::{ConnKey, JobKey, Key};
pub use crate::engine::limits::{Limits, Settings};
pub use crate::engine::monitor::http_conn::{HttpConn, ServerState, Stream};
pub use crate::engine::monitor::measurements::Measurements;
pub use crate::engine::protocol::stats::{self, ProcessInfo, ProcessorTime};
pub use crate::engine::queue::replay::Recovered;
pub use crate::engine::server::{Observed, Readiness, Server};
pub use crate::engine::time::{ClockOffset, Nanos};
pub use crate::os::listen::{self, Address, Port};
pub use crate::os::metrics_server::MetricsServer;

/// The rules of a binlog in etcd, and the seam for another etcd below them.
#[cfg(feature = "etcd")]
pub mod etcd {
    pub use crate::os::etcd::api::{self, EtcdError};
    pub use crate::os::etcd::{EtcdDisk, Keys, Member, Nodes, Request, Shared, serve};
    pub use crate::os::membership::{Duty, EtcdOptions, Standing};
    pub use etcd_client as client;
}

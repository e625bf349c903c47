//! Constant values that the engine needs from its process.

use beanstalkd::testing::{Nanos, ProcessInfo, ProcessorTime};

/// When the virtual time of most tests begins.
pub const START: Nanos = Nanos::from_secs(1_700_000_000);

/// The facts of a process that started at `started_at`.
pub fn facts(started_at: Nanos) -> ProcessInfo {
    ProcessInfo {
        pid: 7,
        instance_id: "0123456789abcdef".to_owned(),
        hostname: "host".to_owned(),
        os_version: "version".to_owned(),
        platform: "machine".to_owned(),
        started_at,
        processor_time: ProcessorTime::default,
        resident_bytes: || None,
        has_headroom: |_| true,
    }
}

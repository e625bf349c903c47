//! What the engine is told of a process that is none.
#![allow(unreachable_pub, reason = "a part of several test programs")]

use beanstalkd::testing::Nanos;
use beanstalkd::testing::{ProcessInfo, ProcessorTime};

/// The facts of a process that began then.
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

//! The command line: any arguments, separated by zero bytes.

use crate::harness::driver::{Nanos, Syncing};
use beanstalkd::options::{self, BinlogPlace, MAX_JOB_SIZE, Request};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

pub fn run(bytes: &[u8]) {
    let arguments = bytes.split(|&byte| byte == 0).map(|text| OsString::from_vec(text.to_vec()));
    match options::parse(arguments) {
        Ok(Request::Serve(options)) => {
            let file_size = options.settings.binlog_file_size;
            assert!(file_size >= 4096 && file_size % 4096 == 0);
            assert!(options.settings.max_job_size <= MAX_JOB_SIZE);
            assert_ne!(options.fsync, Syncing::Within(Nanos::ZERO), "that is each turn");
            assert!(bytes.len() > 1 || !options.names_address);
        }
        Ok(
            Request::Check(BinlogPlace::Directory(path))
            | Request::Dump(BinlogPlace::Directory(path))
            | Request::Import(path, _)
            | Request::Export(path, _)
            | Request::Leave(path, _),
        ) => {
            assert!(bytes.len() > path.as_os_str().len());
        }
        Ok(Request::Check(BinlogPlace::Etcd(etcd)) | Request::Dump(BinlogPlace::Etcd(etcd))) => {
            assert!(!etcd.nodes.is_empty() && etcd.prefix.len() > 1);
        }
        Ok(Request::Help | Request::Version) => assert!(bytes.contains(&b'-')),
        Err(error) => assert!(!error.to_string().is_empty(), "an error without a message"),
    }
}

//! The operating system: sockets, files, signals, users, clock, and the event loop. No module here
//! knows a command or a rule.
//!
//! | file | owns |
//! |---|---|
//! | [`event_loop`] | calls the engine: one iteration after the other |
//! | [`poller`] | waits for events, before and while clients are served |
//! | [`acceptor`] | accepting connections, its back-off and the connection limit |
//! | [`listen`] | opening listening sockets |
//! | [`metrics_server`] | HTTP connections for metrics |
//! | [`notify`] | messages to the service manager |
//! | [`disk`] | the directory of the binlog |
//! | [`disk_thread`] | reads and syncs files on a thread |
//! | [`membership`] | what the server knows of its cluster |
//! | `etcd` | the binlog in etcd, and leading, with the feature of that name |
//! | [`resolve`] | names of hosts, services and users |
//! | [`failure`] | why the server does not serve, and its exit code |
//! | [`init`] | the duties of a first process |
//! | [`sys`] | system calls: all unsafe code |

pub mod acceptor;
pub mod disk;
pub mod disk_thread;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod event_loop;
pub mod failure;
pub mod init;
pub mod listen;
pub mod membership;
pub mod metrics_server;
pub mod notify;
pub mod poller;
pub mod resolve;
pub mod sys;

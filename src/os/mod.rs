//! Everything that touches the operating system: sockets, signals, users, the clock. Nothing in here
//! knows a command or a rule.

pub mod acceptor;
pub mod disk;
pub mod event_loop;
pub mod init;
pub mod listen;
pub mod metrics_server;
pub mod monitor;
pub mod notify;
pub mod resolve;
pub mod stream;
pub mod sys;

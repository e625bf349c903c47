//! Everything that touches the operating system: sockets, signals, users, the clock. Nothing in here
//! knows a command or a rule.

pub mod disk;
pub mod event_loop;
pub mod first_process;
pub mod listen;
pub mod memory;
pub mod names;
pub mod notify;
pub mod onlookers;
pub mod process;
pub mod stream;
pub mod visitors;

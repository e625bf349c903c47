//! The protocol of beanstalkd: bytes to commands, replies to bytes.

pub mod command;
pub mod input;
pub mod listing;
pub mod output;
pub mod reply;
pub mod stats;

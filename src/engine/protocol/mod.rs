//! The protocol of beanstalkd: bytes to commands, replies to bytes.
//!
//! | file | owns |
//! |---|---|
//! | [`command`] | parses a line into a [`command::Command`] |
//! | [`input`] | bytes of a client that were not used yet |
//! | [`reply`] | the words of all replies |
//! | [`output`] | bytes on their way to a client; large bodies and lists are shared |
//! | [`stats`] | the YAML documents |

pub mod command;
pub mod input;
pub mod output;
pub mod reply;
pub mod stats;

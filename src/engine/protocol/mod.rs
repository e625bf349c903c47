//! The protocol of beanstalkd: bytes to commands, replies to bytes.
//!
//! | file | owns |
//! |---|---|
//! | [`batch`] | the jobs of one reply to `reserve-batch` or `peek-batch` |
//! | [`input`] | received bytes that were not used yet |
//! | [`parse`] | how long lines may be, and their arguments |
//! | [`reply`] | all replies, and their bytes |
//! | [`output`] | bytes to be sent to a client; large bodies and lists are shared |
//! | [`stats`] | the YAML documents of `stats` and the lists |

pub mod batch;
pub mod input;
pub mod output;
pub mod parse;
pub mod reply;
pub mod stats;

//! Monitoring: the metrics page for Prometheus, and the HTTP connections that request it.
//!
//! A [`TryReserveError`](std::collections::TryReserveError) means that there is no memory.
//!
//! | file | owns |
//! |---|---|
//! | [`metrics`] | the metrics page, written in slices |
//! | [`http`] | request and response heads |
//! | [`http_conn`] | the state machine of one HTTP connection |

pub mod http;
pub mod http_conn;
pub mod metrics;

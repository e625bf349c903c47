//! Monitoring: the page of metrics, and the HTTP connections that ask for it.
//!
//! | file | owns |
//! |---|---|
//! | [`metrics`] | the page for Prometheus, in slices |
//! | [`http`] | heads of requests and responses |
//! | [`http_conn`] | the state machine of one HTTP connection |

pub mod http;
pub mod http_conn;
pub mod metrics;

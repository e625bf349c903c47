//! Monitoring: the page of metrics, and the HTTP connections that ask for it.

pub mod histogram;
pub mod http;
pub mod http_conn;
pub mod metrics;

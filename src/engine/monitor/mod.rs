//! Monitoring: the metrics page for Prometheus, the status page for people, and the HTTP connections
//! that request them.
//!
//! | file | owns |
//! |---|---|
//! | [`metrics`] | the metrics page, written in slices |
//! | [`status_page`] | the status page of the server, written in slices |
//! | [`tube_page`] | the status page of one tube |
//! | [`tube_scan`] | the values of a tube, and a scan of all jobs and tubes in slices |
//! | [`problems`] | the problems that the pages show, in the three formats |
//! | [`ranking`] | the tubes that the status page shows, and their order |
//! | [`table`] | values, and tables of them in HTML, text and JSON |
//! | [`html`] | the HTML around the values: style, script, plots |
//! | [`measurements`] | what is measured while the server runs, and when |
//! | [`http`] | requests, the media types that they accept, and response heads |
//! | [`http_conn`] | the state machine of one HTTP connection |
//!
//! The folder `page` has the style and the script of the status page, and the help of the metrics.

pub mod html;
pub mod http;
pub mod http_conn;
pub mod measurements;
pub mod metrics;
pub mod problems;
pub mod ranking;
pub mod status_page;
pub mod table;
pub mod tube_page;
pub mod tube_scan;

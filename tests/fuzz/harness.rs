//! The modules of `tests/harness` that the targets use. The others need the binary of the server, which
//! this package does not build.
#![allow(dead_code, unreachable_pub, reason = "the targets use a part of it")]

#[path = "../harness/engine.rs"]
pub mod engine;
#[path = "../harness/fake_disk.rs"]
pub mod fake_disk;
#[path = "../harness/fixtures.rs"]
pub mod fixtures;
#[path = "../harness/reply.rs"]
pub mod reply;
#[path = "../harness/request.rs"]
pub mod request;
#[path = "../harness/yaml.rs"]
pub mod yaml;

//! All targets for libFuzzer: the environment variable `TARGET` names the one that runs.
#![no_main]

#[path = "../harness"]
#[allow(dead_code, unreachable_pub, reason = "the targets use a part of it")]
mod harness {
    pub mod driver;
    pub mod fake_disk;
    pub mod instance;
    pub mod record;
    pub mod reply;
    pub mod request;
    pub mod script;
    pub mod yaml;
}
#[path = "../simulation"]
#[allow(dead_code, unreachable_pub, reason = "the targets use a part of it")]
mod simulation {
    pub mod driver;
    pub mod event;
    pub mod journal;
    pub mod model;
    pub mod request;
    pub mod shrink;
}
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let name = std::env::var("TARGET").expect("TARGET is the name of a target");
    targets::named(&name)(bytes);
});

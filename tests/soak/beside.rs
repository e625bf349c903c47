//! A client that works steadily next to a load, and how long it waits for replies.

use crate::harness::client::Client;
use crate::harness::request::put;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Puts, reserves and deletes one job after another in a tube of its own while `load` runs. Returns
/// the result of the load, and the number of jobs and the waits of the client in words.
pub fn with_client_beside<T>(address: SocketAddr, load: impl FnOnce() -> T) -> (T, String) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| work(address, &is_over));
        // The client must end if the load panics, too.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(load));
        is_over.store(true, Ordering::Relaxed);
        let waits = beside.join().expect("the client beside is served");
        let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (result, words(waits))
    })
}

fn work(address: SocketAddr, is_over: &AtomicBool) -> Vec<Duration> {
    const PAUSE: Duration = Duration::from_millis(1);
    let mut client = Client::in_tube(address, "beside");
    let mut waits = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let mut ask = |request: &[u8]| {
            let start = Instant::now();
            let reply = client.ask(request);
            waits.push(start.elapsed());
            reply
        };
        let id = ask(&put(0, 0, 60, b"beside")).inserted();
        assert_eq!(ask(b"reserve\r\n").number("RESERVED"), Some(id));
        assert_eq!(ask(format!("delete {id}\r\n").as_bytes()).line, "DELETED");
        std::thread::sleep(PAUSE);
    }
    waits
}

fn words(mut waits: Vec<Duration>) -> String {
    waits.sort_unstable();
    let at = |thousandth: usize| waits.get(waits.len() * thousandth / 1000).copied();
    let [median, late] = [500, 999].map(|thousandth| at(thousandth).unwrap_or_default());
    let worst = waits.last().copied().unwrap_or_default();
    let jobs = waits.len() / 3;
    format!(
        "a client beside had {jobs} jobs and waited {median:.0?} at the median, {late:.0?} at p99.9, {worst:.0?} at most"
    )
}

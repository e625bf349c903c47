//! What the clients of the scenarios say, each kind of client a small state machine.

mod bulk;
mod cycle;
mod requests;
mod workers;

pub use bulk::{Delay, Drain, Fill, Say, Take};
pub use cycle::{Cycle, UseRandom, Watcher};
pub use requests::watch;
pub use workers::{HandOff, Rescue};

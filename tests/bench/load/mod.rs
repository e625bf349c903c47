//! The requests of the clients, each kind of client a small state machine.

mod batches;
mod bulk;
mod cycle;
mod requests;
mod workers;

pub use batches::{DrainAll, List, Taking};
pub use bulk::{Consume, Delay, Drain, Fill, Say, Take};
pub use cycle::{Cycle, CycleUntil, UseRandom, Watcher};
pub use requests::watch;
pub use workers::{HandOff, Rescue};

//! The cores of the machine, and which process runs on which core.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::LazyLock;

/// How many cores the benchmark was given.
pub fn core_count() -> usize {
    CORES.len()
}

/// The client's thread stays away from the first core if there is another one.
pub fn move_to_second_core() {
    if let [_, second, ..] = CORES[..] {
        pin_to(second);
    }
}

/// Children inherit the cores of the thread that starts them.
pub fn on_first_core<T>(start: impl FnOnce() -> T) -> T {
    let first = CORES[0];
    let own = sched_getaffinity(None).expect("affinity can be asked");
    pin_to(first);
    let started = start();
    sched_setaffinity(None, &own).expect("what it was can be restored");
    started
}

/// The cores that the benchmark was given, before it moved to one of them.
static CORES: LazyLock<Vec<usize>> = LazyLock::new(|| {
    let set = sched_getaffinity(None).expect("affinity can be asked");
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
});

fn pin_to(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).expect("a core that is there can be chosen");
}

/// The kernel, on which figures depend too.
pub fn kernel_version() -> String {
    let version = std::fs::read_to_string("/proc/sys/kernel/osrelease");
    version.map(|version| version.trim().to_owned()).unwrap_or_default()
}

//! The scenarios of the soak, a file for each family.
//!
//! A scenario is a function that plays rounds until its time is over, and panics when it finds an
//! error. Its short form plays one small round, and asserts nothing that depends on the speed of
//! the machine.

mod backlog;
mod churn;
mod clock;
mod connections;
mod descriptors;
mod ledger;
mod memory;
mod slow;
mod stopped;
mod workers;

use rustix::process::{Resource, getrlimit};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// One way to stress the server.
pub struct Scenario {
    pub name: &'static str,
    /// What happens, in a few words.
    pub what: &'static str,
    /// How long its whole form takes by default.
    pub lasts: Duration,
    play: fn(&Run) -> Outcome,
}

/// What was measured, in a line.
pub type Outcome = Result<String, Skipped>;

/// Why a scenario cannot be played here.
pub struct Skipped(pub String);

/// How much of a scenario is played.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One small round, as a test.
    Short,
    /// As long as it shall last.
    Whole,
}

/// How a scenario is to be played.
pub struct Run {
    form: Form,
    pub seed: u64,
    pub lasts: Duration,
    started_at: Instant,
}

impl Scenario {
    pub fn run(&self, run: &Run) -> Outcome {
        (self.play)(run)
    }
}

impl Run {
    pub fn new(form: Form, seed: u64, lasts: Duration) -> Run {
        Run { form, seed, lasts, started_at: Instant::now() }
    }

    /// Whether there is time for another round.
    pub fn has_time(&self) -> bool {
        self.elapsed() < self.lasts
    }

    pub fn elapsed(&self) -> Duration {
        self.started_at.elapsed()
    }

    pub fn is_whole(&self) -> bool {
        self.form == Form::Whole
    }

    /// A number for each form.
    pub fn size(&self, short: usize, whole: usize) -> usize {
        if self.is_whole() { whole } else { short }
    }
}

pub fn all() -> Vec<Scenario> {
    let scenario = |name, seconds, what, play| {
        let lasts = Duration::from_secs(seconds);
        Scenario { name, what, lasts, play }
    };
    vec![
        scenario("connections", 20, "10,000 at once, then none", connections::at_once),
        scenario(
            "storms",
            20,
            "clients that connect, send something and disconnect",
            connections::storms,
        ),
        scenario("slow", 20, "clients that write byte by byte, or do not read", slow::clients),
        scenario("descriptors", 15, "more clients than descriptors", descriptors::run_out),
        scenario("memory", 30, "less memory than is asked for", memory::run_out),
        scenario("workers", 30, "50 workers that crash at any point", workers::crash),
        scenario(
            "workers-killed",
            40,
            "the same, with a server that is killed and goes on with its binlog",
            workers::are_left_alone,
        ),
        scenario("clock", 15, "the time of day is set forth and back", clock::is_set),
        scenario("stopped", 15, "a server that is stopped for seconds and goes on", stopped::go_on),
        scenario("churn-plain", 30, "jobs, tubes and clients come and go", churn::in_memory),
        scenario("churn-binlog", 30, "the same with a binlog of small files", churn::with_binlog),
        scenario("backlog", 400, "16 GB of jobs with 1 GiB of memory", backlog::larger_than_memory),
    ]
}

/// How many files this program may open.
fn open_files_limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// The bytes that the files of a directory take on the disk.
fn disk_bytes(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory).expect("the directory exists");
    // A file may be removed meanwhile. Blocks are of 512 bytes on every file system.
    files.filter_map(|file| Some(file.ok()?.metadata().ok()?.blocks() * 512)).sum()
}

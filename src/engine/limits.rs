//! The bounds of steps and iterations: how much work the server does before it serves the next
//! connection, writes the binlog or polls again.
//!
//! They bound only work, so no reply depends on them except where a field says so. Bounds of the
//! protocol, of memory, of the monitoring server and of disks are elsewhere, and so are the prices in
//! units of work. The settings of the operator are here too, because every layer uses them.

use std::num::NonZero;

/// Each limit with its type and its value in the program.
macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr,)*) => {
        /// The bounds of steps and iterations. A unit of work takes about 0.25 us.
        ///
        /// The server is correct with any values of at least 1, and each step makes progress. With low values
        /// commands take more iterations, so more can happen between two of their steps.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Limits {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl Limits {
            /// The limits of the program.
            pub const DEFAULT: Limits = Limits { $($name: $value,)* };
        }
    };
}

limits! {
    // ---- Iterations ----
    /// The units of all visits in an iteration: about 1 ms.
    iteration_work: usize = 4096,
    /// The units of pipelined commands of all ready connections in an iteration, if each has more
    /// than `least_share_work`: about 16 us. So a client that sends one command at a time is hardly
    /// delayed by one that sends thousands.
    shared_work: usize = 64,
    /// As `shared_work`, for iterations that end in a sync, which takes longer than all commands.
    shared_work_before_sync: usize = 1024,
    /// The least units of one connection. Its last command may exceed them.
    least_share_work: usize = 16,

    // ---- Due work ----
    /// The most units that a tick does for tubes, and again for connections and for kept keys. The rest is done in
    /// the next iterations.
    most_due_work: usize = 2048,
    /// The least units of such a tick. `most_due_work` has precedence.
    least_due_work: usize = 64,
    /// The least units while due work is late.
    least_late_due_work: usize = 512,
    /// The units for one tube or connection at a time, so that its backlog delays no other.
    due_slice_work: usize = 256,
    /// The units in an iteration for connections that are closed in it.
    closing_work: usize = 1024,
    /// The units for one closed connection at a time, so that its jobs delay no other.
    closing_slice_work: usize = 256,

    // ---- Steps of commands ----
    /// The watches that a reserve checks in an iteration.
    watches_per_step: usize = 2048,
    /// The jobs that a `reserve-batch` reserves in an iteration, and a `delete-batch` deletes, so that a step
    /// takes less than 1 ms, even if a million jobs are ready, or each has a key.
    jobs_per_batch_step: usize = 256,
    /// The units of a step that offers parked jobs of groups with a free slot: 256 jobs in about 1 us each; fewer if
    /// it wakes connections.
    offers_work: usize = 1024,
    /// The jobs that a kick moves in an iteration, in less than 1 ms; fewer if it wakes connections.
    jobs_per_kick_step: usize = 1024,
    /// The waiting connections that the end of a pause by command wakes in an iteration.
    /// Each needs a write of about 5 us. The tube stays paused until all are woken.
    wakes_per_step: usize = 128,
    /// The jobs that a `touch-all` checks in an iteration, so that a step takes about 0.5 ms.
    jobs_per_touch_step: usize = 1024,
    /// The names that a list of tubes gets in an iteration, in about 0.1 ms. A longer list of all
    /// tubes is shared by the connections that request it.
    names_per_list_step: usize = 1024,
    /// The names of a list that is not shared, while memory for replies is short.
    names_per_crowded_list: usize = 16,
    /// The connections to which a tick sends a complete shared list.
    lists_sent_per_tick: usize = 64,
    /// The units of the first part of a flush. A flush of at most 256 jobs with small bodies is
    /// complete at once, in about 0.13 ms.
    first_flush_work: usize = 768,
    /// The units to free flushed jobs before the first deadline of a connection that reserves. Ticks
    /// free the rest.
    flushed_tops_work: usize = 64,
    /// The jobs of a tube that a page of jobs compares in one step, and all connections if reserved jobs
    /// are among them: about 0.13 ms.
    jobs_compared_at_once: usize = 8192,
    /// The ids that a page of jobs looks up, in about 0.26 ms.
    ids_looked_up_at_once: usize = 4096,
    /// The memory pages, of 2,048 jobs each, that a page of jobs or of the monitoring looks at in an iteration.
    memory_pages_per_step: usize = 4,

    // ---- Bodies ----
    /// The length up to which a record is read while the loop waits, in bytes: about 30 us if the system
    /// has it in memory.
    read_at_once_bytes: usize = 64 * 1024,
    /// The units to read bodies of one reply that the system has in memory: about 1 ms. Further ones take turns.
    cached_bodies_work: usize = 4096,
    /// The reads that are with the disk at once. All others can still be dropped, and reads for other
    /// clients come before them.
    reads_with_disk: usize = 4,
    /// The bytes of these reads at which no further one is begun.
    bytes_with_disk: usize = 512 * 1024,
    /// The bytes of pages of large bodies that a tick frees, in about 0.1 ms.
    freed_per_tick_bytes: usize = 1024 * 1024,

    // ---- Binlog ----
    /// The bytes of records that are written at once. Bodies longer than half of it are not copied
    /// before.
    batch_bytes: usize = 256 * 1024,
    /// The bytes of jobs, and the rest of one job, that compaction moves at once, in about 0.2 ms.
    moved_at_once_bytes: usize = 256 * 1024,
    /// The bytes that are to be moved at once. A command that makes more garbage, such as a kick of
    /// a million jobs, leaves the rest to idle steps. Below the default the files may take more than
    /// three times the live bytes.
    move_debt_bytes: usize = 4 * 1024 * 1024,
    /// The bytes that an idle step of compaction moves, each millisecond.
    idle_move_bytes: usize = 64 * 1024,
    /// The bytes of jobs that a start moves out of damaged files before clients are served, in about 0.3 s.
    moved_at_start_bytes: usize = 32 * 1024 * 1024,
    /// The files that a commit removes, because a removal takes a few milliseconds.
    removals_per_commit: usize = 2,
    /// The files that a commit removes if the first one is small.
    small_removals_per_commit: usize = 16,
    /// The bytes that wait for a sync of a remote disk when no further commands run: etcd stores some 15 to
    /// 60 MB/s.
    congested_bytes: usize = 4 * 1024 * 1024,

    // ---- Monitoring ----
    /// The work of a slice of a page, in units of about 10 ns: well below 0.1 ms.
    work_per_page_slice: usize = 8192,
    /// The rows of tubes in a slice, so that it takes less than 0.1 ms.
    rows_per_page_slice: usize = 25,
    /// The length from which a slice takes no more rows, in bytes, for the same reason.
    rows_per_page_slice_bytes: usize = 6 * 1024,
    /// The length from which a slice takes no more metrics, in bytes.
    metrics_per_page_slice_bytes: usize = 16 * 1024,
    /// The tubes whose rates are sampled in an iteration, so that it takes less than 0.1 ms.
    rates_per_iteration: usize = 128,

    // ---- The event loop ----
    /// The events that one poll takes. The next iteration takes further ones.
    events_per_iteration: usize = 1024,
    /// The clients that are accepted in an iteration, so that a stream of them does not delay connected
    /// clients.
    accepts_per_iteration: usize = 256,
    /// The bytes of a read: enough for a put of the default size limit.
    read_bytes: usize = 68 * 1024,
    /// The ready connections up to which each read takes `read_bytes`.
    long_reads_per_iteration: usize = 64,
    /// The bytes of a read when more connections are ready: an iteration can run only a small share of
    /// the commands in one long read.
    short_read_bytes: usize = 16 * 1024,
    /// The bytes of a read while memory for input and replies is short.
    crowded_read_bytes: usize = 1024,
    /// The bytes of a read for the command line before the next large body of a client.
    head_read_bytes: usize = 4 * 1024,
    /// The bytes of a large body that are read at once, in about 60 us.
    body_read_bytes: usize = 512 * 1024,
    /// The replies that are sent to a connection with more commands to run, in bytes, unless
    /// `delayed_sends` iterations have passed. A system call for a few replies would cost more than
    /// the replies.
    gathered_bytes: usize = 16 * 1024,
    /// The iterations for which replies gather.
    delayed_sends: u8 = 16,
    /// The bytes after which replies to other connections are sent in the next iteration. They take a
    /// few hundred microseconds.
    sent_per_iteration_bytes: usize = 2 * 1024 * 1024,
    /// The postponed connections that are made ready in an iteration.
    postponed_per_iteration: usize = 256,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::DEFAULT
    }
}

/// The settings of the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The maximum length of a body in bytes, without CR LF.
    pub max_job_size: u32,
    /// The size of a binlog file in bytes.
    pub binlog_file_size: u32,
    /// The most bytes that the binlog may take.
    pub max_binlog_bytes: u64,
    /// Puts are refused while jobs take this much memory, in bytes.
    pub max_memory_bytes: u64,
    /// A job that came back this many times is buried; `None` for no limit.
    pub bury_after: Option<NonZero<u16>>,
    /// The bodies in memory may take this many bytes; the others are read back from the binlog. `None`:
    /// all bodies are in memory.
    pub body_cache_bytes: Option<u64>,
    /// The most tubes that have metrics of their own. `None`: nothing is counted for metrics alone.
    pub metrics_tubes: Option<usize>,
}

impl Settings {
    /// The defaults of the command line.
    pub const DEFAULT: Settings = Settings {
        max_job_size: 65_535,
        binlog_file_size: 10 * 1024 * 1024,
        max_binlog_bytes: u64::MAX,
        max_memory_bytes: u64::MAX,
        bury_after: None,
        body_cache_bytes: None,
        metrics_tubes: None,
    };

    /// Returns the limit of the memory for jobs in bytes, if there is one.
    pub fn max_memory(&self) -> Option<u64> {
        Some(self.max_memory_bytes).filter(|&max| max < u64::MAX)
    }
}

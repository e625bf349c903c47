//! The bounds of steps and iterations: how much work the server does before it serves the next
//! connection, writes the binlog or polls again.
//!
//! They bound only work, so no reply depends on them except where a field says so. Bounds of the
//! protocol, of memory, of the monitoring server and of disks are elsewhere, and so are the prices in
//! units of work.

/// The bounds of steps and iterations. A unit of work takes about 0.25 us.
///
/// The server is correct with any values of at least 1, and each step makes progress. With low values
/// commands take more iterations, so more can happen between two of their steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    // ---- Iterations ----
    /// The units of all visits in an iteration: about 1 ms.
    pub iteration_work: usize,
    /// The units of pipelined commands of all ready connections in an iteration, if each has more
    /// than `least_share_work`: about 16 us. So a client that sends one command at a time is hardly
    /// delayed by one that sends thousands.
    pub shared_work: usize,
    /// As `shared_work`, for iterations that end in a sync, which takes longer than all commands.
    pub shared_work_before_sync: usize,
    /// The least units of one connection. Its last command may exceed them.
    pub least_share_work: usize,

    // ---- Due work ----
    /// The most units that a tick does for tubes, and again for connections. The rest is done in the
    /// next iterations.
    pub most_due_work: usize,
    /// The least units of such a tick. `most_due_work` has precedence.
    pub least_due_work: usize,
    /// The least units while due work is late.
    pub least_late_due_work: usize,
    /// The units for one tube or connection at a time, so that its backlog delays no other.
    pub due_slice_work: usize,
    /// The units in an iteration for connections that are closed in it.
    pub closing_work: usize,
    /// The units for one closed connection at a time, so that its jobs delay no other.
    pub closing_slice_work: usize,
    /// The kept keys that a tick forgets, in about 0.1 ms.
    pub keys_forgotten_per_tick: usize,

    // ---- Steps of commands ----
    /// The watches that a reserve checks in an iteration.
    pub watches_per_step: usize,
    /// The jobs that a `reserve-batch` reserves in an iteration, and a `delete-batch` deletes, so that a step
    /// takes less than 1 ms, even if a million jobs are ready, or each has a key.
    pub jobs_per_batch_step: usize,
    /// The jobs that a kick moves in an iteration, in less than 1 ms.
    pub jobs_per_kick_step: usize,
    /// The waiting connections that a kick, or the end of a pause by command, wakes in an iteration.
    /// Each needs a write of about 5 us. The tube stays paused until all are woken.
    pub wakes_per_step: usize,
    /// The jobs that a `touch-all` checks in an iteration, so that a step takes about 0.5 ms.
    pub jobs_per_touch_step: usize,
    /// The names that a list of tubes gets in an iteration, in about 0.1 ms. A longer list of all
    /// tubes is shared by the connections that request it.
    pub names_per_list_step: usize,
    /// The names of a list that is not shared, while memory for replies is short.
    pub names_per_crowded_list: usize,
    /// The connections to which a tick sends a complete shared list.
    pub lists_sent_per_tick: usize,
    /// The units of the first part of a flush. A flush of at most 256 jobs with small bodies is
    /// complete at once, in about 0.13 ms.
    pub first_flush_work: usize,
    /// The units to free flushed jobs before the first deadline of a connection that reserves. Ticks
    /// free the rest.
    pub flushed_tops_work: usize,
    /// The jobs of a tube that a page of jobs compares in one step, and all connections if reserved jobs
    /// are among them: about 0.13 ms.
    pub jobs_compared_at_once: usize,
    /// The ids that a page of jobs looks up, in about 0.26 ms.
    pub ids_looked_up_at_once: usize,
    /// The memory pages, of 2,048 jobs each, that a page of jobs compares in an iteration.
    pub memory_pages_per_step: usize,

    // ---- Bodies ----
    /// The length up to which a record is read while the loop waits, in bytes: about 30 us if the system
    /// has it in memory.
    pub read_at_once_bytes: usize,
    /// The reads that are with the disk at once. All others can still be dropped, and reads for other
    /// clients come before them.
    pub reads_with_disk: usize,
    /// The bytes of these reads, unless it is one.
    pub bytes_with_disk: usize,
    /// The bodies that become cold in a tick, in about 50 us.
    pub evictions_per_tick: usize,
    /// The bytes of pages of large bodies that a tick frees, in about 0.1 ms.
    pub freed_per_tick_bytes: usize,

    // ---- Binlog ----
    /// The bytes of records that are written at once. Bodies longer than half of it are not copied
    /// before.
    pub batch_bytes: usize,
    /// The bytes of jobs, and the rest of one job, that compaction moves at once, in about 0.2 ms.
    pub moved_at_once_bytes: usize,
    /// The bytes that are to be moved at once. A command that makes more garbage, such as a kick of
    /// a million jobs, leaves the rest to idle steps. Below the default the files may take more than
    /// three times the live bytes.
    pub move_debt_bytes: usize,
    /// The bytes that an idle step of compaction moves, each millisecond.
    pub idle_move_bytes: usize,
    /// The files that a commit removes, because a removal takes a few milliseconds.
    pub removals_per_commit: usize,
    /// The files that a commit removes if the first one is small.
    pub small_removals_per_commit: usize,
    /// The bytes that wait for a sync of a remote disk when no further commands run: etcd stores some 15 to
    /// 60 MB/s.
    pub congested_bytes: usize,

    // ---- Monitoring ----
    /// The tubes with metrics of their own. The page depends on it.
    pub metrics_tubes: usize,
    /// The ready jobs that a slice of a page scans: well below 0.1 ms. A tube counts as 64 of them, a
    /// waiter as 16, a connection as 8.
    pub jobs_per_page_slice: usize,
    /// The entries of reserved jobs, and connections, in a slice: about 0.04 ms. Each job is anywhere
    /// in memory, which takes 0.3 us to read among ten million jobs.
    pub reserved_per_page_slice: usize,
    /// The rows of tubes in a slice, so that it takes less than 0.1 ms.
    pub rows_per_page_slice: usize,
    /// The length from which a slice takes no more rows, in bytes, for the same reason.
    pub rows_per_page_slice_bytes: usize,
    /// The length from which a slice takes no more metrics, in bytes.
    pub metrics_per_page_slice_bytes: usize,
    /// The tubes whose rates are sampled in an iteration, so that it takes less than 0.1 ms.
    pub rates_per_iteration: usize,

    // ---- The event loop ----
    /// The events that one poll takes. The next iteration takes further ones.
    pub events_per_iteration: usize,
    /// The clients that are accepted in an iteration, so that a stream of them does not delay connected
    /// clients.
    pub accepts_per_iteration: usize,
    /// The bytes of a read: enough for a put of the default size limit.
    pub read_bytes: usize,
    /// The ready connections up to which each read takes `read_bytes`.
    pub long_reads_per_iteration: usize,
    /// The bytes of a read when more connections are ready: an iteration can run only a small share of
    /// the commands in one long read.
    pub short_read_bytes: usize,
    /// The bytes of a read while memory for input and replies is short.
    pub crowded_read_bytes: usize,
    /// The bytes of a read for the command line before the next large body of a client.
    pub head_read_bytes: usize,
    /// The bytes of a large body that are read at once, in about 60 us.
    pub body_read_bytes: usize,
    /// The replies that are sent to a connection with more commands to run, in bytes, unless
    /// `delayed_sends` iterations have passed. A system call for a few replies would cost more than
    /// the replies.
    pub gathered_bytes: usize,
    /// The iterations for which replies gather.
    pub delayed_sends: u8,
    /// The bytes after which replies to other connections are sent in the next iteration. They take a
    /// few hundred microseconds.
    pub sent_per_iteration_bytes: usize,
    /// The stalled connections that are made ready in an iteration.
    pub stalled_per_iteration: usize,
}

impl Limits {
    /// The limits of the program.
    pub const DEFAULT: Limits = Limits {
        iteration_work: 4096,
        shared_work: 64,
        shared_work_before_sync: 1024,
        least_share_work: 16,

        most_due_work: 2048,
        least_due_work: 64,
        least_late_due_work: 512,
        due_slice_work: 256,
        closing_work: 1024,
        closing_slice_work: 256,
        keys_forgotten_per_tick: 256,

        watches_per_step: 2048,
        jobs_per_batch_step: 256,
        jobs_per_kick_step: 1024,
        wakes_per_step: 128,
        jobs_per_touch_step: 1024,
        names_per_list_step: 1024,
        names_per_crowded_list: 16,
        lists_sent_per_tick: 64,
        first_flush_work: 768,
        flushed_tops_work: 64,
        jobs_compared_at_once: 8192,
        ids_looked_up_at_once: 4096,
        memory_pages_per_step: 4,

        read_at_once_bytes: 64 * 1024,
        reads_with_disk: 4,
        bytes_with_disk: 1024 * 1024,
        evictions_per_tick: 256,
        freed_per_tick_bytes: 1024 * 1024,

        batch_bytes: 256 * 1024,
        moved_at_once_bytes: 256 * 1024,
        move_debt_bytes: 4 * 1024 * 1024,
        idle_move_bytes: 64 * 1024,
        removals_per_commit: 2,
        small_removals_per_commit: 16,
        congested_bytes: 4 * 1024 * 1024,

        metrics_tubes: 1000,
        jobs_per_page_slice: 8192,
        reserved_per_page_slice: 128,
        rows_per_page_slice: 25,
        rows_per_page_slice_bytes: 6 * 1024,
        metrics_per_page_slice_bytes: 16 * 1024,
        rates_per_iteration: 128,

        events_per_iteration: 1024,
        accepts_per_iteration: 256,
        read_bytes: 68 * 1024,
        long_reads_per_iteration: 64,
        short_read_bytes: 16 * 1024,
        crowded_read_bytes: 1024,
        head_read_bytes: 4 * 1024,
        body_read_bytes: 512 * 1024,
        gathered_bytes: 16 * 1024,
        delayed_sends: 16,
        sent_per_iteration_bytes: 2 * 1024 * 1024,
        stalled_per_iteration: 256,
    };
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::DEFAULT
    }
}

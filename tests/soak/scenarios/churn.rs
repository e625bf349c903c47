//! Jobs, tubes and clients come and go for a long time, next to a backlog that stays as large as
//! it is: memory and disk must stay as they are too.
//!
//! One thread speaks for all clients and keeps a list of the jobs, so that it knows what each
//! reply must be. It asks for no more than a fraction of what the server could do.

use super::{Outcome, Run, disk_bytes};
use crate::harness::client::Client;
use crate::harness::process::{Daemon, path_text};
use crate::harness::request::{numbered_body, put};
use crate::harness::wait_until;
use fastrand::Rng;
use std::collections::HashMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

pub fn in_memory(run: &Run) -> Outcome {
    Ok(churn(run, None))
}

pub fn with_binlog(run: &Run) -> Outcome {
    // Below the directory of cargo's, which is on a real disk.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("it can be made");
    Ok(churn(run, Some(directory.path())))
}

/// Operations per second.
const PACE: u32 = 2_000;
const FILE_SIZE: u64 = 1 << 20;
const LARGEST_BODY: f64 = 65_535.0;
const SAMPLES: u32 = 24;
/// How many operations there are between two looks at the disk.
const LOOK_AT_DISK: u64 = 50;

fn churn(run: &Run, directory: Option<&Path>) -> String {
    let file_size = FILE_SIZE.to_string();
    let directory_name = directory.map(path_text);
    let flags = match directory_name {
        Some(name) => vec!["-b", name, "-s", &file_size],
        None => vec![],
    };
    let (daemon, address) = Daemon::on_loopback(&flags);
    let mut churn = Churn::begin(run, address, directory);
    while churn.jobs.list.len() < churn.most_jobs {
        churn.put(0);
    }
    let ops = if run.is_whole() {
        churn.go_on_for(run, &daemon)
    } else {
        const OPS: u64 = 5_000;
        (0..OPS).for_each(|_| churn.step());
        OPS
    };
    churn.check_counts();
    let mut line = format!("{ops} operations");
    if run.is_whole() {
        churn.samples.check(&mut line);
    }
    if directory.is_some() {
        let Worst { disk, limit } = churn.worst;
        let (disk, limit) = (disk >> 10, limit >> 10);
        write!(line, "; disk at most {disk} KiB where {limit} were allowed").expect("it is text");
    }
    churn.delete_all(&daemon, &mut line);
    line
}

struct Churn<'a> {
    address: SocketAddr,
    directory: Option<&'a Path>,
    random: Rng,
    members: Vec<Member>,
    /// Looks at statistics.
    observer: Client,
    jobs: Jobs,
    most_jobs: usize,
    ops: u64,
    worst: Worst,
    samples: Samples,
}

/// A client that puts and reserves.
struct Member {
    client: Client,
    tube: String,
    /// Besides `default`.
    watched: Vec<String>,
    held: Vec<u64>,
}

/// What is live.
#[derive(Default)]
struct Jobs {
    list: Vec<u64>,
    by_id: HashMap<u64, Job>,
    /// What their records would need.
    live_bytes: u64,
    /// How many bodies there have been.
    bodies: u64,
}

struct Job {
    number: u64,
    len: usize,
    record_bytes: u64,
    /// In the list.
    place: usize,
    /// Which member has reserved it.
    holder: Option<usize>,
}

/// When the disk was nearest to its limit, or furthest beyond.
#[derive(Clone, Copy, Default)]
struct Worst {
    disk: u64,
    limit: u64,
}

impl Jobs {
    fn add(&mut self, id: u64, number: u64, len: usize, tube: &str) {
        // What the format needs for each job: 84 bytes, the name of its tube, its body.
        let record_bytes = (84 + tube.len() + len + b"\r\n".len()) as u64;
        let place = self.list.len();
        self.list.push(id);
        self.live_bytes += record_bytes;
        let job = Job { number, len, record_bytes, place, holder: None };
        assert!(self.by_id.insert(id, job).is_none(), "id {id} is given out twice");
    }

    fn remove(&mut self, id: u64) {
        let job = self.by_id.remove(&id).expect("only what is there is deleted");
        self.live_bytes -= job.record_bytes;
        self.list.swap_remove(job.place);
        if let Some(moved) = self.list.get(job.place) {
            self.by_id.get_mut(moved).expect("what is listed is there").place = job.place;
        }
    }
}

impl<'a> Churn<'a> {
    fn begin(run: &Run, address: SocketAddr, directory: Option<&'a Path>) -> Churn<'a> {
        let members = (0..20).map(|_| Member::new(address)).collect();
        Churn {
            address,
            directory,
            random: Rng::with_seed(run.seed),
            members,
            observer: Client::connect(address),
            jobs: Jobs::default(),
            most_jobs: run.size(200, 2_000),
            ops: 0,
            worst: Worst::default(),
            samples: Samples::default(),
        }
    }

    /// Keeps the pace until the time is over; returns the number of operations.
    fn go_on_for(&mut self, run: &Run, daemon: &Daemon) -> u64 {
        let (started_at, first) = (run.elapsed(), self.ops);
        let mut next_sample = started_at;
        while run.has_time() {
            for _ in 0..PACE / 100 {
                self.step();
            }
            if run.elapsed() >= next_sample {
                next_sample += (run.lasts.saturating_sub(started_at)) / SAMPLES;
                self.samples.take(daemon, self.jobs.live_bytes);
            }
            let done = u32::try_from(self.ops - first).expect("it ends before that");
            let due = started_at + Duration::from_secs(1) * done / PACE;
            std::thread::sleep(due.saturating_sub(run.elapsed()));
        }
        self.ops - first
    }

    /// One operation, whichever.
    fn step(&mut self) {
        self.ops += 1;
        let member = self.random.usize(..self.members.len());
        let is_full = self.jobs.list.len() >= self.most_jobs;
        match self.random.u32(..100) {
            0..40 if is_full => self.delete_any(member),
            0..40 => self.put(member),
            40..65 => self.reserve(member),
            65..85 => self.finish(member),
            85..90 => self.kick(member),
            90..94 => self.look(member),
            94..99 => self.change_tubes(member),
            _ => self.reconnect(member),
        }
        if self.ops.is_multiple_of(LOOK_AT_DISK) {
            self.look_at_disk();
        }
    }

    fn put(&mut self, member: usize) {
        self.jobs.bodies += 1;
        let number = self.jobs.bodies;
        // As many below a hundred bytes as between a hundred and ten thousand.
        let exponent = self.random.f64() * (LARGEST_BODY + 1.0).ln();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is small")]
        let len = (exponent.exp() - 1.0) as usize;
        let delay_s = u32::from(self.random.u8(..10) == 0);
        let request = put(self.random.u32(..2_000), delay_s, 3600, numbered_body(number, len));
        let member = &mut self.members[member];
        let reply = member.client.ask(request);
        let id = reply.number("INSERTED");
        let id = id.unwrap_or_else(|| panic!("a put of {len} bytes is answered {}", reply.line));
        self.jobs.add(id, number, len, &member.tube);
    }

    fn reserve(&mut self, index: usize) {
        const MOST_HELD: usize = 20;
        let member = &mut self.members[index];
        if member.held.len() == MOST_HELD {
            return self.finish(index);
        }
        let reply = member.client.ask("reserve-with-timeout 0\r\n");
        let Some(id) = reply.number("RESERVED") else {
            return assert_eq!(reply.line, "TIMED_OUT");
        };
        let job = self.jobs.by_id.get_mut(&id);
        let job = job.unwrap_or_else(|| panic!("job {id} is reserved and not there"));
        assert_eq!(job.holder.replace(index), None, "job {id} is held by two");
        assert!(reply.body == numbered_body(job.number, job.len), "job {id} has another body");
        member.held.push(id);
    }

    /// What a worker does with a job in the end.
    fn finish(&mut self, index: usize) {
        let member = &mut self.members[index];
        if member.held.is_empty() {
            return;
        }
        let id = member.held.swap_remove(self.random.usize(..member.held.len()));
        let pri = self.random.u32(..2_000);
        match self.random.u32(..8) {
            0..4 => {
                member.client.expect(format!("delete {id}\r\n"), "DELETED");
                return self.jobs.remove(id);
            }
            4 => member.client.expect(format!("release {id} {pri} 0\r\n"), "RELEASED"),
            5 => member.client.expect(format!("release {id} {pri} 1\r\n"), "RELEASED"),
            6 => member.client.expect(format!("bury {id} {pri}\r\n"), "BURIED"),
            _ => {
                member.client.expect(format!("touch {id}\r\n"), "TOUCHED");
                return member.held.push(id);
            }
        }
        self.jobs.by_id.get_mut(&id).expect("it was held").holder = None;
    }

    fn delete_any(&mut self, index: usize) {
        let id = self.jobs.list[self.random.usize(..self.jobs.list.len())];
        let holder = self.jobs.by_id[&id].holder;
        let is_allowed = holder.is_none_or(|holder| holder == index);
        let line = if is_allowed { "DELETED" } else { "NOT_FOUND" };
        let member = &mut self.members[index];
        member.client.expect(format!("delete {id}\r\n"), line);
        if is_allowed {
            member.held.retain(|&held| held != id);
            self.jobs.remove(id);
        }
    }

    fn kick(&mut self, member: usize) {
        let reply = self.members[member].client.ask("kick 10\r\n");
        assert!(reply.number("KICKED").is_some(), "a kick is answered {}", reply.line);
    }

    fn look(&mut self, member: usize) {
        let client = &mut self.members[member].client;
        let id = self.jobs.list[self.random.usize(..self.jobs.list.len())];
        match self.random.u32(..4) {
            0 => {
                let job = &self.jobs.by_id[&id];
                let reply = client.ask(format!("peek {id}\r\n"));
                assert_eq!(reply.line, format!("FOUND {id} {}", job.len));
                assert!(
                    reply.body == numbered_body(job.number, job.len),
                    "job {id} has another body"
                );
            }
            1 => assert_eq!(client.ask(format!("stats-job {id}\r\n")).value("id"), Some(id)),
            2 => assert!(client.ask("list-tubes\r\n").line.starts_with("OK ")),
            _ => assert!(client.ask("stats-tube default\r\n").value("total-jobs").is_some()),
        }
    }

    fn change_tubes(&mut self, member: usize) {
        const MOST_WATCHED: usize = 50;
        let name = format!("tube-{}", self.random.u32(..500));
        let member = &mut self.members[member];
        match self.random.u32(..3) {
            0 => {
                member.client.expect(format!("use {name}\r\n"), &format!("USING {name}"));
                member.tube = name;
            }
            1 if member.watched.len() < MOST_WATCHED && !member.watched.contains(&name) => {
                member.watched.push(name);
                let line = format!("WATCHING {}", 1 + member.watched.len());
                let name = member.watched.last().expect("it was just added");
                member.client.expect(format!("watch {name}\r\n"), &line);
            }
            _ => {
                if let Some(name) = member.watched.pop() {
                    let line = format!("WATCHING {}", 1 + member.watched.len());
                    member.client.expect(format!("ignore {name}\r\n"), &line);
                }
            }
        }
    }

    /// A client goes, with whatever it holds, and another one comes.
    fn reconnect(&mut self, index: usize) {
        let gone = std::mem::replace(&mut self.members[index], Member::new(self.address));
        if self.random.bool() {
            gone.client.reset();
        } else {
            drop(gone.client);
        }
        let expected = self.members.len() as u64 + 1;
        // The new one counts once it is served.
        self.members[index].client.expect("list-tube-used\r\n", "USING default");
        wait_until("the server has closed the connection", || {
            self.observer.stat("current-connections") == expected
        });
        for id in gone.held {
            self.jobs.by_id.get_mut(&id).expect("it was held").holder = None;
        }
    }

    /// At each look all that was asked has been answered, so the files are those for what is live.
    fn look_at_disk(&mut self) {
        let Some(directory) = self.directory else { return };
        let seen =
            Worst { disk: disk_bytes(directory), limit: 3 * self.jobs.live_bytes + 2 * FILE_SIZE };
        let Worst { disk, limit } = seen;
        assert!(disk <= limit, "{disk} bytes of files where {limit} are allowed");
        if disk * self.worst.limit >= self.worst.disk * limit {
            self.worst = seen;
        }
    }

    fn check_counts(&mut self) {
        let held = self.members.iter().map(|member| member.held.len()).sum::<usize>();
        let stats = self.observer.ask("stats\r\n");
        let value = |key: &str| stats.value(key).expect("stats has it");
        let states = ["ready", "reserved", "delayed", "buried"];
        let total: u64 = states.iter().map(|state| value(&format!("current-jobs-{state}"))).sum();
        assert_eq!(self.jobs.list.len() as u64, total, "jobs are missing, or too many");
        assert_eq!(held as u64, value("current-jobs-reserved"));
    }

    /// Nothing may be left behind by jobs and clients that are gone.
    fn delete_all(&mut self, daemon: &Daemon, line: &mut String) {
        self.members.clear();
        wait_until("all are gone", || self.observer.stat("current-connections") == 1);
        for id in self.jobs.list.drain(..) {
            self.observer.expect(format!("delete {id}\r\n"), "DELETED");
        }
        assert_eq!(self.observer.ask("list-tubes\r\n").body, b"---\n- default\n");
        if let Some(directory) = self.directory {
            wait_until("one file is left", || disk_bytes(directory) <= FILE_SIZE + 4096);
        }
        write!(line, "; {} KiB when all is deleted", daemon.rss_kib()).expect("it is text");
    }
}

impl Member {
    fn new(address: SocketAddr) -> Member {
        let client = Client::connect(address);
        Member { client, tube: "default".to_owned(), watched: Vec::new(), held: Vec::new() }
    }
}

/// Memory over time.
#[derive(Default)]
struct Samples(Vec<Sample>);

#[derive(Clone, Copy)]
struct Sample {
    rss_kib: u64,
    live_kib: u64,
}

impl Samples {
    fn take(&mut self, daemon: &Daemon, live_bytes: u64) {
        self.0.push(Sample { rss_kib: daemon.rss_kib(), live_kib: live_bytes >> 10 });
    }

    /// What is beyond the live bytes in the last quarter may not be much more than in the second;
    /// the first is there to warm up. A leak of four bytes for each operation would show within
    /// an hour.
    fn check(&self, line: &mut String) {
        /// Bodies that come and go leave holes of all sizes: this much varies by chance.
        const MARGIN_KIB: u64 = 8 * 1024;
        let beyond = |sample: &Sample| sample.rss_kib.saturating_sub(sample.live_kib);
        let quarter = self.0.len() / 4;
        let most = |samples: &[Sample]| samples.iter().map(beyond).max().unwrap_or_default();
        let earlier = most(&self.0[quarter..2 * quarter]);
        let later = most(&self.0[self.0.len() - quarter..]);
        let series: Vec<String> =
            self.0.iter().map(|sample| format!("{}/{}", sample.rss_kib, sample.live_kib)).collect();
        write!(
            line,
            "; memory beyond live bytes {earlier} KiB earlier, {later} later (memory/live: {})",
            series.join(" ")
        )
        .expect("it is text");
        assert!(later <= earlier + MARGIN_KIB, "memory grows: {line}");
    }
}

//! A server that is stopped while time passes and clients write: once it continues, all that is due
//! is done and all requests have replies.

use super::{Outcome, Run};
use crate::harness::client::Client;
use crate::harness::process::Daemon;
use crate::harness::request::{numbered_body, put};
use fastrand::Rng;
use rustix::process::Signal;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub fn go_on(run: &Run) -> Outcome {
    let (daemon, address) = Daemon::on_loopback(&[]);
    let mut random = Rng::with_seed(run.seed);
    let mut rounds = 0;
    let mut answered = 0;
    loop {
        let past_all_timeouts = Duration::from_millis(1_100);
        let more = random.u64(..run.size(1, 2_000) as u64);
        let span = past_all_timeouts + Duration::from_millis(more);
        answered += stop_once(run, &daemon, address, span);
        rounds += 1;
        if run.is_whole() {
            answered += stop_often(&daemon, address, &mut random);
        }
        if !run.has_time() {
            return Ok(format!("{rounds} rounds, {answered} requests answered"));
        }
    }
}

/// Stops the server until timers of one second are due; returns the number of requests.
fn stop_once(run: &Run, daemon: &Daemon, address: SocketAddr, span: Duration) -> usize {
    let mut due = Due::begin(address);
    let mut writers: Vec<Client> = (0..10).map(|_| Client::connect(address)).collect();
    for client in &mut writers {
        client.expect("use written\r\n", "USING written");
    }
    daemon.signal(Signal::STOP);
    let stopped_at = Instant::now();
    due.ask();
    let requests = run.size(20, 200);
    for (index, client) in writers.iter_mut().enumerate() {
        for number in 0..requests as u64 {
            client.send(put(0, 0, 60, numbered_body(number * 10 + index as u64, 100)));
        }
    }
    // New connections find room in the backlog.
    let mut newcomers: Vec<Client> = (0..20).map(|_| Client::connect(address)).collect();
    for client in &mut newcomers {
        client.send("list-tube-used\r\n");
    }
    thread::sleep(span.saturating_sub(stopped_at.elapsed()));
    daemon.signal(Signal::CONT);

    due.receive();
    for client in &mut newcomers {
        assert_eq!(client.reply().line, "USING default");
    }
    let mut ids: Vec<u64> = Vec::new();
    for client in &mut writers {
        let first = ids.len();
        for _ in 0..requests {
            ids.push(client.reply().number("INSERTED").expect("there is room"));
        }
        assert!(ids[first..].is_sorted(), "replies are out of order");
    }
    let mut client = Client::connect(address);
    for id in &ids {
        client.expect(format!("delete {id}\r\n"), "DELETED");
    }
    assert_eq!(client.stat("current-jobs-ready"), 0);
    ids.len()
}

/// Clients for whom something is due in a second or two.
struct Due {
    /// Waits for nothing.
    waiting: Client,
    /// Holds a job for a second.
    holder: Job,
    /// Waits for one with a delay.
    delayed: Job,
    /// Waits for one in a tube that is paused.
    paused: Job,
    /// Waits while its own job has less and less time.
    soon: Job,
}

/// A client and the only job in its tube.
struct Job {
    client: Client,
    id: u64,
}

impl Due {
    fn begin(address: SocketAddr) -> Due {
        let mut holder = Job::put(address, "held", 0, 1);
        let mut paused = Job::put(address, "paused", 0, 60);
        let mut soon = Job::put(address, "soon", 0, 2);
        paused.client.expect("pause-tube paused 1\r\n", "PAUSED");
        for job in [&mut holder, &mut soon] {
            job.client.send("reserve\r\n");
            job.expect_reserved();
        }
        let delayed = Job::put(address, "delayed", 1, 60);
        Due { waiting: Client::connect(address), holder, delayed, paused, soon }
    }

    fn ask(&mut self) {
        self.waiting.send("reserve-with-timeout 1\r\n");
        for job in [&mut self.delayed, &mut self.paused, &mut self.soon] {
            job.client.send("reserve\r\n");
        }
    }

    fn receive(self) {
        let Due { mut waiting, mut holder, mut delayed, mut paused, mut soon } = self;
        // Its timeout began when the server read the command.
        assert_eq!(waiting.reply().line, "TIMED_OUT");
        delayed.expect_reserved();
        paused.expect_reserved();
        // Its time to run was nearly over when the server went on, or quite.
        let reply = soon.client.reply();
        let is_over = reply.number("RESERVED") == Some(soon.id);
        assert!(is_over || reply.line == "DEADLINE_SOON", "{}", reply.line);
        holder.client.expect(format!("touch {}\r\n", holder.id), "NOT_FOUND");
        let stats = holder.client.ask(format!("stats-job {}\r\n", holder.id));
        assert_eq!(stats.value("timeouts"), Some(1));
        for Job { mut client, id } in [holder, delayed, paused, soon] {
            client.expect(format!("delete {id}\r\n"), "DELETED");
        }
    }
}

impl Job {
    fn put(address: SocketAddr, tube: &str, delay_s: u32, ttr_s: u32) -> Job {
        let mut client = Client::connect(address);
        client.expect(format!("use {tube}\r\n"), &format!("USING {tube}"));
        client.expect(format!("watch {tube}\r\n"), "WATCHING 2");
        client.expect("ignore default\r\n", "WATCHING 1");
        let reply = client.ask(put(1, delay_s, ttr_s, b"job"));
        Job { client, id: reply.number("INSERTED").expect("there is room") }
    }

    fn expect_reserved(&mut self) {
        assert_eq!(self.client.reply().line, format!("RESERVED {} 3", self.id));
    }
}

/// Clients work while the server is stopped and continued again and again.
fn stop_often(daemon: &Daemon, address: SocketAddr, random: &mut Rng) -> usize {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let work = |seed: u64| {
            let mut client = Client::connect(address);
            let tube = format!("own-{seed}");
            client.expect(format!("use {tube}\r\n"), &format!("USING {tube}"));
            client.expect(format!("watch {tube}\r\n"), "WATCHING 2");
            let mut answered = 2;
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let body = numbered_body(number, 3_000);
                let id = client.put(&body);
                let reply = client.ask("reserve-with-timeout 5\r\n");
                assert_eq!(reply.number("RESERVED"), Some(id), "{}", reply.line);
                assert!(reply.body == body, "the body of job {id} is another one");
                client.expect(format!("delete {id}\r\n"), "DELETED");
                answered += 3;
            }
            answered
        };
        let workers: Vec<_> = (0..4).map(|seed| scope.spawn(move || work(seed))).collect();
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(random.u64(1..30)));
            daemon.signal(Signal::STOP);
            thread::sleep(Duration::from_millis(random.u64(1..50)));
            daemon.signal(Signal::CONT);
        }
        is_over.store(true, Ordering::Relaxed);
        workers.into_iter().map(|worker| worker.join().expect("it was served well")).sum()
    })
}
